"""The check of a job's first steps (``redundancy.check_exact``): would a takeover change what the job computes?

Before the commit of a step the takeover of every stage is *rehearsed*. The neighbours of the stage send
again what its owner has used, and its shadow computes with its replica what is missing of the iteration, by the
instructions that a takeover runs (:mod:`~bamboo_ds.schedule.rehearsal`). Outputs, losses and gradients are compared bit
for bit with the owner's; their step has not been done yet. After every step all of the replica is compared::

    owner    passes  reduce         send    commit  step  send state
    shadow   passes  reduce  redo   compare commit  step  compare

In the last step but one shadows compute nothing, redundantly or in a rehearsal: what only passes keep up to date, such
as a count in a variable of the script, is out of date on them by the last step, as it may be when a real loss comes.

A loss in such a step takes precedence: the step is not checked. What members exchange here travels on lanes of their
own, which exist in these steps only.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.transport import Payload, Transport
from ..errors import EpochChanged, Inexact, ProtocolError
from ..schedule import rehearsal_passes, rehearsal_sends
from ..topology import Role
from .beats import Beats
from .building import StageBuilder
from .deepspeed_adapter import DeepSpeedAdapter
from .lanes import RehearsalLanes, Stream
from .operation import Outcome
from .records import CurrentEpoch, Progress
from .reduction import Reduction
from .replica import capture
from .runtime import RuntimeBinding, StageRuntime
from .tracing import Traces, checksum, given_back, owner_of, tensors_in

logger = logging.getLogger("bamboo_ds")

#: How many differences are named.
_NAMED = 100
#: What differs, as told in errors, and why it may.
_REHEARSAL = (
    "its shadow computes something else than its owner from the same inputs",
    "random numbers that are not keyed (those of Python and NumPy in a backward pass, a generator that is no attribute "
    "of a layer); something that passes depend on and that is not replicated (attributes of layers that are neither "
    "numbers nor in get_extra_state, variables of the script, what it changes through .data); the time, the process or "
    "the host; a kernel that is not deterministic (torch.use_deterministic_algorithms)",
)
_REPLICA = (
    "after the step its replica is not what its owner has",
    "something that the optimizer's step depends on and that is not replicated (what its attributes refer to, "
    "variables of the script); what the script changes through .data; the time, the process or the host; a kernel that "
    "is not deterministic (torch.use_deterministic_algorithms)",
)

#: What is compared, by what it is called: tensors as they are, all else as text.
Facts = dict[str, Any]


@dataclass
class Tally:
    """What this member has compared; ``changed``: roles that it has left out after their scripts had changed them."""

    steps: int = 0
    rehearsals: int = 0
    tensors: int = 0
    differing: int = 0
    roles: set[Role] = field(default_factory=set)
    changed: set[Role] = field(default_factory=set)


@dataclass(eq=False)
class ExactChecks:
    """This member's part of the check. All methods belong to the main thread.

    Attributes:
        on: the check goes on.
        steps: how many steps are checked, equal on all members.
        redone: forward passes that this member has rehearsed in this iteration.
        rests: it is the iteration in which shadows compute nothing.
    """

    ds: DeepSpeedAdapter
    stops: bool
    binding: RuntimeBinding
    epoch: CurrentEpoch
    progress: Progress
    reduction: Reduction
    builder: StageBuilder
    beats: Beats
    on: bool = field(default=False, init=False)
    steps: int = field(default=0, init=False)
    redone: int = field(default=0, init=False)
    rests: bool = field(default=False, init=False)
    _tally: Tally = field(default_factory=Tally, init=False)
    _traces: Traces = field(default_factory=Traces, init=False)
    _opened: tuple[int, RehearsalLanes, Transport] | None = field(default=None, init=False)

    def begin(self, steps: int) -> None:
        """Check so many steps, as the members have agreed."""
        self.on, self.steps = steps > 0, steps

    @property
    def left(self) -> int:
        """How many first steps are checked; 0: none any more."""
        return self.steps if self.on else 0

    def begin_iteration(self) -> None:
        """An iteration begins."""
        if self.on:
            self.redone, self.rests = 0, self.progress.steps == self.steps - 2
            self._traces.clear()

    def end_iteration(self, outcome: Outcome) -> None:
        """An iteration is over: compare the replicas, unless a loss has hit it.

        Raises:
            Inexact: one differs.
            EpochChanged: a member is lost.
        """
        if not self.on:
            return
        last = self.progress.steps == self.steps
        if self.progress.steps >= self.steps:
            self.on = self.rests = False
            self.redone = 0
        try:
            if outcome is Outcome.BEHIND or self.progress.resumed:
                self._tell_unchecked(last)
            elif self.progress.steps <= self.steps:
                self._compare_replicas()
        except EpochChanged:
            self._tell_unchecked(last)
            raise
        finally:
            if not self.on:
                self._opened = None
                self._traces.clear()

    def _tell_unchecked(self, last: bool) -> None:
        """A loss has hit a step that was to be checked, ``last`` of all."""
        if last and self.epoch.leads:
            logger.warning("a loss has hit the last step to be checked, so that the check has no result")

    def watching(self, runtime: StageRuntime, micro_batch: int) -> AbstractContextManager[None]:
        """The body is a forward pass of ``runtime``, which is bound."""
        if not self.on or self.builder.compiled_with is not None:  # the compiler would make hooks a part of the layers
            return nullcontext()
        return self._traces.of(runtime.role, runtime.module, micro_batch)

    # -- before the commit --------------------------------------------------------------------------------

    def rehearse(self) -> None:
        """If the iteration is rehearsed, on all members alike: one that a loss has hit is not.

        Sends what others rehearse with, rehearses the roles that this member shadows, and compares.

        Raises:
            Inexact: something differs.
            EpochChanged: a member is lost.
        """
        step = self.progress.steps
        if not self.on or self.progress.resumed or step >= self.steps or step == self.steps - 2:
            return
        lanes, transport = self._open()
        before, micro_batches = self.binding.current, self.ds.micro_batches
        with self._in_place_of(lanes, transport):
            self._execute(rehearsal_sends(self.epoch.plan, self.epoch.member, lanes.roles, micro_batches))
            for role in lanes.roles:
                if self.epoch.owns(role):
                    self.binding.use(self.binding.runtimes[role])
                    self._send(lanes, transport, role, self._computed(role))
            for role in lanes.roles:
                if not self.epoch.shadows(role):
                    continue
                replica = self.binding.runtimes[role]
                if replica.layers.changes.last == step:
                    self._leave_out(lanes, transport, role)
                    continue
                forwards, backwards = replica.part.forwards, replica.part.backwards
                for stream, done in ((Stream.ACTIVATION, forwards), (Stream.GRADIENT, backwards)):
                    for m in range(done if (stream, role) in lanes.streams else 0):
                        transport.recv(lanes[stream, role], m)  # the replica has used it when it was there first
                self.redone += micro_batches - forwards
                self._execute(rehearsal_passes(self.epoch.layout, role, micro_batches, forwards, backwards))
                self.binding.use(replica)
                self._compare(role, self._computed(role), self._receive(lanes, transport, role), "rehearsal")
        self._tally.rehearsals += 1
        self.binding.use(before)

    def _leave_out(self, lanes: RehearsalLanes, transport: Transport, role: Role) -> None:
        """The script has changed the stage before the iteration, and its replica gets that with the step."""
        for stream in (Stream.ACTIVATION, Stream.GRADIENT):
            for m in range(self.ds.micro_batches if (stream, role) in lanes.streams else 0):
                transport.recv(lanes[stream, role], m)
        self._receive(lanes, transport, role)
        self._tally.changed.add(role)

    @contextmanager
    def _in_place_of(self, lanes: RehearsalLanes, transport: Transport) -> Iterator[None]:
        """In the body the engine's instructions send and receive on ``lanes``."""
        epoch = self.epoch
        before = epoch.transport, epoch.lanes
        epoch.transport, epoch.lanes = transport, lanes
        try:
            yield
        finally:
            epoch.transport, epoch.lanes = before

    def _execute(self, program: Sequence[Any]) -> None:
        for instruction in program:
            self.ds.execute(instruction)
            self.beats.beat()

    def _computed(self, role: Role) -> Facts:
        """What the bound runtime of ``role`` has computed in this iteration, in the order in which it did."""
        runtime = self.binding.runtimes[role]
        module: Any = runtime.module
        micro_batches = range(self.ds.micro_batches)
        facts: Facts = dict(self._traces.forward(role))
        if role.stage == self.epoch.layout.stages - 1:
            facts["losses"] = self.reduction.losses()
        else:
            for m in micro_batches:
                name = f"output of the stage in micro-batch {m}"
                facts[name] = [checksum(t) for t in tensors_in(runtime.part.activations[m])]
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
                facts[name] = [checksum(t) for t in tensors_in(runtime.part.gradients[m])]
        return facts

    # -- after the step -----------------------------------------------------------------------------------

    def _compare_replicas(self) -> None:
        """Compare each replica with its owner, all of whose steps are done. After the last step: tell the result."""
        self.binding.refresh()
        lanes, transport = self._open()
        for role in lanes.reports:
            if self.epoch.owns(role):
                self._send(lanes, transport, role, state_of(self.binding.runtimes[role]))
        for role in lanes.reports:
            if self.epoch.shadows(role):
                theirs = self._receive(lanes, transport, role)
                replica = self.binding.runtimes.get(role)
                if replica is None:
                    raise ProtocolError(f"the replica of role {role}, which is to be compared, is not there")
                self._compare(role, state_of(replica), theirs, "replica")
        transport.drain()  # the next step changes what was sent
        self._tally.steps += 1
        if self.progress.steps == self.steps:
            self._conclude()

    def _conclude(self) -> None:
        """All members put together what they have compared; the one that leads tells it."""
        tally = self._tally
        roles, left_out = (sorted((r.pipeline, r.stage) for r in each) for each in (tally.roles, tally.changed))
        mine = [tally.steps, tally.tensors, tally.differing, roles, tally.rehearsals, left_out]
        found = [json.loads(each) for each in self.epoch.transport.exchange(json.dumps(mine)).values()]
        if not self.epoch.leads:
            return
        steps, tensors = min(each[0] for each in found), sum(each[1] for each in found)
        rehearsals = min(each[4] for each in found)
        rehearsed = {tuple(role) for each in found for role in each[3]}
        changed = sorted({tuple(role) for each in found for role in each[5]})
        rest = [[r.pipeline, r.stage] for r in self.epoch.layout.roles if (r.pipeline, r.stage) not in rehearsed]
        why = "tensor slices" if self.epoch.layout.slices > 1 else "the shadow is not the owner of the stage before"
        never = [(d, s) for d, s in rest if (d, s) not in changed]
        without = f" Not rehearsed ({why}): {_places(never)}." if never else ""
        if changed:
            without += f" Not rehearsed in steps before which the script had changed it: {_places(changed)}."
        if any(each[2] for each in found):
            _say(f"the check of the first {self.steps} steps has found differences, see above.{without}")
            return
        _say(
            f"the first {self.steps} steps are exact: {len(rehearsed)} stages computed again by their shadows in "
            f"{rehearsals} of them, all replicas compared after {steps}, {tensors} tensors and numbers equal to the "
            f"last bit.{without}"
        )
        self.epoch.channel.event(
            "exact_checked",
            step=self.progress.steps,
            steps=steps,
            stages=len(rehearsed),
            tensors=tensors,
            not_rehearsed=rest,
        )

    # -- comparing ----------------------------------------------------------------------------------------

    def _open(self) -> tuple[RehearsalLanes, Transport]:
        """The lanes of the current epoch; all members open them at the same place."""
        epoch = self.epoch.plan.epoch
        if self._opened is None or self._opened[0] != epoch:
            lanes = RehearsalLanes(self.epoch.plan)
            self._opened = epoch, lanes, Transport.open(self.epoch.session, lanes.all())
        return self._opened[1:]

    def _send(self, lanes: RehearsalLanes, transport: Transport, role: Role, facts: Facts) -> None:
        tensors = {name: value.detach() for name, value in facts.items() if torch.is_tensor(value)}
        rest = {name: value for name, value in facts.items() if name not in tensors}
        header = json.dumps([list(facts), list(tensors), rest]).encode()
        payload = (torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors.values())
        transport.send(lanes.reports[role], self.progress.sequence, payload)

    def _receive(self, lanes: RehearsalLanes, transport: Transport, role: Role) -> Facts:
        payload: Payload = transport.recv(lanes.reports[role], self.progress.sequence)
        assert isinstance(payload, tuple)
        names, sent, rest = json.loads(bytes(payload[0].tolist()))
        tensors = dict(zip(sent, payload[1:], strict=True))
        return {name: tensors[name] if name in tensors else rest[name] for name in names}

    def _compare(self, role: Role, mine: Facts, theirs: Facts, what: str) -> None:
        tally = self._tally
        tally.tensors += len({*mine, *theirs})
        if what == "rehearsal":
            tally.roles.add(role)
        found = differences(mine, theirs)
        if not found:
            return
        tally.differing += len(found)
        self.epoch.channel.event(
            "exact_mismatch",
            step=self.progress.steps,
            role=[role.pipeline, role.stage],
            found=what,
            tensors=found[:_NAMED],
        )
        step = self.progress.steps + (what == "rehearsal")
        error = Inexact(step, role.pipeline, role.stage, *(_REHEARSAL if what == "rehearsal" else _REPLICA), found)
        if self.stops:
            raise error
        logger.error("%s", error)


def state_of(runtime: StageRuntime) -> Facts:
    """All that a replica must equal, by what it is called. The runtime's attributes must be up to date."""
    facts: Facts = dict(runtime.named_tensors())
    state = capture(runtime)
    optimizer, layers = state["optimizer"], state["layers"]
    for name, part in (
        ("trainable parameters", state["trains"]),
        ("number of layer", layers["numbers"]),
        ("extra state of layer", layers["extra"]),
        ("group of the optimizer", optimizer["inner"]["param_groups"]),
        ("attribute of the optimizer", optimizer["attributes"]),
        ("loss scaler", optimizer["scaler"]),
        ("learning-rate scheduler", state["scheduler"]),
        ("counter", state["counters"]),
    ):
        facts.update(_leaves(name, part))
    return facts


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, each with its path; what is no tensor as text, in which every bit of a number shows."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(f"{path} {name}", each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _leaves(f"{path} {number}", each)
    else:
        yield path, value if torch.is_tensor(value) else repr(value)


def differences(mine: Facts, theirs: Facts) -> list[str]:
    """What the owner's facts differ in from ``mine``, in their order, and by how much where that is a number."""
    found = []
    for name in {**theirs, **mine}:
        if name not in mine or name not in theirs:
            found.append(f"{name} (only the {'shadow' if name in mine else 'owner'} has it)")
            continue
        own, other = mine[name], theirs[name]
        if not torch.is_tensor(own) or not torch.is_tensor(other):
            if own is not other and (torch.is_tensor(own) or torch.is_tensor(other) or own != other):
                found.append(name if not isinstance(own, str) else f"{name} ({own} instead of {other})")
        elif (own.dtype, own.shape) != (other.dtype, other.shape):
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (own, other)]
            found.append(f"{name} ({' instead of '.join(kinds)})")
        elif checksum(own) != checksum(other):
            wide = torch.complex128 if own.is_complex() else torch.float64
            apart = (own.detach().cpu().to(wide) - other.detach().cpu().to(wide)).abs().max().item()
            found.append(f"{name} (by up to {apart:.3g})")
    return found


def _places(roles: Iterable[Sequence[int]]) -> str:
    return ", ".join(f"stage {stage} of pipeline {pipeline}" for pipeline, stage in roles)


def _say(line: str) -> None:
    print(f"bamboo: {line}", flush=True)
