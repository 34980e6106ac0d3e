"""A job whose members are threads: the engine's own parts on a simulated network, without DeepSpeed and agents.

What computes are tiny stages of the same structure as DeepSpeed's: forward and backward passes by micro-batch, a loss
at the end, gradient clipping, an optimizer with state, dropout, a buffer that passes change, and weights that the ends
of a pipeline share if that is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from bamboo_ds.config import RedundancyConfig, RedundancyMode
from bamboo_ds.control.leader.boundary import next_change, ready_copies
from bamboo_ds.control.leader.restarts import fatal_plan
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.registry.records import LayoutRecord, MemberRecord, PeerAddress, WorkerState
from bamboo_ds.engine.accounts import Accounts
from bamboo_ds.engine.announcements import Announcements
from bamboo_ds.engine.beats import Beats
from bamboo_ds.engine.boundaries import Boundaries
from bamboo_ds.engine.bubbles import IdleTimes
from bamboo_ds.engine.building import StageBuilder
from bamboo_ds.engine.checkpointing import Checkpoints, End
from bamboo_ds.engine.committing import Commits
from bamboo_ds.engine.construction import Construction
from bamboo_ds.engine.copies import Copies
from bamboo_ds.engine.data import Batches
from bamboo_ds.engine.evaluation import Evaluation
from bamboo_ds.engine.exactness import ExactChecks
from bamboo_ds.engine.generators import RoleGenerators
from bamboo_ds.engine.groups import RoleGroups
from bamboo_ds.engine.history import History
from bamboo_ds.engine.layers import Layers
from bamboo_ds.engine.mismatches import Mismatches
from bamboo_ds.engine.passes import Passes
from bamboo_ds.engine.pipeline_engine import BambooPipelineEngine
from bamboo_ds.engine.records import CurrentEpoch, Progress
from bamboo_ds.engine.recovery import RecoveryProtocol
from bamboo_ds.engine.reduction import Reduction
from bamboo_ds.engine.redundant import RedundantPasses
from bamboo_ds.engine.replication import Replication
from bamboo_ds.engine.runtime import BOUND_ATTRIBUTES, RuntimeBinding, StageRuntime
from bamboo_ds.engine.saving import SaveRequest
from bamboo_ds.engine.script_calls import ScriptCalls
from bamboo_ds.engine.slices import SlicedPasses
from bamboo_ds.engine.steps import Steps
from bamboo_ds.engine.supply import BatchSupply
from bamboo_ds.engine.takeover import Takeover
from bamboo_ds.engine.training import Training
from bamboo_ds.engine.wrappers import stage_optimizer
from bamboo_ds.errors import EpochChanged, FatalLoss, Left, UnsupportedError
from bamboo_ds.state import split
from bamboo_ds.topology import Layout, Plan, Policy, Role, holders_of, hungry, initial_plan, takeover, with_redundancy

from .simulated_deepspeed import CLIPPING, WIDTH, Shards, SimulatedDeepSpeed, Stage
from .simulated_network import Attachment, Killed, Network, Turns


class _Saves:
    """What a member saves, as :class:`bamboo_ds.engine.saving.Saves` collects it.

    Attributes:
        collected: by tag, the state of every role that the member had at its last attempt.
        nonce, busy, completed: see there.
    """

    nonce, busy, completed = "n", False, ""

    def __init__(self) -> None:
        self.collected: dict[str, dict[Role, dict[str, torch.Tensor]]] = {}

    def save_id(self, epoch: int, sequence: int) -> str:
        return f"{epoch}-{sequence}"

    def collect(self, request: SaveRequest, plan: Plan, binding: RuntimeBinding, progress: Progress) -> bool:
        self.collected[request.tag] = {}
        for runtime in binding.owned():
            binding.use(runtime)
            request.save()
        return True

    def nothing(self, *_: Any) -> None:
        """Files are not written here."""

    write = forget = wait = poll = follow = nothing


class _Engine(nn.Module):
    """The attributes of DeepSpeed's engine; parts bind roles to them."""

    _INSTRUCTION_MAP = BambooPipelineEngine._INSTRUCTION_MAP


@dataclass(frozen=True)
class _Group:
    """The ranks that reduce something together, as ``member`` sees them."""

    member: Member
    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the owners of the ranks."""
        session = self.member.session
        plan = session.current.plan
        members = list(dict.fromkeys(plan.owners[rank] for rank in self.ranks))
        tensor.copy_(session.network.sum(session.current, self.name, members, tensor.clone()))


class _Session:
    """The part of a session that parts know."""

    timeout = timedelta(seconds=1)

    def __init__(self, member: str, network: Network) -> None:
        self.member, self.network = member, network
        self.epoch = self._ended = 0
        self.attachment: Attachment | None = None

    @property
    def current(self) -> Attachment:
        assert self.attachment is not None
        return self.attachment

    @property
    def aborted(self) -> str | None:
        return self.current.aborted

    def abort(self, reason: str, epoch: int | None = None) -> None:
        self._ended = max(self._ended, self.epoch if epoch is None else epoch)
        if self.attachment is not None and self.epoch <= self._ended:
            self.network.abort(self.attachment, reason)

    def attach(self, plan: Plan) -> None:
        if self.attachment is not None:
            self.network.abort(self.attachment, f"epoch {plan.epoch} follows")
        self.epoch = plan.epoch
        self.attachment = None
        self.attachment = self.network.attach(plan, self.member, lambda: self._ended >= plan.epoch)

    def acting_for(self, rank: int, answer: Any) -> Any:
        return nullcontext()

    def note_pass(self, passing: bool) -> None:
        pass


class _Job:
    """What a worker knows of its job. ``known``: the newest plan."""

    def __init__(self, world: World, session: _Session, plan: Plan) -> None:
        self.world, self.session, self.known = world, session, plan
        self.lost_at: float | None = None
        self.replaying = False
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.channel: Any = SimpleNamespace(
            activity=SimpleNamespace(at_work=nullcontext, beats=0, busy=False, hang_after_s=0.0),
            event=lambda kind, **facts: self.events.append((kind, facts)),
            report_state=self._report_state,
            secret=self.world,
            ahead=0,
            joiner=False,
        )

    def _report_state(self, epoch: int, replicas: tuple[int, ...], place: PeerAddress) -> None:
        member = self.session.member
        self.world.states[member] = WorkerState(id=member, epoch=epoch, replicas=replicas, place=place)

    def enter(self, plan: Plan) -> None:
        if self.session.member not in plan.members:
            raise Left(f"{self.session.member} has left")
        if plan.unheld:
            stages = [(role.pipeline, role.stage) for role in map(plan.world.role, plan.unheld)]
            raise FatalLoss(stages, plan.lost, None)
        self.session.attach(plan)
        if self.known.epoch > plan.epoch:
            self.session.abort(f"plan of epoch {self.known.epoch} arrived", epoch=self.known.epoch - 1)
            raise EpochChanged(f"epoch {plan.epoch} ended while it was entered")

    def next_plan(self, after: int) -> Plan:
        self.world.turns.wait(lambda: self.known.epoch > after)
        return self.known

    def push(self, plan: Plan) -> None:
        """A plan arrives."""
        self.known = plan
        if plan.immediate:
            self.session.abort(f"plan of epoch {plan.epoch} arrived", epoch=plan.epoch - 1)

    def await_fence(self) -> None:
        pass

    def boundary(self, writing: bool) -> int:
        return self.known.epoch

    def progressed(self, steps: int) -> None:
        pass

    def newest_checkpoint(self, plan: Plan) -> None:
        pass


class _DrawnIdleTimes(IdleTimes):
    """Whether a redundant pass fits into a bubble is drawn."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def fits(self, place: Any, elapsed: float, duration: float | None) -> bool:
        return self._random.random() < 0.5


class _Snapshots:
    """What a member offers to others, as :class:`bamboo_ds.engine.construction.Snapshots` does."""

    def __init__(self, world: World, member: str) -> None:
        self._world, self.place = world, PeerAddress(url=member, token="")
        self._wanted: set[Role] = set()
        self._offered: dict[str, Any] = {}

    def begin(self) -> None:
        self._offered.clear()
        self._wanted.clear()

    def want(self, role: Role) -> None:
        self._wanted.add(role)

    def wanted(self) -> list[Role]:
        return sorted(self._wanted)

    def offer(self, role: Role, key: str, state: Any, sequence: int) -> None:
        text, tensors = split({"sequence": sequence, "state": state})
        self._offered[key] = text, [tensor.detach().clone() for tensor in tensors]
        self._wanted.discard(role)

    def fetched(self, key: str) -> Any:
        """What is offered under ``key``, if it has come by now."""
        return self._offered.get(key) if self._world.random.random() < 0.7 else None


class Fetching:
    """A transfer, in the place of :func:`bamboo_ds.engine.construction.begin_fetch`.

    It ends at some time, as long as its source lives.
    """

    def __init__(self, key: str, place: PeerAddress, secret: World) -> None:
        self._key, self._place, self._world = key, place, secret
        self._found: Any = None

    def done(self) -> bool:
        """Whether it has ended."""
        if self._found is None and self._place.url not in self._world.network.dead:
            self._found = self._world.members[self._place.url].snapshots.fetched(self._key)
        return self._found is not None

    def result(self) -> Any:
        """What was fetched."""
        text, tensors = self._found
        return text, [tensor.clone() for tensor in tensors]

    def cancel(self) -> None:
        """Nobody waits for it."""


class _Builder(StageBuilder):
    """Builds the stages of this module."""

    member: Member

    def build(self, role: Role, state: Any) -> StageRuntime:
        self.binding.refresh()
        local = self.binding.local
        runtime = local if role == local.role else self.member.runtime(role, seed=1000)
        self.restore(runtime, state)
        return runtime


def _batches(seed: int, drawn: list[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the script of a member at an end of a pipeline reads, in the same tensors always; ``drawn`` counts it."""
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.empty(2, WIDTH), torch.empty(2, WIDTH)
    while True:
        drawn[0] += 1
        yield inputs.normal_(generator=generator), labels.normal_(generator=generator)


class Member:
    """One member: the engine's parts, put together as :class:`bamboo_ds.engine.parts.Parts` does."""

    def __init__(self, world: World, name: str, rank: int, plan: Plan) -> None:
        spec, layout = world.spec, world.layout
        self.world, self.name, self.layout = world, name, layout
        self.drawn, self.evaluated, self.losses = [0], [0], []  # type: ignore[var-annotated]
        self.fatal: FatalLoss | UnsupportedError | None = None
        self.started = self.left = False
        self.session: Any = _Session(name, world.network)
        self.job: Any = _Job(world, self.session, plan)
        self.progress = progress = Progress(seed=7)
        engine: Any = _Engine()
        engine.__dict__.update(
            device=torch.device("cpu"),
            num_stages=layout.stages,
            micro_batches=spec.micro_batches,
            is_data_parallel=layout.pipelines > 1,
            communication_data_type=torch.float32,
            pipeline_enable_backward_allreduce=True,
            batch_fn=None,
            timers=None,
            gradient_clipping=lambda: CLIPPING,
            train_batch_size=lambda: 1,
            monitor=SimpleNamespace(enabled=False),
            checkpoint_engine=SimpleNamespace(save=_nothing),
            _parts=self,
        )
        role = layout.role(rank)
        at_end = role.stage in (0, layout.stages - 1)
        engine.__dict__["data_iterator"] = _batches(100 + role.pipeline, self.drawn) if at_end else None
        self._held_out = _batches(200 + role.pipeline, self.evaluated) if at_end else None
        self.engine, self.ds = engine, SimulatedDeepSpeed(engine)
        ds: Any = self.ds
        self.groups = groups = RoleGroups(self.session, layout)
        local = self.runtime(role, seed=50, owned=True)
        engine.__dict__.update(local.attributes)
        engine._modules["module"] = local.module
        self.binding = binding = RuntimeBinding(engine, local)
        mode = RedundancyMode(spec.mode)
        self.epoch = epoch = CurrentEpoch(self.job, layout, mode.eager_backward)
        random = Random(world.random.random())
        history, batches, idle = History(), Batches(), _DrawnIdleTimes(random)
        beats, generators = Beats(self.job, progress), RoleGenerators(ds, layout, progress, history)
        accounts = Accounts(str(spec.ledger) if spec.ledger else None, name)
        accounts.begin("run", accounts.folder)
        saves: Any = _Saves()
        self.saves = saves
        collectives: Any = SimpleNamespace(
            begin_gap=_nothing, agree=_nothing, flush=_nothing, record=lambda: _NO_COLLECTIVES
        )
        joining: Any = SimpleNamespace(active=False)
        self.snapshots: Any = _Snapshots(world, name)
        constructions: dict[Role, Construction] = {}
        replay: Any = SimpleNamespace(recorded=_nothing, joining=joining, under_way=False)
        settings = RedundancyConfig.model_validate({"mode": spec.mode, "verify_every": 1})

        supply = BatchSupply(ds, binding, epoch, progress, batches, accounts, None, None)
        tied = {0, layout.stages - 1} if spec.tied else set()
        reduction = Reduction(ds, binding, epoch, tied)
        builder = _Builder(ds, layout, groups, binding, None)
        builder.member = self
        checks = ExactChecks(ds, True, binding, epoch, progress, reduction, builder, beats)
        checks.begin(spec.checked)
        slices = SlicedPasses(ds, groups, binding)
        self.passes = Passes(ds, layout, binding, progress, batches, accounts, slices, generators, idle, checks)
        self.boundaries = Boundaries(ds, binding, epoch, progress, idle, True)
        self.redundant = RedundantPasses(
            ds, settings, mode, binding, epoch, progress, batches, self.passes, self.boundaries, idle, checks
        )
        self.reduction = reduction
        self.commits = Commits(ds, binding, epoch, progress, batches, accounts, saves, checks)
        self.steps = Steps(ds, layout, groups, binding, progress, generators, settings.verify_every)
        self.replication = Replication(
            binding, epoch, progress, self.boundaries, self.steps, constructions, Mismatches(1)
        )
        self.copies = Copies(binding, epoch, progress, builder, self.steps, self.snapshots, constructions)
        announcements = Announcements(binding, epoch, progress, joining)
        self.recovery = RecoveryProtocol(
            *(ds, binding, epoch, progress, tied, builder, self.boundaries, self.replication),
            *(self.commits, self.copies, supply, saves, history, collectives, joining, checks),
            announcements,
        )
        self.takeover = Takeover(
            binding, epoch, progress, self.recovery, self.replication, checks, collectives, beats, announcements
        )
        self.training = Training(
            *(ds, settings, mode, binding, epoch, progress, supply, replay, self.takeover, self.redundant),
            *(self.commits, self.steps, self.replication, self.copies, checks, saves, history, beats),
        )
        self.evaluation = Evaluation(
            *(ds, binding, epoch, progress, supply, replay, self.takeover, self.passes, self.replication),
            *(self.commits, self.copies, saves, history, beats, lambda: None),
        )
        self.checkpoints = Checkpoints(
            *(ds, groups, binding, epoch, progress, replay, self.takeover, self.commits, self.copies),
            *(None, saves, history, True),  # type: ignore[arg-type]
        )
        self.script = ScriptCalls(
            *(binding, epoch, progress, builder, self.copies, replay, self.takeover, collectives, announcements)
        )
        self.end, self.supply = End(epoch, progress, self.commits, saves), supply

    def runtime(self, role: Role, seed: int, owned: bool = False) -> StageRuntime:
        """A runtime of a new stage."""
        layout = self.layout
        ends = (0, layout.stages - 1)
        spec = self.world.spec
        module = Stage(role.stage, spec.tied and role.stage in ends, seed, spec.statistics)
        if module.tied_modules:
            ranks = tuple(layout.rank(Role(role.pipeline, stage)) for stage in ends)
            comm = {"ranks": ranks, "group": _Group(self, f"tied {role.pipeline}", ranks), "weight_attr": ["weight"]}
            module.tied_comms["ends"] = comm
        parameters = list(module.parameters())
        mine = parameters[role.pipeline :: layout.pipelines] if layout.sharded else parameters
        optimizer = torch.optim.SGD([{"params": mine}], lr=0.1, momentum=0.9)
        # DeepSpeed counts all parameters on the first stage, and elsewhere those of tensor slices alone.
        data = _Group(self, f"data {role.stage}", tuple(map(layout.rank, layout.siblings(role))))
        grid = SimpleNamespace(get_model_parallel_rank=lambda: role.stage, get_data_parallel_group=lambda: data)
        runtime = StageRuntime(role, owned=owned)
        runtime.attributes = dict.fromkeys(BOUND_ATTRIBUTES)
        runtime.attributes.update(
            module=module,
            optimizer=optimizer,
            basic_optimizer=optimizer,
            stage_id=role.stage,
            global_rank=layout.rank(role),
            grid=grid,
            mpu=grid,
            data_parallel_group=data,
            pipe_buffers={name: [] for name in ("inputs", "labels", "outputs")},
            fwd_outputs=[],
            global_steps=0,
            global_samples=0,
            skipped_steps=0,
            micro_steps=0,
        )
        kind = Shards if layout.sharded else stage_optimizer
        runtime.layers, runtime.optimizer = Layers(module), kind(self.ds, self.groups, runtime)
        return runtime

    def run(self) -> None:
        """The script."""
        try:
            self.recovery.agreed = self.job.known.members
            self.recovery.enter(self.job.known)
            self.supply.connect({})
            with suppress(EpochChanged):  # as where an engine starts: the first operation recovers
                self.copies.copy_state(self.layout.roles)
                self.epoch.transport.exchange("all have their copies")
            self.script.leave()
            self.started = True
            for iteration in range(self.world.spec.iterations):
                self._evaluate()
                with self.script.inside():
                    self.losses.append(self.training.train_batch(None))
                self._change(iteration)
                if self.world.spec.saves:
                    with self.script.inside():
                        self.checkpoints.save("folder", str(iteration), None, True, False)
            self._evaluate()
            self.script.leave()
            with self.script.inside():
                self.takeover.run(self.end)
        except (FatalLoss, UnsupportedError) as error:
            self.fatal = error
        except Left:
            self.left = True

    def _evaluate(self) -> None:
        if self.world.spec.evaluates:
            with self.script.inside():
                self.losses.append(self.evaluation.eval_batch(self._held_out, False, True, "avg", True, None))

    def _change(self, iteration: int) -> None:
        """What the script does between two calls, as that of every member."""
        changes, local = self.world.spec.changes, self.binding.local
        if changes == "rates":
            for group in local.attributes["basic_optimizer"].param_groups:
                group["lr"] *= 0.75
        if changes == "weights" or (changes == "weights once" and iteration == 0):
            with torch.no_grad():
                local.module.get_parameter("linear.bias").add_(0.125)
                local.module.get_buffer("seen").mul_(0.5)


def _nothing(*_: Any) -> None:
    pass


_NO_COLLECTIVES: dict[str, Any] = {"gap": 0, "done": {}, "open": 0}


@dataclass(frozen=True)
class Spec:
    """A job.

    Attributes:
        pipelines, stages, micro_batches, iterations: of what size.
        mode: of redundancy.
        tied: the ends of a pipeline share weights.
        sharded: optimizers are partitioned over the pipelines.
        statistics: layers keep some.
        ledger: its folder, if there is one.
        heals: stages get new replicas, and roles move, while the job goes on.
        leaves: a member leaves.
        evaluates: an evaluation comes before each iteration, and at the end.
        saves: a checkpoint comes after each iteration.
        changes: what scripts change between iterations: learning rates, or weights.
        checked: how many first steps are checked for exactness.
    """

    pipelines: int = 1
    stages: int = 3
    micro_batches: int = 2
    iterations: int = 3
    mode: str = "eager-frc-lazy-brc"
    tied: bool = False
    sharded: bool = False
    statistics: bool = True
    ledger: Path | None = None
    heals: bool = False
    leaves: bool = False
    evaluates: bool = False
    saves: bool = False
    changes: Literal["rates", "weights", "weights once"] | None = None
    checked: int = 0

    @property
    def operations(self) -> int:
        """All of them together, without the end."""
        return self.iterations * (1 + self.evaluates + self.saves) + self.evaluates


@dataclass(frozen=True)
class Cut:
    """Who is killed when: before what the member does as number ``event``, counted from the loss before it."""

    member: str
    event: int


@dataclass(eq=False)
class World:
    """A job and its surroundings.

    Args:
        spec: the job.
        seed: of everything that is drawn.
        cuts: the losses, in their order.
        switch: a planned change of roles comes at some time, too.

    Attributes:
        done: of every member what it has done, and after how many iterations, since the last loss.
        killed: losses that have happened.
        healed: plans that were made to heal.
        leaving: a member that has been told to leave.
    """

    spec: Spec
    seed: int
    cuts: tuple[Cut, ...] = ()
    switch: bool = False
    done: dict[str, list[tuple[int, str]]] = field(default_factory=dict, init=False)
    killed: list[str] = field(default_factory=list, init=False)
    switched: bool = field(default=False, init=False)
    healed: list[Plan] = field(default_factory=list, init=False)
    leaving: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.layout = Layout(self.spec.pipelines, self.spec.stages, self.spec.sharded)
        self.turns = Turns(self.random)
        self.network = Network(self.random, self.turns, self.before)
        names = [f"m{rank}" for rank in range(self.layout.size)]
        self.plan = with_redundancy(initial_plan(names), self.layout, True)
        self.members = {name: Member(self, name, rank, self.plan) for rank, name in enumerate(names)}
        self.done = {name: [] for name in names}
        self.states: dict[str, WorkerState] = {}
        self._planned: tuple[int, tuple[WorkerState, ...]] | None = None
        self._change: Plan | None = None
        layout = self.layout
        self._records = {
            name: MemberRecord(id=name, slot=n, host=name, address="h", pid=1, agent_pid=2, incarnation="x", home=n)
            for n, name in enumerate(names)
        }
        self._reports = {name: LayoutRecord(id=name, layout=layout, redundant=True) for name in names}

    def run(self) -> World:
        """Run the job to its end."""
        for name, member in self.members.items():
            self.turns.add(name, member.run)
        self.turns.run(self._events)
        return self

    def before(self, name: str, what: str) -> None:
        """Member ``name`` is about to do something; others may come first."""
        self.turns.wait()
        member = self.members[name]
        if name in self.network.dead:
            raise Killed
        if member.started and member.progress.sequence < self.spec.operations:
            self.done[name].append((member.progress.steps, what))
            cut = self.cuts[len(self.killed)] if len(self.killed) < len(self.cuts) else None
            if cut == Cut(name, len(self.done[name]) - 1):
                self.network.kill(name)
                self.killed.append(name)
                for done in self.done.values():
                    done.clear()
                raise Killed

    def survivors(self) -> list[Member]:
        """Members that live and have not left."""
        return [member for name, member in self.members.items() if name not in self.network.dead and not member.left]

    # -- plans --------------------------------------------------------------------------------------------

    def _events(self) -> list[Any]:
        found: list[Any] = self.network.deliveries()
        started = all(member.started for member in self.members.values())
        late = [member for member in self.survivors() if member.job.known.epoch < self.plan.epoch]
        found += [lambda m=member: m.job.push(self.plan) for member in late]
        if self.spec.leaves and started and self.leaving is None:
            found.append(self._leave)
        if self.plan.unheld:
            return found  # the job ends
        if any(member.fatal for member in self.survivors()):
            return [*found, self._plan_end]
        if self.network.dead.intersection(self.plan.members):
            found.append(self._plan_losses)
        elif self.spec.heals and started and self._healing() is not None:
            found.append(self._heal)
        elif self.switch and started and any(self.plan.shadows) and not (self.switched or self.plan.lost):
            found.append(self._plan_switch)
        return found

    def _healing(self) -> Plan | None:
        """What the leader wants next."""
        states = tuple(self.states[name] for name in self.plan.members if name in self.states)
        if self._planned != (self.plan.epoch, states):
            self._planned = self.plan.epoch, states
            living = {name: self._records[name] for name in self.plan.members}
            view = View(self.layout.size, self.plan, living, self._records, reports=self._reports, workers=self.states)
            found = next_change(view, self.plan, Policy(redundant=True, near_shadows=True))
            self._change = None if found is None else found.plan
        return self._change

    def _leave(self) -> None:
        """A member is told to leave."""
        self.leaving = self.random.choice(self.plan.members)
        self._records[self.leaving] = self._records[self.leaving].model_copy(update={"state": "leaving"})
        self._planned = None

    def _heal(self) -> None:
        assert self._change is not None
        self.plan = self._change
        self.healed.append(self.plan)

    def _plan_losses(self) -> None:
        holders = holders_of(self.plan, ready_copies(self.states, self.plan))
        self.plan = takeover(self.plan, self.network.dead, holders)
        assert self.plan.unheld or not hungry(self.plan), "nobody is left with the batches"

    def _plan_end(self) -> None:
        """A member cannot go on, so nobody can."""
        self.plan = fatal_plan(self.plan, self.plan.members)

    def _plan_switch(self) -> None:
        """Owner and shadow of a role change places, at a boundary that all reach."""
        self.switched = True
        owners, shadows = list(self.plan.owners), list(self.plan.shadows)
        rank, shadow = self.random.choice([(rank, shadow) for rank, shadow in enumerate(shadows) if shadow])
        owners[rank], shadows[rank] = shadow, owners[rank]
        self.plan = replace(
            self.plan, epoch=self.plan.epoch + 1, owners=tuple(owners), shadows=tuple(shadows), immediate=False
        )


def state_of(world: World) -> dict[Role, dict[str, torch.Tensor]]:
    """All of every role's state at its owner.

    Raises:
        AssertionError: a replica has another one, a member other counters, or a role has not one owner.
    """
    found: dict[Role, dict[str, torch.Tensor]] = {}
    replicas = []
    for member in world.survivors():
        member.binding.refresh()
        for role, runtime in member.binding.runtimes.items():
            state = {name: tensor.detach().clone() for name, tensor in runtime.named_tensors()}
            assert runtime.attributes["global_steps"] == world.spec.iterations, (member.name, role)
            if not runtime.owned:
                replicas.append((member.name, role, state))
                continue
            assert role not in found, f"{role} has two owners"
            found[role] = state
    assert set(found) == set(world.layout.roles)
    for name, role, state in replicas:
        assert same(state, found[role]), f"the replica of {role} at {name} differs"
    return found


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Whether two states are equal to the last bit."""
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def finite(world: World) -> bool:
    """Whether all losses of all members are numbers, so that comparing them means something."""
    return all(math.isfinite(loss) for member in world.survivors() for loss in member.losses)
