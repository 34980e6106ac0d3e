"""torchft among the pipelines of :mod:`whole`: each is a replica group, each stage averages with its like.

The quorum is awaited before a step, so that a group which comes has the weights of the others when it begins.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo

#: A collective that lacks a member ends by an error of its connection at once; this is for one that is silent.
_TIMEOUT = timedelta(seconds=30)
_QUORUM = timedelta(seconds=120)


class TorchftPeers:
    """What :class:`whole.HubPeers` does, by torchft's Manager."""

    def __init__(self, engine: Any, state: Any, arguments: argparse.Namespace) -> None:
        self._state, self._engine = state, engine
        self._folder: Path = arguments.checkpoint
        self._stage, self._stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._every: int = arguments.save_every
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=lambda saved: state.load(saved["state"]),
            state_dict=lambda: {"state": state.save()},
            min_replica_size=1,
            use_async_quorum=False,
            init_sync=False,
            timeout=_TIMEOUT,
            quorum_timeout=_QUORUM,
            connect_timeout=_TIMEOUT,
            lighthouse_addr=arguments.lighthouse,
            replica_id=f"pipeline{arguments.slot}",
            hostname="127.0.0.1",
        )
        self.pipelines = 0
        self._meet(arguments.slot, arguments.meet)
        newest = self._newest()
        if newest:
            state.load(torch.load(self._file(newest, self._stage), weights_only=True))
            self._manager.load_state_dict({"step": newest, "batches_committed": 0})

    def _meet(self, slot: int, groups: int) -> None:
        """Wait until all stages of so many groups are here: a quorum need not have them all."""
        (self._folder / f"meet-{slot}-{self._stage}").touch()
        deadline = time.monotonic() + _QUORUM.total_seconds()
        while len(list(self._folder.glob("meet-*"))) < groups * self._stages:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{groups} groups have not come within {_QUORUM}")
            time.sleep(0.01)

    @property
    def step(self) -> int:
        """Steps committed."""
        return int(self._manager.current_step())

    def begin(self) -> None:
        """A step begins: agree on who takes part, and catch up."""
        self._manager.start_quorum()

    def agree(self) -> bool:
        """Make the gradients those of all groups; whether there is a step."""
        gradients = self._state.gradients()
        self._manager.allreduce(gradients).wait()
        if not self._manager.should_commit():
            return False
        self._state.set_gradients(gradients)
        self.pipelines = int(self._manager.num_participants())
        return True

    def end(self) -> None:
        """The step is done; sometimes the first group saves it, while it goes on."""
        step = self.step
        if self._every and step % self._every == 0 and self._manager.participating_rank() == 0:
            threading.Thread(target=self._save, args=(step, self._state.save())).start()

    def _save(self, step: int, state: torch.Tensor) -> None:
        file = self._file(step, self._stage)
        new = file.with_suffix(f".{os.getpid()}")
        torch.save(state, new)
        new.rename(file)

    def _file(self, step: int, stage: int) -> Path:
        return self._folder / f"step{step}-stage{stage}.pt"

    def _newest(self) -> int:
        """The newest step that all stages have saved; 0 if there is none."""
        steps = {int(file.name.split("-")[0].removeprefix("step")) for file in self._folder.glob("step*-stage0.pt")}
        whole = [step for step in steps if all(self._file(step, s).exists() for s in range(self._stages))]
        return max(whole, default=0)
