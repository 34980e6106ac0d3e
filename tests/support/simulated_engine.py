"""A job whose members are threads: the engine's own parts on a simulated network, without DeepSpeed and agents.

What computes are tiny stages of the same structure as DeepSpeed's: forward and backward passes by micro-batch, a loss
at the end, gradient clipping, an optimizer with state, dropout, a buffer that passes change, and weights that the ends
of a pipeline share if that is wanted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bamboo_ds.bare import bare
from bamboo_ds.config import BambooConfig
from bamboo_ds.control.leader.actions import StartDataWorkers, WritePlan
from bamboo_ds.control.leader.boundary import next_change, policy_of, ready_copies, with_copies
from bamboo_ds.control.leader.decisions import fed
from bamboo_ds.control.leader.restarts import fatal_plan
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.registry.records import LayoutRecord, MemberRecord, WorkerState
from bamboo_ds.engine.context.shared import EngineContext
from bamboo_ds.engine.data.dataset import Dataset
from bamboo_ds.engine.data.supply import BatchSupply, Needs
from bamboo_ds.engine.iteration.block_times import BlockTimes
from bamboo_ds.engine.iteration.measures import Measures, PassBytes
from bamboo_ds.engine.parts import Parts
from bamboo_ds.engine.pipeline_engine import BambooPipelineEngine
from bamboo_ds.engine.replicas.building import StageBuilder
from bamboo_ds.engine.replicas.construction import Snapshots
from bamboo_ds.engine.script.flags import FLAGS
from bamboo_ds.engine.stage.groups import RoleGroups
from bamboo_ds.engine.stage.layers import Layers
from bamboo_ds.engine.stage.runtime import BOUND_ATTRIBUTES, RuntimeBinding, StageRuntime
from bamboo_ds.engine.stage.schedulers import Pristine
from bamboo_ds.engine.stage.wrappers import stage_optimizer
from bamboo_ds.errors import EpochChanged, FatalLoss, Left, ProtocolError, TransferError, UnsupportedError
from bamboo_ds.topology import (
    Layout,
    Lent,
    Plan,
    Policy,
    Role,
    StageMemory,
    holders_of,
    hungry,
    initial_plan,
    takeover,
    with_redundancy,
)

from .simulated_deepspeed import CLIPPING, WIDTH, Shards, SimulatedDeepSpeed, Stage
from .simulated_network import Killed, Network, Turns
from .simulated_worker import (
    DrawnBlockTimes,
    DrawnIdleTimes,
    Group,
    Job,
    Offers,
    Saves,
    Session,
    StragglersBlockTimes,
)


class _Engine(nn.Module):
    """The attributes of DeepSpeed's engine; parts bind roles to them."""

    HANDLERS = BambooPipelineEngine.HANDLERS


class _Builder(StageBuilder):
    """Builds the stages of this module."""

    member: Member

    def build(self, role: Role, state: Any, pristine: Pristine | None, parked: bool = False) -> StageRuntime:
        self.binding.refresh()
        local = self.binding.local
        runtime = local if role == local.role else self.member.runtime(self.ds, self.groups, role, seed=1000)
        self.restore(runtime, state)
        return runtime


def _batches(seed: int, drawn: list[int], look: Callable[[str], None]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the script of a member at an end of a pipeline reads, in the same tensors always.

    Args:
        drawn: counts it.
        look: called wherever the script's own code runs.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = torch.empty(2, WIDTH), torch.empty(2, WIDTH)
    while True:
        look("the iterator")
        drawn[0] += 1
        yield inputs.normal_(generator=generator), labels.normal_(generator=generator)


class Watched(TensorDataset):
    """A data set whose samples the script makes; ``look``: see :func:`_batches`."""

    def __init__(self, look: Callable[[str], None], *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self._look = look

    def __getitem__(self, index: int) -> Any:
        self._look("the data set")
        return super().__getitem__(index)

    def __len__(self) -> int:
        self._look("the data set's length")
        return super().__len__()


#: The member whose script runs; of each of the threads that take turns its own.
RUNS: ContextVar[Member] = ContextVar("RUNS")


class Member(Parts):
    """One member: an engine's parts, on a simulated network and with measures that are drawn."""

    def __init__(self, world: World, name: str, rank: int, plan: Plan, joiner: bool = False) -> None:
        spec, layout = world.spec, world.layout
        self.world, self.name = world, name
        self.drawn, self.evaluated, self.losses = [0], [0], []  # type: ignore[var-annotated]
        self.looks: Counter[str] = Counter()
        self.strange: list[tuple[str, Any]] = []
        self.fatal: FatalLoss | UnsupportedError | None = None
        self.started = self.left = self.ended = False
        self.gathered = 0
        redundancy = {
            "mode": spec.mode,
            "verify_every": 1,
            "check_exact": spec.checked,
            "sync_every": spec.sync_every,
        }
        checkpoint = {"every_s": 1e-9 if spec.own else 0, "asynchronous": True}
        parts = {"redundancy": redundancy, "checkpoint": checkpoint}
        settings = BambooConfig.model_validate({**parts, "observe": {"timeline": "off"}})
        self.session: Any = Session(name, world)
        job: Any = Job(world, self.session, plan, rank, joiner)
        engine: Any = _Engine()
        engine.__dict__.update(
            device=torch.device("cpu"),
            num_stages=layout.stages,
            micro_batches=spec.micro_batches,
            is_data_parallel=layout.pipelines > 1,
            communication_data_type=torch.float32,
            pipeline_enable_backward_allreduce=True,
            batch_fn=self._process,
            timers=None,
            gradient_clipping=lambda: CLIPPING,
            train_batch_size=lambda: 1,
            _config=SimpleNamespace(train_batch_size=1, gradient_clipping=CLIPPING),
            monitor=SimpleNamespace(enabled=False),
            checkpoint_engine=SimpleNamespace(save=_nothing),
            _parts=self,
        )
        role = layout.role(rank)
        at_end = role.stage in (0, layout.stages - 1)
        engine.__dict__["data_iterator"] = self._iterator(role, 100, self.drawn) if at_end else None
        dataset = None
        if spec.dataset:
            samples = Watched(self.look, *torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(3)))
            dataset = Dataset(samples, layout.pipelines, 2, lambda sampler: DataLoader(samples, 2, sampler=sampler))
            engine.__dict__["data_iterator"] = None
        self._held_out = self._iterator(role, 200, self.evaluated) if at_end else None
        ds: Any = SimulatedDeepSpeed(engine)
        groups = RoleGroups(self.session, layout)
        local = self.runtime(ds, groups, role, seed=50, owned=not joiner)
        engine.__dict__.update(local.attributes)
        engine._modules["module"] = local.module
        context = EngineContext(ds, job, settings, settings.redundancy.mode, groups, RuntimeBinding(engine, local))
        context.progress.seed, context.progress.checksums = 7, spec.checksums
        random = Random(world.random.random())
        needs = Needs(partial(world.note_needs, name), dataset is None)
        supply = BatchSupply(context, dataset, None, needs)
        times: BlockTimes = DrawnBlockTimes(layout, spec.iterations, random, world.long)
        if spec.straggler is not None:
            times = StragglersBlockTimes(layout, range(3, spec.iterations - 8) if name == spec.straggler else range(0))
        measures = Measures(DrawnIdleTimes(random), times, PassBytes(context, on=False))
        builder = _Builder(context)
        builder.member = self
        saves: Any = Saves(name, spec.own)
        self.offers: Any = Offers(world, name)
        tied = {0, layout.stages - 1} if spec.tied else set()
        super().__init__(context, supply, saves, builder, Snapshots(self.offers), tied, measures, {})
        self.replay.report_layout = lambda: world.wait_for_admission(name)
        self.iteration.checks.begin(spec.checked)

    def runtime(self, ds: Any, groups: RoleGroups, role: Role, seed: int, owned: bool = False) -> StageRuntime:
        """A runtime of a new stage."""
        layout = groups.layout
        ends = (0, layout.stages - 1)
        module = self.stage(role, seed)
        if module.tied_modules:
            ranks = tuple(layout.rank(Role(role.pipeline, stage)) for stage in ends)
            comm = {"ranks": ranks, "group": Group(self, f"tied {role.pipeline}", ranks), "weight_attr": ["weight"]}
            module.tied_comms["ends"] = comm
        parameters = list(module.parameters())
        mine = parameters[role.pipeline :: layout.pipelines] if layout.sharded else parameters
        optimizer = self.optimizer(module, mine)
        # DeepSpeed counts all parameters on the first stage, and elsewhere those of tensor slices alone.
        data = Group(self, f"data {role.stage}", tuple(map(layout.rank, layout.siblings(role))))
        grid = SimpleNamespace(get_model_parallel_rank=lambda: role.stage, get_data_parallel_group=lambda: data)
        runtime = StageRuntime(role, owned=owned, blocks=layout.blocks_of(role.stage))
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
        runtime.layers, runtime.optimizer = Layers(module), kind(ds, groups, runtime)
        runtime.begin_iteration()
        return runtime

    def stage(self, role: Role, seed: int) -> Any:
        """A new stage."""
        spec = self.world.spec
        shared = spec.tied and role.stage in (0, spec.stages - 1)
        return Stage(role.stage, spec.blocks, shared, seed, spec.statistics)

    def optimizer(self, module: Any, mine: list[nn.Parameter]) -> torch.optim.Optimizer:
        """A new optimizer of those parameters of ``module`` that are its role's own."""
        return torch.optim.SGD([{"params": mine}], lr=0.1, momentum=0.9)

    def _iterator(self, role: Role, seed: int, drawn: list[int]) -> Any:
        """The script's, at an end of a pipeline; where the ends are apart, what DeepSpeed does not look at is noise."""
        noise = torch.Generator().manual_seed(1)
        for number, batch in enumerate(_batches(seed + role.pipeline, drawn, self.look)):
            if self.world.spec.apart is not None and number >= self.world.spec.apart:
                batch[role.stage == 0].normal_(generator=noise)
            yield batch

    def _process(self, batch: Any) -> Any:
        self.look("batch_fn")
        return batch

    def look(self, where: str) -> None:
        """Note what the script's own code finds in the engine, if that is not what its role has."""
        self.looks[where] += 1
        if not hasattr(self, "binding"):
            return  # nothing can be bound yet
        seen, local = self.ds.engine.__dict__, self.binding.local
        own = local.attributes
        same = seen["module"] is own["module"] and seen["optimizer"] is own["optimizer"] and seen["grid"] is own["grid"]
        place = seen["stage_id"], seen["global_rank"]
        if not same or place != (local.role.stage, self.layout.rank(local.role)) or self.binding.current is not local:
            self.strange.append((where, place))

    def run(self) -> None:
        """The script."""
        RUNS.set(self)
        try:
            if self.job.channel.joiner:
                self.replay.join({})
            else:
                self._begin()
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
                if not self.progress.script.joining:
                    self.takeover.run(self.end)
            self.ended = True
        except (FatalLoss, UnsupportedError) as error:
            self.fatal = error
        except Left:
            self.left = True
        except ProtocolError:
            if not self.job.dismissed:
                raise
            self.left = True  # nobody is there any more to tell what the job has done

    def _begin(self) -> None:
        """Enter the first epoch, as where an engine starts."""
        self.recovery.agreed = self.job.known.members
        self.recovery.enter(self.job.known)
        self.supply.connect({})
        with suppress(EpochChanged):  # the first operation recovers
            self.copies.copy_state(self.layout.roles)
            self.copies.tell_replicas()
            self.epoch.agreement.exchange("all have their copies")

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
        if changes == "trained" and iteration == 0:
            for parameter in local.module.parameters():
                parameter.requires_grad_(parameter.ndim > 1)
        if changes == "weights" or (changes == "weights once" and iteration == 0):
            with torch.no_grad():
                local.module.get_parameter("0.linear.bias").add_(0.125)
                local.module.get_buffer("0.seen").mul_(0.5)


def _nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Spec:
    """A job.

    Attributes:
        pipelines, stages, micro_batches, iterations: of what size.
        blocks: layers of each stage.
        lends: shadows compute parts of stages.
        mode: of redundancy.
        sync_every: after so many micro-batches sums are sent.
        tied: the ends of a pipeline share weights.
        sharded: optimizers are partitioned over the pipelines.
        statistics: layers keep some.
        dataset: batches are those of one, which all members can read.
        checksums: events tell what steps have consumed.
        heals: stages get new replicas, and roles move, while the job goes on.
        leaves: a member leaves.
        joiners: so many members come in the place of lost ones.
        grows: so many more members come when all losses are over.
        evaluates: an evaluation comes before each iteration, and at the end.
        saves: a checkpoint comes after each iteration.
        own: the job takes one of its own after each iteration.
        changes: what scripts change between iterations: learning rates, weights, or once which parameters are trained.
        checked: how many first steps are checked for exactness.
        straggler: a member that is slow for some iterations. Without one, what members measure is drawn.
        room: so many stages each member may hold.
        tight: so many micro-batches each role may have under way; 0: as many as 1F1B has.
        apart: from this batch on, the iterators at the ends of a pipeline give different ones.
    """

    pipelines: int = 1
    stages: int = 3
    micro_batches: int = 2
    blocks: int = 1
    lends: bool = False
    iterations: int = 3
    mode: str = "eager-frc-lazy-brc"
    sync_every: int = 0
    tied: bool = False
    sharded: bool = False
    statistics: bool = True
    dataset: bool = False
    checksums: bool = False
    heals: bool = False
    leaves: bool = False
    joiners: int = 0
    grows: int = 0
    evaluates: bool = False
    saves: bool = False
    own: bool = False
    changes: Literal["rates", "weights", "weights once", "trained"] | None = None
    checked: int = 0
    straggler: str | None = None
    room: int | None = None
    tight: int = 0
    apart: int | None = None

    @property
    def operations(self) -> int:
        """All of them together, without the end."""
        return self.iterations * (1 + self.evaluates + self.saves) + self.evaluates


@dataclass(frozen=True)
class Cut:
    """Who is killed when: before what the member does as number ``event``, counted from the loss before it.

    With a condition ``when``, it is counted from when that first holds.
    """

    member: str
    event: int
    when: Callable[[World], bool] | None = None


@dataclass(eq=False)
class World:
    """A job and its surroundings.

    Args:
        spec: the job.
        seed: of everything that is drawn.
        cuts: the losses, in their order.
        switch: a planned change of roles comes at some time, too.
        at_once: it comes when members have done so many things, and interrupts the iteration.

    Attributes:
        kind: of members.
        done: of every member what it has done, and after how many iterations, since the last loss.
        killed: losses that have happened.
        taken_over: plans that were made after losses.
        healed: plans that were made to heal.
        replaced: the plan that the last one of them has replaced.
        leaving: a member that has been told to leave.
        awaited: whether members that waited for the plan that copies had been made for have got it.
        long: iterations are.
        every_rank: members whose scripts do what only all ranks can, so that a loss is fatal.
        most: the largest number of roles whose state a member has had, copies that it was making included.
    """

    kind: ClassVar[type[Member]] = Member

    spec: Spec
    seed: int
    cuts: tuple[Cut, ...] = ()
    switch: bool = False
    at_once: int | None = None
    done: dict[str, list[tuple[int, str]]] = field(default_factory=dict, init=False)
    killed: list[str] = field(default_factory=list, init=False)
    switched: bool = field(default=False, init=False)
    taken_over: list[Plan] = field(default_factory=list, init=False)
    healed: list[Plan] = field(default_factory=list, init=False)
    replaced: Plan = field(init=False)
    leaving: str | None = field(default=None, init=False)
    most: int = field(default=0, init=False)
    awaited: list[bool] = field(default_factory=list, init=False)
    waiting: set[str] = field(default_factory=set, init=False)
    needs: dict[str, bool] = field(default_factory=dict, init=False)
    fed: list[str] = field(default_factory=list, init=False)
    every_rank: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.long = Random(self.seed + 1).random() < 0.7
        blocks = (self.spec.blocks,) * self.spec.stages if self.spec.blocks > 1 else ()
        self.layout = Layout(self.spec.pipelines, self.spec.stages, self.spec.sharded, blocks=blocks)
        self.turns = Turns(self.random)
        self.network = Network(self.random, self.turns, self.before)
        names = [f"m{rank}" for rank in range(self.layout.size)]
        self.plan = with_redundancy(initial_plan(names), self.layout, True)
        if self.spec.room is not None:
            self.plan = replace(self.plan, memory=(StageMemory(1, 1, 1),) * self.spec.stages)
        if self.spec.tight:
            self.plan = replace(self.plan, tight=tuple((name, self.spec.tight) for name in names))
        if self.spec.lends:
            self.plan = replace(self.plan, lent=drawn_division(self.plan, Random(self.seed)))
        self.members = {name: self.kind(self, name, rank, self.plan) for rank, name in enumerate(names)}
        self.done = {name: [] for name in names}
        self.states: dict[str, WorkerState] = {}
        self._due = False
        self._planned: tuple[int, tuple[WorkerState, ...]] | None = None
        self._change: Plan | None = None
        self._records = {
            name: MemberRecord(
                id=name, slot=n, host=name, address="h", pid=1, agent_pid=2, incarnation="x", script_rank=n
            )
            for n, name in enumerate(names)
        }
        self._reports = {name: self._report(name) for name in names}

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
        self.most = max(self.most, len(self.held(name)))
        if member.started and member.progress.sequence < self.spec.operations:
            self.done[name].append((member.progress.steps, what))
            cut = self.cuts[len(self.killed)] if len(self.killed) < len(self.cuts) else None
            if cut is not None and cut.when is not None and not self._due and cut.when(self):
                self._due = True
                for done in self.done.values():
                    done.clear()
                self.done[name].append((member.progress.steps, what))
            waits = cut is None or (cut.when is not None and not self._due)
            if cut is not None and not waits and (cut.member, cut.event) == (name, len(self.done[name]) - 1):
                self.network.kill(name)
                self.killed.append(name)
                self._due = False
                for done in self.done.values():
                    done.clear()
                raise Killed

    def over(self) -> bool:
        """Whether a member has done all its work."""
        return any(member.ended for member in self.members.values())

    def _report(self, name: str) -> LayoutRecord:
        iterators = self.spec.evaluates or not self.spec.dataset
        return LayoutRecord(
            id=name,
            layout=self.layout,
            redundant=True,
            iterators=iterators,
            apart=self.needs.get(name, False),
            memory=self.spec.room,
        )

    def note_needs(self, name: str, iterators: bool, apart: bool) -> None:
        """A member tells what it needs to have batches."""
        self.needs[name] = apart
        self._reports[name] = self._report(name)

    @property
    def apart(self) -> bool:
        """Whether both ends of a pipeline need a member, as far as the leader knows."""
        return any(self.needs.get(name) for name in self.plan.members)

    def held(self, name: str) -> set[Role]:
        """The roles whose state member ``name`` has, or makes a copy of."""
        member = self.members[name]
        return {member.binding.local.role, *member.binding.runtimes, *member.copies.constructions}

    def wait_for_admission(self, name: str) -> None:
        """A member has come to where the job is."""
        self._reports[name] = self._report(name)
        self.waiting.add(name)
        self._planned = None

    def starves(self, lost: Collection[str] = ()) -> bool:
        """Whether nobody would be left who has the batches of some pipeline."""
        plan = takeover(self.plan, lost) if lost else self.plan
        return bool(hungry(plan, self.apart)) and (self.spec.evaluates or not self.spec.dataset)

    def survivors(self) -> list[Member]:
        """Members that live and have not left."""
        return [member for name, member in self.members.items() if name not in self.network.dead and not member.left]

    # -- plans --------------------------------------------------------------------------------------------

    def _events(self) -> list[Any]:
        found: list[Any] = self.network.deliveries()
        started = all(member.started for member in self.members.values() if not member.job.channel.joiner)
        late = [member for member in self.survivors() if member.job.known.epoch < self.plan.epoch]
        found += [lambda m=member: m.job.push(self.plan) for member in late]
        joining = [member for member in self.survivors() if member.progress.script.joining and not member.job.dismissed]
        found += [member.job.dismiss for member in joining if self.over()]
        if self.spec.leaves and started and self.leaving is None and self.random.random() < 0.3:
            found.append(self._leave)
        if self.plan.lost_roles:
            return found  # the job ends
        if any(member.fatal for member in self.survivors()):
            return [*found, self._plan_end]
        coming = min(self.spec.joiners, len(self.killed)) + self.spec.grows * (len(self.killed) == len(self.cuts))
        if started and len(self.members) < self.layout.size + len(self.fed) + coming and not self.over():
            found.append(self._join)
        if self.network.dead.intersection(self.plan.members):
            found.append(self._plan_losses)
        elif started and not self.over() and self._feeding() is not None:
            found.append(self._feed)
        elif self.spec.heals and started and self._healing() is not None:
            found.append(self._heal)
        elif self._switches() and self._entered() and any(self.plan.shadows) and not (self.switched or self.plan.lost):
            found.append(self._plan_switch)
        return found

    def _entered(self) -> bool:
        """Whether all members have entered the plan; before that the leader writes none that begins at a boundary."""
        members = [self.members[name] for name in self.plan.members]
        return all(member.started and member.session.epoch == self.plan.epoch for member in members)

    def _feeding(self) -> Plan | tuple[int, ...] | None:
        """The plan that admits a member which draws batches that nobody draws, or ranks that some have to run as."""
        if not self.starves():
            return None
        gone = {name for name, member in self.members.items() if member.left} | self.network.dead
        living = {name: record for name, record in self._records.items() if name not in gone}
        view = View(self.layout.size, self.plan, living, self._records, reports=self._told(), workers=self.states)
        action = fed(view, self.plan, hungry(self.plan, self.apart))
        if isinstance(action, WritePlan):
            return action.plan
        return action.ranks if isinstance(action, StartDataWorkers) else None

    def _told(self) -> dict[str, LayoutRecord]:
        """Reports of members whose engines are built; of those that join, once they wait to be admitted."""
        joined = {name for name, record in self._records.items() if record.joiner}
        waiting = {name for name in joined if self.members[name].progress.script.joining and name in self.waiting}
        return {
            name: report
            for name, report in self._reports.items()
            if name not in joined or name in waiting or name in self.plan.members
        }

    def _feed(self) -> None:
        """What the leader does about batches that nobody draws."""
        wanted = self._feeding()
        if isinstance(wanted, Plan):
            self.plan = wanted
            return
        assert wanted is not None
        for rank in wanted:
            name = f"f{len(self.fed)}"
            self.fed.append(name)
            self._begin(name, rank, feeder=True)

    def _healing(self) -> Plan | None:
        """What the leader wants next."""
        states = tuple(self.states[name] for name in self.plan.members if name in self.states)
        if self._planned != (self.plan.epoch, states):
            self._planned = self.plan.epoch, states
            found = next_change(self._view(), self.plan, self._policy)
            self._change = None if found is None else found.plan
        return self._change

    @property
    def _policy(self) -> Policy:
        return policy_of(self.layout, True, BambooConfig())

    def _view(self) -> View:
        """What the leader knows. Those that join are known as soon as they are there."""
        gone = {name for name, member in self.members.items() if member.left} | self.network.dead
        living = {name: record for name, record in self._records.items() if name not in gone}
        return View(self.layout.size, self.plan, living, self._records, reports=self._reports, workers=self.states)

    def _join(self) -> None:
        """A member begins to run the script, in the place of one that is lost as long as there is one."""
        number = len(self.members) - self.layout.size - len(self.fed)
        name = f"j{number}"
        script_rank = (
            self._records[self.killed[number]].script_rank if number < len(self.killed) else number % self.layout.size
        )
        self._begin(name, script_rank)

    def _begin(self, name: str, script_rank: int, feeder: bool = False) -> None:
        """A worker begins to run the script as rank ``script_rank``."""
        record = MemberRecord(
            id=name,
            slot=len(self.members),
            host=name,
            address="h",
            pid=1,
            agent_pid=2,
            incarnation="x",
            script_rank=script_rank,
            joiner=True,
            feeder=feeder,
        )
        self._records[name], self.done[name] = record, []
        member = self.members[name] = self.kind(self, name, script_rank, self.plan, joiner=True)
        self.turns.add(name, member.run)

    def answer(self, name: str, key: str) -> str:
        """What a member answers that another one asks."""
        self.turns.wait()
        member = self.members[name]
        if all(self.members[each].ended for each in set(self.plan.members) - self.network.dead):
            raise Left  # the job is over: who asks is told to end
        if name in self.network.dead or member.ended or member.left:
            raise TransferError("it is not there")
        return "{}" if key == FLAGS else member.history.answer(key)

    def _leave(self) -> None:
        """A member is told to leave."""
        lost = [cut.member for cut in self.cuts if cut.member in self.plan.members]
        able = [member for member in self.plan.members if not self.starves([member, *lost])]
        if not able:
            return  # nobody starts a data worker here
        self.leaving = self.random.choice(able)
        self._records[self.leaving] = self._records[self.leaving].model_copy(update={"state": "leaving"})
        self._planned = None

    def _heal(self) -> None:
        """The leader changes the plan, at a boundary or, where iterations are long, at once."""
        assert self._change is not None
        stay = set(self.plan.members) <= set(self._change.members)
        interrupts = self.long and stay and self.random.random() < 0.5
        change = replace(self._change, when="iteration" if interrupts else False)
        self.replaced, self.plan = self.plan, change
        self.healed.append(self.plan)

    def _plan_losses(self) -> None:
        if self.every_rank:
            self._plan_end()
            return
        holders = holders_of(self.plan, ready_copies(self.states, self.plan))
        self.plan = takeover(self.plan, self.network.dead, holders)
        if self.spec.heals:
            self.plan = with_copies(self._view(), self.plan, self._policy)
        self.taken_over.append(self.plan)

    def _plan_end(self) -> None:
        """A member cannot go on, so nobody can."""
        self.plan = fatal_plan(self.plan, self.plan.members)

    def _switches(self) -> bool:
        return self.switch if self.at_once is None else sum(map(len, self.done.values())) > self.at_once

    def _plan_switch(self) -> None:
        """Owner and shadow of a role change places."""
        self.switched = True
        owners, shadows = list(self.plan.owners), list(self.plan.shadows)
        rank, shadow = self.random.choice([(rank, shadow) for rank, shadow in enumerate(shadows) if shadow])
        owners[rank], shadows[rank] = shadow, owners[rank]
        changed = replace(
            self.plan,
            epoch=self.plan.epoch + 1,
            owners=tuple(owners),
            shadows=tuple(shadows),
            when="boundary" if self.at_once is None else "iteration",
        )
        self.plan = replace(changed, lent=drawn_division(changed, self.random) if self.spec.lends else ())


def drawn_division(plan: Plan, random: Random) -> tuple[Lent, ...]:
    """Parts of some stages for their shadows."""
    found: list[Lent] = []
    for rank, shadow in enumerate(plan.shadows):
        blocks = plan.world.blocks_of(plan.world.role(rank).stage)
        if shadow is not None and blocks > 1 and random.random() < 0.6:
            found.append(Lent(rank, random.randrange(1, blocks), random.choice(("front", "rear"))))
    return tuple(found)


def state_of(world: World) -> dict[Role, dict[str, torch.Tensor]]:
    """All of every role's state at its owner.

    Raises:
        AssertionError: a replica has another one, a member other counters, or a role has not one owner.
    """
    found: dict[Role, dict[str, torch.Tensor]] = {}
    replicas = []
    for member in world.survivors():
        for role, runtime in member.binding.runtimes.items():
            runtime.catch_up()
            member.binding.refresh()
            state = {name: bare(tensor).clone() for name, tensor in runtime.named_tensors()}
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
