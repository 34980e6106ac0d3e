"""Undisturbed runs that many tests compare with."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from . import far_device
from .jobs import TRAIN, Result, run_bamboo, run_stock, write_config
from .nccl import groups

#: A run that tests need so many steps of, or fewer, is made with so many.
LENGTHS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass
class Beginning(Result):
    """The first ``steps`` steps of a longer run of stock DeepSpeed, which may have written more checkpoints."""

    steps: int
    micro_batches: int
    evaluate_every: int

    def ranks(self) -> dict[int, dict[str, Any]]:
        found = super().ranks()
        for rank, dump in found.items():
            (role,) = dump["roles"]
            state = torch.load(self.out / f"state-{rank}-{self.steps}.pt", weights_only=True)
            evaluations = self.steps // self.evaluate_every if self.evaluate_every else 0
            dump.update(
                losses=dump["losses"][: self.steps],
                evaluations=dump["evaluations"][:evaluations],
                roles={role: state},
            )
        return found

    def samples(self) -> dict[int, list[int]]:
        batch = json.loads((self.out / "ds_config.json").read_text())["train_micro_batch_size_per_gpu"]
        return {rank: read[: self.steps * self.micro_batches * batch] for rank, read in super().samples().items()}


class References:
    """Makes each run once and keeps it in ``folder``, for all processes that use the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(
        self,
        stages: int,
        pipelines: int,
        micro_batches: int,
        *arguments: str,
        own: bool = False,
        script: Path = TRAIN,
        **config: Any,
    ) -> Result:
        """The run of ``script`` with ``arguments``, among them ``--steps``."""
        size = stages, pipelines, micro_batches
        options = dict(itertools.pairwise(arguments))
        if own or script != TRAIN or "--reload-at" in options:
            return self._run(size, arguments, own, script, config)
        steps, at = int(options["--steps"]), arguments.index("--steps")
        rest = (*arguments[:at], *arguments[at + 2 :], "--snapshots", "--steps")
        longer = [(*rest, str(length)) for length in LENGTHS if steps <= length]
        made = [each for each in longer if (self._place(size, each, own, script, config) / "done").exists()]
        run = self._run(size, (made or longer)[0], own, script, config)
        every = int(options.get("--evaluate-every", 0))
        return Beginning(run.out, run.exit_code, run.output, steps, micro_batches, every)

    def _place(
        self, size: tuple[int, int, int], arguments: tuple[str, ...], own: bool, script: Path, config: dict[str, Any]
    ) -> Path:
        # The sums of more than two ranks, and random numbers, are others there.
        stand_ins = [name in os.environ for name in (groups.SEED, far_device.SEED)] if own else []
        key = repr((size, arguments, own, stand_ins, script, sorted(config.items())))
        return self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]

    def _run(
        self, size: tuple[int, int, int], arguments: tuple[str, ...], own: bool, script: Path, config: dict[str, Any]
    ) -> Result:
        folder = self._place(size, arguments, own, script, config)
        stages, pipelines, micro_batches = size
        with FileLock(f"{folder}.lock"):
            done = folder / "done"
            if not done.exists():
                if folder.exists():
                    shutil.rmtree(folder)  # of a run that has failed
                folder.mkdir()
                file = write_config(folder, {} if own else None, micro_batches, **config)
                run = run_bamboo if own else run_stock
                result = run(folder, stages * pipelines, ["--stages", str(stages), *arguments], file, script)
                assert result.exit_code == 0, result.output[-4000:]
                done.write_text(result.output)
            return Result(folder, 0, done.read_text())
