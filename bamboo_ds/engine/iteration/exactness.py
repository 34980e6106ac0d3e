"""The check of a job's first steps (``redundancy.check_exact``): would a takeover change what the job computes?

Before the commit of a step the takeover of every stage is *rehearsed*. The neighbours of the stage send
again what its owner has used, and its shadow computes with its replica what is missing of the iteration, by the
instructions that a takeover runs (:mod:`~bamboo_ds.schedule.rehearsal`). Outputs, losses and gradients are compared bit
for bit with the owner's; their step has not been done yet. After every step all of the replica is compared::

    owner    passes  reduce         send    commit  step  send state
    shadow   passes  reduce  redo   compare commit  step  compare

After the first of the steps every replica is made anew from what its owner has by then, as it is after a loss. What did
not travel is missing from there on: the last step compares what copies compute without it, and names what optimizers,
schedulers and layers keep beside what is sent (:mod:`~..stage.beside`). Where there are more than two steps the first
one is not rehearsed.

In the last step but one shadows compute nothing, redundantly or in a rehearsal: what only passes keep up to date, such
as a count in a variable of the script, is out of date on them by the last step, as it may be when a real loss comes.

A recovery takes precedence: the step in which it happens is not checked, and the check begins again with the next one,
so that a takeover of what was not checked yet is found out, too. What members exchange here travels on channels of
their own, which exist in these steps only. A rehearsal that exhausts the memory is given up, and the job goes on.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ...bare import bare
from ...errors import ProtocolError
from ...schedule import Program, rehearsal_passes, rehearsal_sends
from ...topology import Role
from ..context.channels import RehearsalChannels, Stream
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..data.supply import BatchSupply
from ..replicas.building import StageBuilder
from ..stage.beside import Contents, beside_layers, beside_steps, newer
from ..stage.runtime import StageRuntime
from ..stage.tracing import Traces, checksum, given_back, owner_of, tensors_in
from .boundaries import on_device
from .conclusions import Conclusions
from .facts import (
    BESIDE,
    NOT_SENT,
    REHEARSAL,
    REPLICA,
    Facts,
    differences,
    lacks,
    only_rounded,
    state_of,
    summed,
    suspects,
)
from .recomputing import release_cache
from .reduction import Reduction

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class ExactChecks(InContext):
    """This member's part of the check. All methods belong to the main thread.

    Attributes:
        on: the check goes on.
        steps: the number of steps that are checked in a row, equal on all members.
        redone: forward passes that this member has rehearsed in this iteration.
        rests: it is the iteration in which shadows compute nothing.
    """

    reduction: Reduction
    builder: StageBuilder
    supply: BatchSupply
    on: bool = field(default=False, init=False)
    steps: int = field(default=0, init=False)
    redone: int = field(default=0, init=False)
    rests: bool = field(default=False, init=False)
    #: Steps that are done before the first one that is checked; ``None``: those that are when the check begins.
    _before: int | None = field(default=None, init=False)
    _conclusions: Conclusions = field(init=False)
    _traces: Traces = field(default_factory=Traces, init=False)
    _brought: list[StageRuntime] = field(default_factory=list, init=False)
    _skipped: set[Role] = field(default_factory=set, init=False)
    _suspected: dict[Role, tuple[Facts, list[str]]] = field(default_factory=dict, init=False)
    _opened: tuple[int, RehearsalChannels] | None = field(default=None, init=False)
    #: What this member's own optimizers, schedulers and layers kept beside what is sent when the check began.
    _began: dict[Role, dict[str, Contents]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._conclusions = Conclusions(self.context)

    def begin(self, steps: int) -> None:
        """Checks so many steps, as the members have agreed."""
        self.on, self.steps, self._before = steps > 0, steps, None

    def begin_again(self, steps: int, before: int) -> None:
        """Checks, after a recovery, so many steps after the first ``before``, on all members alike; 0: none.

        While replicas are being made, or there are none, the check waits: another recovery follows when that changes.
        """
        if not steps:
            return
        self.begin(steps)
        plan = self.epoch.plan
        self._before = before if any(plan.shadows) and not plan.builders else sys.maxsize
        self._began.clear()
        self._conclusions.begin_again(before if plan.lost else None)
        if self.epoch.leads and len(plan.members) == 1:
            logger.warning(
                "the first steps were not checked when the last other member was lost, and nobody is left to check "
                "with: whether this script keeps something that replicas lack is not known, so that results may "
                "differ from here on. A job that has lost nobody in its first %d steps says whether that is so",
                steps,
            )

    @property
    def left(self) -> int:
        """The number of steps that are checked in a row; 0: none any more."""
        return self.steps if self.on else 0

    def _checked(self) -> int:
        """The number of steps that are done; below 0: the first one is to come after others."""
        return self.progress.steps - (self._before or 0)

    def _rehearsed(self) -> bool:
        """Whether the iteration under way is rehearsed."""
        done = self._checked()
        return self.on and done >= 0 and not self.rests and not (done == 0 and self.steps > 2)

    def begin_iteration(self) -> None:
        """An iteration begins."""
        if self.on and self._before is None:
            self._before = self.progress.steps
            self.on = self.progress.steps < self.steps  # else the job has started again, after the steps
        if self.on:
            self.redone, self.rests = 0, 0 <= self._checked() == self.steps - 2
            self._skipped.clear()
            self._traces.clear()
            self._brought.clear()  # a loss has interrupted their rehearsal; they are parked when the iteration ends
            for runtime in self.binding.owned():
                self._began.setdefault(runtime.role, {**beside_steps(runtime), **beside_layers(runtime)})

    def end_iteration(self) -> bool:
        """Compares the replicas after an iteration, unless there was a recovery in it.

        Returns:
            Whether they are to be made anew, on all members alike.

        Raises:
            Inexact: one differs.
            EpochChanged: a member is lost.
        """
        done = self._checked()
        if not self.on or done <= 0:
            return False
        last = done == self.steps
        with self.timed():
            self._compare_replicas()
            if last:
                self._compare_beside()
        if last:
            self._conclusions.conclude(self.steps, self.progress.steps - done)
            self.on = self.rests = False
            self.redone = 0
            self._traces.clear()
            self._began.clear()
        return done == 1 < self.steps

    def watching(self, runtime: StageRuntime, micro_batch: int) -> AbstractContextManager[None]:
        """The body is a forward pass of ``runtime``, which is bound."""
        if (
            not self._rehearsed() or self.builder.compiled_with is not None
        ):  # the compiler would make hooks a part of the layers
            return nullcontext()
        return self._traces.of(runtime.role, runtime.module, micro_batch)

    # -- before the commit --------------------------------------------------------------------------------

    def rehearse(self) -> None:
        """Rehearses takeovers if the iteration is rehearsed, on all members alike: one that a loss has hit is not.

        Sends what others rehearse with, rehearses the roles that this member shadows, and compares.

        Raises:
            Inexact: something differs.
            EpochChanged: a member is lost.
        """
        if not self._rehearsed():
            return
        before = self.binding.current
        with self.timed():
            channels = self._open()
            self.supply.share(channels)
            sends = rehearsal_sends(self.epoch.plan, self.epoch.member, channels.roles, self.ds.micro_batches)
            self._execute(sends, channels)
            owned: dict[Role, Facts] = {}
            for role in channels.roles:
                if self.epoch.owns(role):
                    self.binding.use(self.binding.runtimes[role])
                    owned[role] = self._computed(role)
                    self._send(channels, role, summed(owned[role]))
            for role in channels.roles:
                if self.epoch.shadows(role):
                    self._rehearse(channels, role)
            self._look_closer(channels, owned, REHEARSAL)
            self._conclusions.tally.rehearsals += 1
            self.binding.use(before)
            self._put_back()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The body is a part of the check, and its time is told with it."""
        begin = time.monotonic()
        yield
        self._conclusions.tally.seconds += time.monotonic() - begin

    def _rehearse(self, channels: RehearsalChannels, role: Role) -> None:
        """Rehearses the takeover of ``role``, if the replica can compute it and there is memory for that."""
        replica, step, tally = self.binding.runtimes[role], self.progress.steps, self._conclusions.tally
        if replica.layers.changes.last == step:  # its replica gets what the script has changed with the step
            tally.changed.add(role)
            self._skipped.add(role)
            return
        if role in tally.exhausted:
            self._skipped.add(role)
            return
        parked, redone = replica.parked, self.redone
        try:
            self.builder.move(replica, parked=False)
            if parked:
                self._brought.append(replica)
            self._redo(channels, replica)
            return
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        # Here, where the traceback does not hold the pass's tensors any more.
        tally.exhausted.add(role)
        self._skipped.add(role)
        self.redone = redone
        self._forget(replica)
        release_cache(self.ds.device)
        logger.warning(
            "the check of the first steps: the rehearsal of role %s has exhausted the memory, and is left out: %s. A "
            "takeover of the role needs that memory, too",
            role,
            reason,
        )

    def _redo(self, channels: RehearsalChannels, replica: StageRuntime) -> None:
        """Computes with ``replica`` what it has not computed redundantly, and compares it with what the owner has.

        Raises:
            Inexact: something differs.
            torch.OutOfMemoryError: there is not enough memory for that; the passes that are done stay.
        """
        role, micro_batches = replica.role, self.ds.micro_batches
        forwards, backwards = replica.share.part.forwards, replica.share.part.backwards
        for stream, done in ((Stream.ACTIVATION, forwards), (Stream.GRADIENT, backwards)):
            for m in range(done if channels.get((stream, role)) else 0):
                channels[stream, role].recv(m)  # the replica has used it when it was there first
        self.redone += micro_batches - forwards
        self._execute(rehearsal_passes(self.epoch.layout, role, micro_batches, forwards, backwards), channels)
        self.binding.use(replica)
        self._check(channels, role, self._computed(role))
        self._conclusions.tally.roles.add(role)

    def _put_back(self) -> None:
        """Parks again what was brought to the device for rehearsals."""
        for replica in self._brought:
            self.redone -= replica.share.part.forwards
            self._forget(replica)
            self.builder.move(replica, parked=True)
        if self._brought:
            self._brought.clear()
            release_cache(self.ds.device)

    def _forget(self, replica: StageRuntime) -> None:
        """Forgets the passes of a rehearsal."""
        self.binding.refresh()
        replica.forget_passes()
        self.binding.reload()

    def _drop_skipped(self, channels: RehearsalChannels) -> None:
        """Drops what was sent for rehearsals that were left out; all of it has arrived before the commit."""
        for role in self._skipped:
            for stream in (Stream.ACTIVATION, Stream.GRADIENT):
                channel = channels.get((stream, role))
                if channel is not None:
                    channel.discard(self.ds.micro_batches)
            channels[Stream.REPORT, role].discard(self.progress.sequence)

    def _execute(self, program: Program, channels: RehearsalChannels) -> None:
        for instruction in program:
            self.ds.execute(instruction, channels)
            self.beats.beat()

    def _computed(self, role: Role) -> Facts:
        """The results of the bound runtime of ``role`` in this iteration, in the order in which it computed them."""
        runtime = self.binding.runtimes[role]
        module: Any = runtime.module
        micro_batches = range(self.ds.micro_batches)
        facts: Facts = dict(self._traces.forward(role))
        if role.stage == self.epoch.layout.stages - 1:
            facts["losses"] = self.reduction.losses()
        else:
            for m in micro_batches:
                name = f"output of the stage in micro-batch {m}"
                facts[name] = [checksum(t) for t in tensors_in(on_device(runtime.share.part.activations[m]))]
        sums = runtime.optimizer.local()
        known = {id(p) for group in runtime.optimizer.groups() for p in group}
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and id(p) in known]
        trained = [(n, p, owner_of(module, n)) for n, p in named]
        backward = self._traces.backward(role)
        start = module._local_start
        for number in range(start + len(module.forward_funcs), start - 2, -1):
            facts.update(
                (f"gradient of {name}", runtime.optimizer.part(sums, parameter))
                for name, parameter, where in trained
                if where == number or where < 0 > number - start
            )
            names = [given_back(module, number, m) for m in micro_batches] if number > start else []
            facts.update((name, backward[name]) for name in names if name in backward)
        if role.stage > 0:
            for m in micro_batches:
                name = f"gradient of the stage's input in micro-batch {m}"
                facts[name] = [checksum(t) for t in tensors_in(on_device(runtime.share.part.gradients[m]))]
        return facts

    # -- after the step -----------------------------------------------------------------------------------

    def _compare_replicas(self) -> None:
        """Compares each replica with its owner, all of whose steps are done; tells the result after the last step."""
        self.binding.refresh()
        channels = self._open()
        self._drop_skipped(channels)
        owned = {role: state_of(self.binding.runtimes[role]) for role in channels.reported if self.epoch.owns(role)}
        for role, state in owned.items():
            self._send(channels, role, summed(state))
        for role in channels.reported:
            if self.epoch.shadows(role):
                replica = self.binding.runtimes.get(role)
                if replica is None:
                    raise ProtocolError(f"the replica of role {role}, which is to be compared, is not there")
                try:
                    self._check(channels, role, state_of(replica))
                except torch.OutOfMemoryError as error:
                    self._conclusions.tally.exhausted.add(role)
                    logger.warning("the replica of role %s is not compared, for want of memory: %s", role, error)
        self._look_closer(channels, owned, REPLICA)
        self.epoch.drain()  # the next step changes what was sent
        self._conclusions.tally.steps += 1

    def _compare_beside(self) -> None:
        """Compares what owners have gathered beside what is sent with what the copies have that were made meanwhile."""
        channels = self._open()
        for role in channels.reported:
            if self.epoch.owns(role):
                runtime, began = self.binding.runtimes[role], self._began.get(role, {})
                contents = [newer(beside(runtime), began) for beside in (beside_steps, beside_layers)]
                channels[Stream.REPORT, role].send(self.progress.sequence, as_message(contents))
        for role in channels.reported:
            if not self.epoch.shadows(role):
                continue
            replica = self.binding.runtimes[role]
            steps, layers = from_message(channels[Stream.REPORT, role].recv(self.progress.sequence))
            mine = beside_steps(replica), beside_layers(replica)
            lacking = [lacks(theirs, own) for theirs, own in zip((steps, layers), mine, strict=True)]
            if lacking[1]:
                logger.warning(NOT_SENT, role, ", ".join(lacking[1][:10]))
            self._conclusions.tell(role, lacking[0], BESIDE, rounded=False)
        self.epoch.drain()

    # -- comparing ----------------------------------------------------------------------------------------

    def _open(self) -> RehearsalChannels:
        """The channels of the current epoch."""
        epoch = self.epoch.plan.epoch
        if self._opened is None or self._opened[0] != epoch:
            self._opened = epoch, RehearsalChannels(self.epoch.plan, self.epoch.opening)
        return self._opened[1]

    def _send(self, channels: RehearsalChannels, role: Role, facts: Facts) -> None:
        plain = {name: bare(value) if torch.is_tensor(value) else value for name, value in facts.items()}
        channels[Stream.REPORT, role].send(self.progress.sequence, as_message(plain))

    def _receive(self, channels: RehearsalChannels, role: Role) -> Facts:
        facts: Facts = from_message(channels[Stream.REPORT, role].recv(self.progress.sequence))
        return facts

    def _check(self, channels: RehearsalChannels, role: Role, mine: Facts) -> None:
        """Compares checksums with the owner's, and notes what differs for :meth:`_look_closer`."""
        theirs = self._receive(channels, role)
        self._conclusions.tally.tensors += len({*mine, *theirs})
        names = suspects(summed(mine), theirs)
        if names:
            self._suspected[role] = {name: mine[name] for name in names if name in mine}, names

    def _look_closer(self, channels: RehearsalChannels, owned: dict[Role, Facts], what: str) -> None:
        """Owners send what differs itself, so that it can be told by how much. All members do so at the same place."""
        rank = self.epoch.layout.rank
        asked: dict[int, list[str]] = {}
        mine = {rank(role): names for role, (_, names) in self._suspected.items()}
        for theirs in self.epoch.agreement.exchange(mine).values():
            asked.update((int(place), names) for place, names in theirs.items())
        for role, facts in owned.items():
            if rank(role) in asked:
                self._send(channels, role, {n: facts[n] for n in asked[rank(role)] if n in facts})
        suspected, self._suspected = self._suspected, {}
        for role, (facts, _) in suspected.items():
            self._compare(role, facts, self._receive(channels, role), what)

    def _compare(self, role: Role, mine: Facts, theirs: Facts, what: str) -> None:
        """Tells what differs; raises :class:`Inexact` if that ends the job."""
        rounded = what == REHEARSAL and self._may_round() and only_rounded(mine, theirs)
        self._conclusions.tell(role, differences(mine, theirs), what, rounded)

    def _may_round(self) -> bool:
        """Whether kernels may give another result each time, and the user has not asked for the check.

        Then a difference that may be rounding alone does not end the job.
        """
        exact = self.ds.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        return not exact and self.settings.redundancy.check_exact is None
