"""Jobs of several workers on one device: :mod:`transformer` with stock DeepSpeed, or with the block."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench import Experiment
from common import WORKERS, Job, Training, bamboo_job, ended_well, run_stock, write_config
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from bamboo_ds.cli.demo.compare import compare_checkpoints, compare_losses

#: Steps that do not count for times.
WARM_UP = 3
SCRIPT = WORKERS / "transformer.py"
#: What carries collectives, and stock DeepSpeed's messages; NCCL takes several workers of a GPU for one under names of
#: different hosts, which its makers do not support.
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Case:
    """A job: its training, stages, and pipelines."""

    training: Training
    stages: int
    pipelines: int = 1

    @property
    def workers(self) -> int:
        """One for each role."""
        return self.stages * self.pipelines

    @property
    def name(self) -> str:
        """For people and folders."""
        return f"{self.training.name}-{self.stages}x{self.pipelines}"


@dataclass(frozen=True)
class Model:
    """The transformer; boundary tensors are (micro_batch, context, width)."""

    layers: int
    width: int
    context: int
    heads: int = 8
    micro_batch: int = 4
    attention: str = "plain"

    @property
    def arguments(self) -> list[str]:
        """Of the worker."""
        numbers = {"layers": self.layers, "width": self.width, "context": self.context, "heads": self.heads}
        given = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        return [*given, "--attention", self.attention]


class Jobs:
    """Runs jobs of one model within the time of ``run``."""

    def __init__(self, run: Experiment, model: Model, micro_batches: int, backend: str = "gloo") -> None:
        self._run, self._model, self._micro_batches, self._backend = run, model, micro_batches, backend
        self.variables = {"DS_ACCELERATOR": run.kind, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if run.kind == "cuda":
            # The first one that is visible; all workers are on it.
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
            self.variables |= {"CUDA_VISIBLE_DEVICES": first, "LOCAL_RANK": "0"}

    def prepare(
        self, case: Case, kind: str, steps: int, block: Mapping[str, Any] | None, more: Sequence[str] = ()
    ) -> tuple[Path, list[str]]:
        """The folder of a job, and the arguments of its workers.

        Raises:
            TimeOver: there is none for it.
        """
        self._run.timeout_s(f"{case.name} {kind}", least_s=15 if self._run.gpu else 5)
        folder = self._run.folder(f"{case.name}-{kind}")
        changes = {**case.training.config, "train_micro_batch_size_per_gpu": self._model.micro_batch}
        given = None if block is None else {"comm": {"cuda_backend": self._backend}, **block}
        config = write_config(folder, self._micro_batches, given, **changes)
        arguments = ["--deepspeed_config", str(config), "--out", str(folder), "--stages", str(case.stages)]
        arguments += ["--steps", str(steps), *self._model.arguments, *more]
        return folder, [*arguments, *(["--host-ids"] if self._backend == "nccl" else [])]

    def stock(self, case: Case, steps: int, more: Sequence[str] = ()) -> Job:
        """Stock DeepSpeed, to its end."""
        folder, arguments = self.prepare(case, "stock", steps, None, more)
        arguments += ["--gloo"] if self._backend == "gloo" else []
        return run_stock(folder, case.workers, SCRIPT, arguments, self._run.left_s(), self.variables)

    def block(self, case: Case, kind: str, steps: int, block: Mapping[str, Any], more: Sequence[str] = ()) -> Job:
        """With the block, to its end."""
        folder, arguments = self.prepare(case, kind, steps, block, more)
        with self.started(case, folder, arguments) as process:
            return ended_well(folder, [process], self._run.left_s())

    @contextmanager
    def started(
        self,
        case: Case,
        folder: Path,
        arguments: Sequence[str],
        job: str | None = None,
        script: Path = SCRIPT,
        **variables: str,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A job with the block, ended when the body is left; with further ``variables`` of its environment."""
        given = {**self.variables, **variables}
        with bamboo_job(folder, case.workers, script, arguments, job, variables=given) as process:
            yield process


def seconds(job: Job) -> float:
    """Median of the iterations at rank 0."""
    return median(job.results()[0]["seconds"][WARM_UP:])


def peaks(job: Job) -> list[int]:
    """Bytes of each worker at its peak, by rank: of the device's allocator, or of the process on a CPU."""
    return [next(iter(result["memory"].values())) for _, result in sorted(job.results().items())]


def checkpoint_differences(expected: Path, found: Path) -> list[str]:
    """Where the final checkpoints of two jobs differ."""
    # Of DeepSpeed's own, in its files of ZeRO.
    with torch.serialization.safe_globals([fragment_address, LossScaler, ZeroStageEnum]):
        compared = compare_checkpoints(expected / "final", found / "final")
    return [f"{each.what}: {each.differences or 'nothing to compare'}" for each in compared if not each.equal]


def differences(expected: Job, found: Job, steps: int) -> list[str]:
    """Where losses and checkpoints of two jobs of so many steps differ."""
    losses = compare_losses(expected.folder, found.folder, steps)
    told = [] if losses.equal else [f"{losses.what}: {losses.differences or 'nothing to compare'}"]
    return told + checkpoint_differences(expected.folder, found.folder)
