"""What committed iterations have consumed, for the ledger (``bamboo.observe.ledger``).

A first or last stage notes the checksum of each micro-batch that it loads. The checksums travel with the gradients that
the micro-batches contribute to: to the shadow with the reduced gradients, to everybody with the commit. So nothing
commits unaccounted, and a role that is taken over is accounted for by what its lost owner used.

The owner of a pipeline's first stage writes the pipeline's line when the iteration has committed. It may be lost in
between; therefore the owner of that stage in a new epoch writes the line of the last iteration, too, unless it has
done that before. When an iteration commits, the lines of all iterations before it are written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict

from ...comm.transport import Payload
from ...observe.ledger import LedgerLine, LedgerWriter
from ...topology import Plan, Role
from ..stage.tracing import checksum
from .dataset import Dataset


def payload_checksum(payload: Payload) -> int:
    """CRC-32 over shapes, types and contents; whether a single tensor is in a tuple makes no difference."""
    value = 0
    for tensor in () if payload is None else (payload,) if torch.is_tensor(payload) else payload:
        value = checksum(tensor, value)
    return value


@dataclass(frozen=True)
class Consumed:
    """What one iteration has consumed.

    Attributes:
        step: its number in the job, from 1 on.
        global_step: DeepSpeed's number, which a loaded checkpoint sets back or forth.
        checksums: by pipeline: of its inputs, then of its labels, by micro-batch.
        position: number of the first micro-batch of each pipeline since the job has begun, where batches are those of
            ``training_data``.
    """

    step: int
    global_step: int
    checksums: tuple[tuple[int, ...], ...]
    position: int | None


class LedgerReport(BaseModel):
    """What a member that joins has to know of the ledger.

    Attributes:
        folder: of the ledger.
        last: what the last iteration has consumed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    last: Consumed | None


class Accounts:
    """Writes this member's part of the ledger. All methods belong to the main thread.

    Args:
        folder: of the ledger; ``None``: there is none.
        member: this member's id.

    Attributes:
        folder: the same, absolute.
    """

    def __init__(self, folder: str | None, member: str) -> None:
        self.folder = None if folder is None else os.path.abspath(folder)
        self._member = member
        self._run = ""
        self._writer: LedgerWriter | None = None
        self._last: Consumed | None = None
        self._written: set[int] = set()  # pipelines whose line of the last iteration was written here

    @property
    def on(self) -> bool:
        """Whether there is a ledger."""
        return self.folder is not None

    def begin(self, run: str, folder: str | None) -> None:
        """The members have agreed on ``folder``; ``run`` tells a start of the job from others that write there."""
        self._run, self.folder = run, folder
        if folder is not None:
            self._writer = LedgerWriter(folder, self._member)

    def report(self) -> LedgerReport | None:
        """What a member that joins has to know; ``None``: there is no ledger."""
        return None if self.folder is None else LedgerReport(folder=self.folder, last=self._last)

    def follow(self, run: str, report: LedgerReport | None) -> None:
        """Join a job: take over another member's :meth:`report`."""
        self.begin(run, None if report is None else report.folder)
        if report is not None:
            self._last = report.last

    def commit(self, consumed: Consumed) -> None:
        """An iteration has committed."""
        self._last = consumed
        self._written.clear()

    def write(self, plan: Plan, dataset: Dataset | None) -> None:
        """Write the lines of the last iteration that are due to the owner of a first stage under ``plan``."""
        if self._writer is None or self._last is None:
            return
        # All slices of a copy of the model use the same batches: one speaks for them.
        for pipeline in range(0, plan.world.pipelines, plan.world.slices):
            if pipeline in self._written or plan.owner(Role(pipeline, 0)) != self._member:
                continue
            self._written.add(pipeline)
            self._writer.append(self._line(self._last, pipeline, plan, dataset), plan.lineage)

    def _line(self, last: Consumed, pipeline: int, plan: Plan, dataset: Dataset | None) -> LedgerLine:
        checksums = [f"{value:08x}" for value in last.checksums[pipeline]]
        micro_batches, number = len(checksums) // 2, pipeline // plan.world.slices
        found = []
        if dataset is not None and last.position is not None:
            found = [dataset.indices(number, last.position + m) for m in range(micro_batches)]
        return LedgerLine(
            run=self._run,
            step=last.step,
            global_step=last.global_step,
            pipeline=number,
            pipelines=plan.world.copies,
            inputs=checksums[:micro_batches],
            labels=checksums[micro_batches:],
            position=last.position,
            samples=dataset.size if found and dataset is not None else None,
            passes=[number for number, _ in found] or None,
            indices=[indices for _, indices in found] or None,
            member=self._member,
            epoch=plan.epoch,
        )
