"""Replication: reduced gradients from owners to shadows, the comparison of replicas, the exchange of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...state import Tree
from ...topology import Role
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..replicas.construction import Construction
from ..stage.commit import Measured
from ..stage.runtime import StageRuntime
from .boundaries import Boundaries
from .mismatches import Mismatches
from .steps import Steps

#: How many of the tensors that differ are named.
_NAMED = 100


@dataclass(eq=False)
class Replication(InContext):
    """Keeps replicas, and replicas under construction, equal to their owners.

    Attributes:
        differing: of this member's replicas that differ: the names of the tensors, if they are known.
    """

    boundaries: Boundaries
    steps: Steps
    constructions: dict[Role, Construction]
    mismatches: Mismatches = field(init=False)
    differing: dict[Role, list[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.mismatches = Mismatches(self.settings.redundancy.verify_every)

    def send(self) -> None:
        """Send what the step of the bound role needs to its shadow and to those that build a replica."""
        runtime = self.binding.current
        assert runtime.reduced is not None and runtime.measured is not None
        check = -1 if runtime.checksum is None else runtime.checksum
        parts = (
            runtime.tensor_checksums if check >= 0 and self.mismatches.has(runtime.role, self.progress.steps) else []
        )
        trained = runtime.trains() if runtime.trained else []
        counts = (check, len(runtime.reduced), len(parts), len(trained))
        header = torch.tensor([*counts, *parts, *trained, *runtime.checksums()], dtype=torch.int64)
        loss = runtime.reduced_loss if runtime.reduced_loss is not None else torch.empty(0, dtype=torch.float64)
        changed = self.progress.changed if runtime is self.binding.local else ()
        # An heir that has done no passes of its own passes on what the lost owner's layers keep.
        kept = runtime.received_layers
        places, *layers = as_message(runtime.layers.capture(changed) if kept is None else kept)
        measured = torch.tensor([runtime.measured.overflow, *runtime.measured.squares], dtype=torch.float64)
        payload = (header, measured, loss, places, *runtime.reduced, *layers)
        for lane in self.epoch.lanes.replicas(runtime.role):
            self.epoch.transport.send(lane, self.progress.sequence, payload)

    def receive(self, role: Role) -> None:
        """Receive the same of ``role``, and compare its replica with the owner where it is time."""
        lane = self.epoch.lanes.replica(role, self.epoch.member)
        payload = self.boundaries.receive(lane, self.progress.sequence, (role, "replica", None))
        assert isinstance(payload, tuple)
        header, measured, loss, places, *tensors = payload
        check, count, parted, changed, *numbers = header.tolist()
        parts, trained, consumed = numbers[:parted], numbers[parted : parted + changed], numbers[parted + changed :]
        trained = [bool(each) for each in trained]
        reduced = tensors[:count]
        layers = from_message((places, *tensors[count:]))
        self.epoch.transport.take(self.epoch.lanes.told[role, self.epoch.member])  # the same
        construction = self.constructions.get(role)
        if construction is not None:
            construction.incoming = reduced, layers, trained
            return
        replica = self.binding.runtimes[role]
        replica.layers.changes.follow(*layers["changes"])
        replica.reduced, replica.received_layers = reduced, layers
        if trained:
            replica.train_only(trained)
        overflow, *squares = measured.tolist()
        replica.measured = Measured(bool(overflow), tuple(squares))
        replica.reduced_loss = loss if loss.numel() else None
        replica.consumed = dict(enumerate(consumed))
        if check >= 0 and replica.checksum is not None and replica.valid:
            self._compare(replica, check, parts)

    def send_layers(self, role: Role, layers: Tree | None) -> None:
        """Send what the layers of ``role`` keep after an evaluation; ``None``: what they have kept before."""
        for lane in self.epoch.lanes.replicas(role):
            self.epoch.transport.send(lane, self.progress.sequence, () if layers is None else as_message(layers))

    def receive_layers(self, role: Role) -> Tree | None:
        """Receive the same."""
        lane = self.epoch.lanes.replica(role, self.epoch.member)
        payload = self.epoch.transport.recv(lane, self.progress.sequence)
        assert isinstance(payload, tuple)
        return from_message(payload) if payload else None

    def _compare(self, replica: StageRuntime, expected: int, parts: Sequence[int]) -> None:
        """Compare the replica with its owner's checksum, and with those of its tensors where they are told."""
        role, step = [replica.role.pipeline, replica.role.stage], self.progress.steps
        if replica.checksum == expected:
            self.epoch.channel.event("replica_verified", step=step, role=role, checksum=f"{expected:08x}")
            return
        replica.valid = False
        names = [name for name, _ in replica.named_tensors()]
        differ = [n for n, own, other in zip(names, replica.tensor_checksums, parts, strict=False) if own != other][
            :_NAMED
        ]
        self.differing[replica.role] = differ
        self.epoch.channel.event(
            "replica_mismatch",
            step=step,
            role=role,
            expected=f"{expected:08x}",
            found=f"{replica.checksum:08x}",
            tensors=differ,
        )

    def step(self, role: Role) -> None:
        """The step of ``role``'s replica; one under construction does it later."""
        construction = self.constructions.get(role)
        if construction is None:
            self.steps.step_replica(self.binding.runtimes[role])
            return
        assert self.progress.position is not None
        construction.keep(self.progress.sequence, self.progress.agreed, self.progress.position)

    def exchange_shards(self) -> None:
        """Bring the parameters of all runtimes up to date, after steps that did so with their own shards only.

        All members take part, once between two operations. A runtime that is up to date gets what it has.
        """
        runtimes, transport, sequence = self.binding.runtimes, self.epoch.transport, self.progress.sequence
        self.binding.refresh()
        lanes = self.epoch.lanes.shards.items()
        for (role, _), lane in lanes:
            if lane.source == self.epoch.member:
                transport.send(lane, sequence, tuple(runtimes[role].optimizer.shard()))
        shards = {role: runtime.optimizer.shard() for role, runtime in runtimes.items() if runtime.owned}
        for (role, _), lane in lanes:
            if lane.destination == self.epoch.member:
                shards[role] = list(transport.recv(lane, sequence))  # type: ignore[arg-type]
        for runtime in runtimes.values():
            for role in self.epoch.layout.siblings(runtime.role):
                if role in shards and role != runtime.role:
                    runtime.optimizer.fill(self.epoch.layout.copy_of(role), shards[role])
            runtime.stale = False
        transport.drain()
