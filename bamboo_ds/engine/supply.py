"""Where the batches of an operation come from, and the account of what iterations have consumed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import EpochChanged
from ..topology import Plan, Role, batch_sources
from .accounts import Accounts, Consumed
from .data import Batches, Dataset
from .deepspeed_adapter import DeepSpeedAdapter
from .lanes import BATCH_PARTS, Stream
from .records import CurrentEpoch, Progress
from .runtime import RuntimeBinding


@dataclass(eq=False)
class BatchSupply:
    """Supplies batches to the roles of this member, and through it to others."""

    ds: DeepSpeedAdapter
    binding: RuntimeBinding
    epoch: CurrentEpoch
    progress: Progress
    batches: Batches
    accounts: Accounts
    dataset: Dataset | None
    dataset_iterator: Any
    _feeding: frozenset[int] = field(default=frozenset(), init=False)

    # -- sources ------------------------------------------------------------------------------------------

    def use_training(self) -> None:
        """The next operation is an iteration."""
        if self.dataset is not None and self.ds.data_iterator is self.dataset_iterator:
            self.batches.use_dataset(self.dataset, self.progress.consumed, self.ds.batch_fn)
        else:
            self.use_iterator(self.ds.data_iterator)

    def use_iterator(self, iterator: Any) -> None:
        """In the next operation batches come from the script's ``iterator``.

        Of several slices mostly the first one has an iterator, and ``batch_fn`` gives the others what it has read.
        """
        pipeline = self.binding.local.role.pipeline
        if self.epoch.member not in batch_sources(self.epoch.plan, pipeline):
            iterator = None
        elif iterator is None and self.epoch.layout.slices > 1:
            iterator = itertools.repeat(None)
        self.batches.use_iterator(pipeline, iterator, self.ds.batch_fn)

    def skip(self, iterator: Any, count: int) -> None:
        """Draw what the others drew from their iterators in an operation that is replayed."""
        at_end = self.binding.local.role.stage in (0, self.epoch.layout.stages - 1)
        if at_end and iterator is not None and iterator is not self.dataset_iterator:
            for _ in range(count):
                next(iterator)

    # -- lanes --------------------------------------------------------------------------------------------

    def connect(self, received: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Use the lanes of a new epoch, given what each member has received of this operation."""
        member = self.epoch.member
        serving, sources = [], []
        for (stream, role), lane in self.epoch.lanes.streams.items():
            part = BATCH_PARTS.get(stream)
            if part is None:
                continue
            if lane.source == member:
                has = received.get(lane.destination, {}).get(str(role.pipeline), {})
                serving.append((role.pipeline, lane, part, has.get(part, 0)))
            if lane.destination == member:
                sources.append((role.pipeline, lane, part))
        self._feeding = frozenset(pipeline for pipeline, _, part, _ in serving if part == "inputs")
        self.batches.connect(self.epoch.transport, serving, sources)

    def draw_ahead(self, micro_batches: int) -> None:
        """Draw now what others could otherwise wait for in vain: inputs, and all where no pass here draws in time."""
        runtimes, stages = self.binding.runtimes, self.epoch.layout.stages

        def eager(pipeline: int) -> bool:
            ends = [runtimes[role] for stage in (0, stages - 1) if (role := Role(pipeline, stage)) in runtimes]
            # One that was taken over with its reduced gradients does no passes any more.
            passing = [end for end in ends if (end.owned or end.helps) and end.reduced is None]
            draws = any(any(end.at_ends(part, stages)) for end in passing for part in end.parts)
            return pipeline in self._feeding or not draws

        self.batches.draw_ahead(micro_batches, eager)

    def collect_leftovers(self, micro_batches: int, gradients: bool) -> None:
        """Take in labels (and gradients for shadows) that were not needed; their senders drained before the commit."""
        try:
            self.batches.end(micro_batches)
            for (stream, _), lane in self.epoch.lanes.streams.items() if gradients else ():
                if stream is Stream.SHADOW_GRADIENT and lane.destination == self.epoch.member:
                    # Those of the next iteration depend on what this member does in it.
                    self.epoch.transport.take(lane)
        except EpochChanged:
            # The operation has committed; what was left of it in the lanes is gone with their epoch.
            self.batches.drop()

    # -- the ledger ---------------------------------------------------------------------------------------

    def account(self) -> None:
        """Write what the iteration that has just committed has consumed, if there is a ledger."""
        if not self.accounts.on:
            return
        self.binding.refresh()
        self.accounts.commit(
            Consumed(
                step=self.progress.steps,
                global_step=self.binding.local.attributes["global_steps"],
                checksums=self.progress.agreed.consumed,
                position=self.progress.consumed - self.ds.micro_batches if self.batches.shared else None,
            )
        )
        self.write_ledger(self.epoch.plan)

    def write_ledger(self, plan: Plan) -> None:
        """Write the lines of the last iteration that are due under ``plan``."""
        with self.binding.for_script():  # a dataset may tell its length itself
            self.accounts.write(plan, self.dataset)
