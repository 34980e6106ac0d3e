"""Replication: reduced gradients from owners to shadows, the comparison of replicas, the exchange of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ...state import Tree
from ...topology import Role
from ..context.channels import Stream, gathers
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..replicas.construction import Construction, Kept
from ..stage.commit import Measured
from ..stage.runtime import StageRuntime
from ..stage.schedulers import SchedulerPosition
from ..stage.work import Results
from .boundaries import Boundaries
from .exactness import ExactChecks
from .steps import StepInputs, Steps

#: How many of the tensors that differ are named.
_NAMED = 100


class Mismatches:
    """Replicas that differed from their owner when they were last compared; equal on all members of an epoch.

    A replica that differs is copied again, which mends what a memory error has done once. One that differs at the next
    comparison too will differ for ever: something that the optimizer step depends on is not part of a role's state. It
    is not copied again, and is no holder of the state any more.

    Args:
        every: iterations between two comparisons.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._last: dict[Role, int] = {}

    def begin(self) -> None:
        """An epoch begins: a replica that differed is dropped, and its role gets a new one."""
        self._last.clear()

    def has(self, role: Role, step: int) -> bool:
        """Whether ``role``'s comparison before the one in iteration ``step`` has found a difference."""
        # What is copied after an iteration cannot be compared in the next one.
        return role in self._last and step <= self._last[role] + self._every + 1

    def note(self, role: Role, step: int) -> bool:
        """The replica of ``role`` differed in iteration ``step``; whether it will not be mended."""
        lasting = self.has(role, step)
        self._last[role] = step
        return lasting


@dataclass(frozen=True)
class StepMessage:
    """The inputs of a role's optimizer step, as they are sent.

    Attributes:
        reduced: reduced gradients.
        layers: what the layers keep after the passes.
        trained: which parameters are trainable, if the script has changed that.
        measured: whether the gradients overflow, and their squares.
        loss: of a last stage.
        consumed: checksums of micro-batches, by number.
        checksum: of the owner's state after the last step, if it is to be compared.
        tensors: the same of the single tensors, if the replica has differed, or a difference may end a member.
    """

    reduced: list[torch.Tensor]
    layers: Tree
    trained: list[bool]
    measured: tuple[bool, tuple[float, ...]]
    loss: torch.Tensor | None
    consumed: dict[int, int]
    checksum: int | None
    tensors: list[int]


@dataclass(eq=False)
class Replication(InContext):
    """Keeps replicas, and replicas under construction, equal to their owners.

    Attributes:
        differing: of this member's replicas that differ: the names of the tensors, if they are known.
    """

    boundaries: Boundaries
    checks: ExactChecks
    steps: Steps
    constructions: dict[Role, Construction]
    mismatches: Mismatches = field(init=False)
    differing: dict[Role, list[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.mismatches = Mismatches(self.settings.redundancy.verify_every)

    def send(self) -> None:
        """Sends what the step of the bound role needs to its shadow and to those that build a replica."""
        runtime = self.binding.current
        results, verification = runtime.results, runtime.verification
        assert results.reduced is not None and results.measured is not None
        changed = self.progress.script.changed if runtime is self.binding.local else ()
        named = self.mismatches.has(runtime.role, self.progress.steps) or verification.shared is not None
        message = StepMessage(
            results.reduced,
            # An heir that has done no passes of its own passes on what the lost owner's layers keep.
            runtime.layers.capture(changed) if results.layers is None else results.layers,
            runtime.trains() if runtime.trained else [],
            (results.measured.overflow, results.measured.squares),
            results.loss,
            results.consumed,
            verification.checksum,
            verification.tensors if named and verification.checksum is not None else [],
        )
        payload = as_message(vars(message))
        for channel in self.epoch.channels.of(Stream.REPLICA, runtime.role):
            channel.send(self.progress.sequence, payload)

    def receive(self, role: Role) -> None:
        """Receives the same of ``role``, and compares its replica with the owner where it is time.

        The step of the iteration before is taken first, so that both have taken the same.
        """
        parked = role in self.constructions or self.binding.runtimes[role].parked
        if role not in self.constructions:
            self.binding.runtimes[role].catch_up()
        channel = self.epoch.channels.replica(role, self.epoch.member)
        payload = self.boundaries.receive(channel, self.progress.sequence, (role, "replica", None), parked)
        message = StepMessage(**from_message(payload))
        same = self.epoch.channels.to(Stream.TOLD, role, self.epoch.member)
        assert same is not None
        same.discard(self.progress.sequence + 1)
        construction = self.constructions.get(role)
        measured = Measured(*message.measured)
        results = Results({}, message.reduced, measured, message.loss, message.layers, message.consumed)
        if construction is not None:
            construction.incoming = results, message.trained
            return
        replica = self.binding.runtimes[role]
        replica.layers.changes.follow(*message.layers["changes"])
        if message.trained:
            replica.train_only(message.trained)
        replica.results = results
        verification = replica.verification
        if message.checksum is not None and verification.checksum is not None and verification.valid:
            self._compare(replica, message.checksum, message.tensors)

    def _compare(self, replica: StageRuntime, expected: int, parts: Sequence[int]) -> None:
        """Compares the replica with its owner's checksum, and with those of its tensors where they are told."""
        role, step = [replica.role.pipeline, replica.role.stage], self.progress.steps
        if replica.verification.checksum == expected:
            self.job.channel.event("replica_verified", step=step, role=role, checksum=f"{expected:08x}")
            return
        replica.verification.valid = False
        names = [name for name, _ in replica.named_tensors()]
        differ = [n for n, own, other in zip(names, replica.verification.tensors, parts, strict=False) if own != other][
            :_NAMED
        ]
        self.differing[replica.role] = differ
        self.job.channel.event(
            "replica_mismatch",
            step=step,
            role=role,
            expected=f"{expected:08x}",
            found=f"{replica.verification.checksum:08x}",
            tensors=differ,
        )

    def step(self, role: Role) -> None:
        """The step of ``role``'s replica: it is pending until there is time for it, or need; see :meth:`_defers`.

        One under construction takes it when it has those before.
        """
        construction, before = self.constructions.get(role), self.progress.script.position
        assert before is not None
        if construction is None:
            replica = self.binding.runtimes[role]
            inputs = self.steps.inputs(replica.results)
            if self._defers(replica, before):
                positions = before, SchedulerPosition.of(self.binding.local)
                replica.pending = partial(self._catch_up, replace(inputs, positions=lambda: positions))
            else:
                self.steps.apply_step(replica, inputs)
        elif construction.incoming is not None:  # else the snapshot is taken after this iteration, and contains it
            (results, trained), construction.incoming = construction.incoming, None
            sequence, known, building = self.progress.sequence, construction.positions, construction
            inputs = replace(
                self.steps.inputs(results),
                trained=trained,
                positions=lambda: (before, known[sequence, False]) if building.follows else None,
            )
            construction.kept.append(Kept((sequence, False), partial(self._catch_up, inputs)))

    def _catch_up(self, inputs: StepInputs, runtime: StageRuntime) -> None:
        """The step that ``runtime`` has yet to take; others may have gone on from it."""
        with self.boundaries.idle.timing((runtime.role, "step")):
            self.steps.apply_step(runtime, inputs)

    def _defers(self, replica: StageRuntime, before: SchedulerPosition) -> bool:
        """Whether ``replica`` may take a step later: nothing looks at it until it catches up.

        Not where the script looks at it, where it computes a part of the stage, where members exchange shards after a
        step, or compare what they have after each. Nor where its scheduler, which may go by what the script has counted
        so far, cannot be given the position of this member's own.

        Args:
            before: position of this member's own scheduler before the step.
        """
        local, layout = self.binding.local, self.epoch.layout
        if layout.slices > 1 or layout.sharded or self.checks.on or self.epoch.plan.lending(replica.role) is not None:
            return False
        if not local.owned:  # another member tells the script where its scheduler stands
            return False
        self.binding.refresh()
        return SchedulerPosition.of(replica) == before

    def exchange_shards(self) -> None:
        """Brings the parameters of all runtimes up to date, after steps that did so with their own shards only.

        All members take part, once between two operations. A runtime that is up to date gets what it has. Owners gather
        shards in the group of their stage, in which they reduce its gradients, where each owns one role of it.
        """
        runtimes, sequence = self.binding.runtimes, self.progress.sequence
        layout = self.epoch.layout
        self.binding.refresh()
        channels = [(role, channel) for stream, role, channel in self.epoch.channels if stream is Stream.SHARD]
        for role, channel in channels:
            if channel.source == self.epoch.member:
                channel.send(sequence, tuple(runtimes[role].optimizer.shard(layout.copy_of(role))))
        shards: dict[Role, list[torch.Tensor]] = {}
        complete = set()
        for runtime in self.binding.owned():  # by stage, on all members: none waits for one that waits for it
            known: tuple[Role, ...] = (runtime.role,)
            if gathers(self.epoch.plan, runtime.role):
                with self.binding.bound(runtime):
                    runtime.optimizer.gather()
                known = layout.siblings(runtime.role)
                complete.add(runtime.role)
            shards.update((role, runtime.optimizer.shard(layout.copy_of(role))) for role in known)
        for role, channel in channels:
            if channel.destination == self.epoch.member:
                shards[role] = list(channel.recv(sequence))  # type: ignore[arg-type]
        for own, runtime in runtimes.items():
            for role in layout.siblings(own) if own not in complete else ():
                if role in shards and role != own:
                    runtime.optimizer.fill(layout.copy_of(role), shards[role])
            runtime.stale = False
        self.epoch.drain()
