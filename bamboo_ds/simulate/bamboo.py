"""A simulated job of this package: the leader's decisions, the planner's plans, the engine's orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import BambooConfig
from ..control.leader.actions import Action, Assign, StopJob, Wait, WritePlan
from ..control.leader.boundary import policy_of
from ..control.leader.decisions import Decider
from ..control.leader.restarts import fatal_plan
from ..control.leader.view import View
from ..control.registry.records import LayoutRecord, MemberRecord, ProgressRecord, RestartRecord, WorkerState
from ..observe import events as ev
from ..state.intervals import LossRate, interval_s
from ..topology import LONG_S, Candidate, Plan, initial_plan, with_redundancy
from ..topology.planner import plan as best_plan
from .market import Market
from .pace import Pace, Stretch
from .terms import Terms
from .training import Run, SimulatedTraining


def placed(pace: Pace, members: Sequence[Candidate], config: BambooConfig) -> Plan:
    """The plan of ``members`` if nobody holds any state yet: as after the start, when what it takes has been copied."""
    layout = pace.layout
    plan = with_redundancy(
        initial_plan([f"rank {rank}" for rank in range(layout.size)]), layout, False, memory=pace.footprint.stages
    )
    plan = replace(plan, cuts=pace.cuts if layout.blocks else (), costs=pace.costs if layout.blocks else None)
    replicas = config.redundancy.mode.replicas
    policy = policy_of(layout, replicas, config)
    return replace(best_plan(plan, members, policy=policy, holders={}), lost_roles=(), when="now")


def planned(pace: Pace, count: int, config: BambooConfig) -> Plan:
    """The same of ``count`` members, each on a host of its own."""
    size = pace.layout.size
    limit = config.topology.memory_limit
    members = [Candidate(f"m{n}", n, f"m{n}", script_rank=n % size, memory=limit) for n in range(count)]
    return placed(pace, members, config)


@dataclass(eq=False)
class _Copies:
    """Copies of states that members make while training goes on, by rank and member.

    Attributes:
        pairs: rank of the role, and the member that copies it; the owner that it is copied from.
        since: when the plan was entered.
        offered: owners have offered the states.
        arrived: the states are there.
    """

    pairs: dict[tuple[int, str], str]
    since: float
    offered: bool = False
    arrived: bool = False


class BambooJob(SimulatedTraining):
    """A job of this package.

    A change of plan takes as long as it does in a real job. The leader decides as soon as all members have entered the
    plan before, or there is news, and they enter what it has written at the next boundary, or at once where the plan
    says so. Owners offer their states when they enter a plan that has them copied, also in the middle of an iteration.
    A copy is complete with the end of the iteration in which it arrives, where members wait for what the leader makes
    of it (a very short one at once at a boundary); in a long iteration, unless optimizers are sharded, at once::

        boundary   0                                                            1
        members    enter plan, offer states        complete copies              enter the next plan
        leader                                     writes it

    Args:
        market: the nodes that the job rents.
        pace: of the job.
        terms: what is assumed.
        config: the job's settings.
        seed: of the order in which nodes of the begin become members.

    Attributes:
        plan: in force.
    """

    plan: Plan

    def __init__(self, market: Market, pace: Pace, terms: Terms, config: BambooConfig, seed: int) -> None:
        self._records: dict[str, MemberRecord] = {}
        self._reports: dict[str, LayoutRecord] = {}
        self._pace, self._config, self._decider = pace, config, Decider(config)
        self._written: WritePlan | None = None  # and not entered yet
        self._entered = False  # all members have entered the plan in force
        super().__init__(market, pace.profile, terms, seed)
        self._stretch: Stretch
        self._placed: Plan  # to start with
        self._paused_s = 0.0  # in which the iteration under way was interrupted
        self._decided: object = None  # what the leader knew when it last had nothing to do
        self._built: set[tuple[int, str]] = set()  # copies that are complete
        self._copied: set[tuple[int, str]] = set()  # those that the leader knows of
        self._copying: list[_Copies] = []  # of the plan in force, as far as they are not complete
        self._ordinary_s = 0.0  # of an undisturbed iteration, as members have told
        self._restarting: RestartRecord | None = None  # the restart that the leader has begun
        self._restarted: RestartRecord | None = None  # the newest one that has come to train
        self._furthest = 0  # the newest step that there ever was
        shares = [count * pace.footprint.state.copied for count in pace.parameters]
        self._copy_s = max(shares) / (terms.host_gb_s * 1e9)
        self._load_s = max(shares) / (terms.storage_gb_s * 1e9)

    # -- the leader ---------------------------------------------------------------------------------------

    def _register(self, node: str) -> None:
        super()._register(node)
        slot, size = self.ready[node], self._pace.layout.size
        where = {"slot": slot, "host": node, "zone": self.market.zones.get(node, ""), "script_rank": slot % size}
        process = {"address": "", "pid": 0, "agent_pid": 0, "incarnation": "", "joiner": self.env.now > 0}
        self._records[node] = MemberRecord(id=node, **where, **process)
        layout = self._pace.layout
        told = {"redundant": self._config.redundancy.mode.replicas, "memory": self._config.topology.memory_limit}
        self._reports[node] = LayoutRecord(id=node, layout=layout, iterators=False, **told)
        self._lead()

    def _lead(self) -> None:
        """The leader decides, if it knows anything new; there is one plan at a time that members have not entered."""
        if not self._entered or self._written is not None or self._known() == self._decided:
            return
        action = self._decider.decide(self._view(), self.env.now)
        self._decided = self._known()
        if not isinstance(action, WritePlan):
            return
        if not self._pace.footprint.fits(action.plan):
            self.outcome.refused += 1
            return
        self._written = action
        if self._written_at_once and self.env.active_process is not self._process:
            self._process.interrupt()
        else:
            self.tell()

    @property
    def _written_at_once(self) -> bool:
        """Whether there is a plan that members do not wait for a boundary with."""
        return self._written is not None and self._written.plan.interrupts()

    def _known(self) -> tuple[object, ...]:
        """The input of the leader's decisions between two losses."""
        return self.plan.epoch, tuple(self.ready), frozenset(self._copied)

    def _concerns(self, node: str) -> bool:
        return super()._concerns(node) or (self._written is not None and node in self._written.plan.members)

    def _view(self) -> View:
        """The job as its leader sees it, by the newest plan; members have told of the copies that they have."""
        replicas: dict[str, list[int]] = {member: [] for member in self.plan.members}
        for rank, shadow in enumerate(self.plan.shadows):
            if shadow in replicas:
                replicas[shadow].append(rank)
        for rank, builder in self.plan.builders:
            if (rank, builder) in self._copied:
                replicas[builder].append(rank)
        workers = {
            member: WorkerState.model_construct(
                id=member,
                epoch=self.plan.epoch,
                replicas=tuple(ranks),
                iteration_s=self._ordinary_s,
                sums_share=self._pace.sync_every / self._pace.micro_batches,
            )
            for member, ranks in replicas.items()
        }
        return View(
            world_size=self._pace.layout.size,
            plan=self.plan if self._written is None else self._written.plan,
            members={node: self._records[node] for node in self.ready},
            reports={node: self._reports[node] for node in self.ready},
            workers=workers,
        )

    def _candidates(self) -> list[Candidate]:
        facts, limit = (self._records[node] for node in self.ready), self._config.topology.memory_limit
        return [Candidate(r.id, r.slot, r.host, r.zone, r.script_rank, memory=limit) for r in facts]

    def _write(self, plan: Plan, reason: str, lost: Sequence[str] = ()) -> None:
        lent = [(each.rank, *plan.lent_blocks(each)) for each in plan.lent]
        self.epoch, self._written = plan.epoch, None
        self._emit_plan(plan.members, plan.owners, plan.shadows, lost, lent, reason)
        self._enter(plan.members)
        self.plan = plan
        self.outcome.plans += 1
        self._copy()

    # -- the job ------------------------------------------------------------------------------------------

    def _restart(self) -> Run:
        self._restarting = yield from self._assigned()
        yield from self._start_again(self.terms.restart_s + self._load_s)

    def _lacking(self) -> str | None:
        chosen = self._candidates()
        if not chosen:
            return "there are no members"
        self._placed = placed(self._pace, chosen, self._config)
        crowded = "the states of its stages do not fit on the members that there are"
        return None if self._pace.footprint.fits(self._placed) else crowded

    def _go(self) -> None:
        self._restarted = self._restarting
        self._write(replace(self._placed, epoch=self.epoch + 1), "start")
        self._entered = True
        self._pace_up()
        self.more_s = self.terms.first_s

    def _assigned(self) -> Run:
        """The restart that the leader begins, as soon as it does; one of a job that has ended never does."""
        while True:
            action = self._decider.decide(self._ended(), self.env.now)
            if isinstance(action, Assign):
                return action.record
            why, most = getattr(action, "reason", None), self._config.recovery.max_restarts
            self.outcome.idle = why
            if isinstance(action, StopJob) or not most:
                self.outcome.idle = f"bamboo.recovery.max_restarts = {most}: {why or 'a fatal loss ends the job'}"
                self._enter([])
                yield self.env.event()
            yield from self._wait()

    def _ended(self) -> View:
        """The job as its leader sees it after a fatal loss: all workers have ended, and agents of living ones wait."""
        return View(
            world_size=self._pace.layout.size,
            plan=fatal_plan(self.plan, ()),
            members={node: self._records[node].model_copy(update={"state": "waiting"}) for node in self.ready},
            progress={"": ProgressRecord(id="", step=self._furthest, checkpoint=self.saved.path)},
            restart=self._restarted,
        )

    def _pace_up(self) -> None:
        """Iterations are those of the plan from now on."""
        self._stretch = Stretch(self._pace, self.plan)
        self.iteration_s = self._ordinary_s = self._stretch.seconds
        self.faster(len(self.plan.members), self.iteration_s)

    def _boundary(self) -> Run:
        yield from self._save_if_due()
        arrived = any(copies.arrived for copies in self._copying)
        self._complete()
        self._offer()
        if arrived and self._written is None:
            self._copied = set(self._built)
            self._lead()
        while True:
            if self._written is not None:
                yield from self._change(self._written)
            self._copied = set(self._built)
            self._lead()
            if not self._written_at_once:
                return

    def _write_s(self) -> float:
        """Seconds to write a checkpoint: each member writes an equal share, or what it cannot divide."""
        whole = sum(self._pace.parameters) * self._pace.saved
        return max(self._load_s, whole / max(1, len(self.members)) / (self.terms.storage_gb_s * 1e9))

    def _interval_s(self) -> float:
        """To the script's next checkpoint, or the job's next one of its own: a restart goes on from either."""
        every_s = self._config.checkpoint.every_s
        if isinstance(every_s, str):
            seen = LossRate(seconds=self.env.now, fatal=self.outcome.restarts)
            every_s = interval_s(self._copy_s, self._write_s(), seen.mtbf_s)
        return min(self.terms.checkpoint_s, every_s or self.terms.checkpoint_s)

    def _save(self) -> Run:
        # One of the job's own, which it takes where its interval is the shorter one, is written in the background.
        waits = not self._config.checkpoint.asynchronous and self._interval_s() >= self.terms.checkpoint_s
        yield from self._checkpoint(self._copy_s, self._write_s(), self.plan.owners, waits)

    def _change(self, action: WritePlan) -> Run:
        """Enters the plan that the leader has written since the last boundary."""
        previous, owners = self.plan.epoch, self.plan.owners
        self._write(action.plan, action.reason)
        self._pace_up()
        self.more_s = self.terms.first_s if self.plan.owners != owners else 0.0
        yield self.env.timeout(self.terms.switch_s)
        self._offer(meanwhile=True)
        told = {"step": self.step, "pause_seconds": self.terms.switch_s, "previous": previous}
        self._emit_each(ev.Reconfigured, self.plan.members, **told)
        if self._copying and self.ready.keys() <= set(self.members):
            # The target stays while its copies are made, so there is nothing to do before they are.
            self._decided = self._known()

    @property
    def soon(self) -> bool:
        return self._written is not None or not all(copies.offered for copies in self._copying)

    def _recover(self) -> Run:
        """Takes over from lost members in the middle of an iteration, and finishes it."""
        self._entered = False
        done, at_s = self._within()
        at_s -= 0.0 if done else min(at_s, self.more_s)
        begun = self._segment is not None
        committed = self._commit_segment()
        if committed or not begun:
            # What was interrupted is not what was resumed before.
            self._paused_s = 0.0
            self._stretch = Stretch(self._pace, self.plan)
        if not begun:
            self._step_began = self.env.now
        left, ordinary = self._stretch, self.iteration_s
        self.more_s = 0.0
        since = self.env.now
        struck: float | None = since
        while True:
            action: Action | None = self._written
            if action is None or not self._written_at_once or self._absent():
                action = yield from self._answer()
            if isinstance(action, WritePlan) and action.plan.interrupts():
                plan, lost = action.plan, [loss.member for loss in action.losses]
                if plan.lost_roles or not self._pace.footprint.fits(plan):
                    yield from self._fatal(plan, lost)
                    return
                # Survivors work until they hear of the plan, but not on one that they have not agreed on.
                left = left.after(plan, at_s, at_s + (self.env.now - struck if struck is not None else 0.0))
                at_s, struck = 0.0, None
                self._write(plan, action.reason, lost)
            if (yield from self._entered_all(left)):
                break
        self._paused_s += self.env.now - since
        yield from self._finish(left.seconds, ordinary)

    def _answer(self) -> Run:
        """The leader's answer to losses, once it knows of them."""
        yield from self._hold(self.terms.detection_s)
        action = self._decider.decide(self._view(), self.env.now)
        while isinstance(action, Wait) and action.until is not None:
            yield from self._hold(max(0.0, action.until - self.env.now))
            action = self._decider.decide(self._view(), self.env.now)
        return action

    def _entered_all(self, left: Stretch) -> Run:
        """Members enter the plan in force; whether nothing interrupts that, and they do not enter the next at once."""
        if (yield from self._hold(self.terms.rebuild_s, whole=False)) or self._absent():
            return False
        self._stretch, self._entered = left, True
        if not left.committing:
            self._offer(meanwhile=True)
        self._lead()
        self._entered = not self._written_at_once
        return self._entered

    def _finish(self, left_s: float, ordinary: float) -> Run:
        """The rest of the interrupted iteration. Another loss interrupts it again."""
        began = self._step_began
        self.iteration_s = left_s
        self._segment = self.env.now, left_s
        try:
            yield self.env.timeout(left_s)
        except self._simpy.Interrupt:
            self.iteration_s = ordinary
            yield from self._recover()
            return
        pause = {"pause_seconds": max(0.0, self._paused_s - self.terms.detection_s)}
        times = {**pause, "detection_seconds": self.terms.detection_s, "plan_seconds": None, "rebuild_seconds": 0.0}
        work = {"redo_seconds": left_s, "forwards_redone": 0, "backwards_redone": 0, "mode": "resume"}
        self._emit_each(ev.Recovered, self.plan.members, step=self.step + 1, **times, **work)
        self._commit_segment()
        self._paused_s = 0.0
        self.outcome.pauses.append(self.env.now - began - ordinary)
        self._pace_up()

    def _fatal(self, plan: Plan, lost: Sequence[str]) -> Run:
        """Starts the job again: no member holds some stage, or the heirs lack the memory for it."""
        self._emit_losses(lost)
        if not plan.lost_roles:
            self.outcome.refused += 1
        stages = [(role.pipeline, role.stage) for role in map(plan.world.role, plan.lost_roles)]
        self._emit(ev.Fatal, stages=stages, members=list(lost), checkpoint=self.saved.path)
        self.epoch, self._written = plan.epoch, None
        self._enter([member for member in self.members if member not in lost])
        self._paused_s = 0.0
        self._furthest = max(self._furthest, self.step)
        yield from self._gather()

    # -- copies -------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """The plan in force is new: its copies begin that are neither complete nor under way from the same owner."""
        builders = set(self.plan.builders)
        self._built &= builders
        self._copied &= builders
        wanted = builders - self._built
        for copies in self._copying:
            kept = copies.pairs.items() if copies.offered else ()
            copies.pairs = {
                (r, m): owner for (r, m), owner in kept if (r, m) in wanted and self.plan.owners[r] == owner
            }
            wanted -= copies.pairs.keys()
        self._copying = [copies for copies in self._copying if copies.pairs]
        if wanted:
            self._copying.append(_Copies({pair: self.plan.owners[pair[0]] for pair in sorted(wanted)}, self.env.now))

    def _offer(self, meanwhile: bool = False) -> None:
        """Owners offer what is to be copied, and it travels; ``meanwhile``: nobody waits, however short that is."""
        for copies in self._copying:
            if not copies.offered:
                self._offer_all(copies, meanwhile)

    def _offer_all(self, copies: _Copies, meanwhile: bool) -> None:
        copies.offered = True
        load: dict[tuple[bool, str], float] = {}
        total = 0.0
        for (rank, builder), owner in copies.pairs.items():
            size = self._size(rank)
            total += size
            for end in ((False, owner), (True, builder)):
                load[end] = load.get(end, 0.0) + size
        bound = self._config.topology.transfer_mb_per_s
        rate = min(self.terms.network_gb_s * 1e9, float("inf") if bound is None else bound * 1e6)
        self.outcome.copied_gb += total / 1e9
        seconds = max(load.values()) / rate + self.terms.message_ms / 1000
        if seconds <= self.terms.boundary_s and not meanwhile:
            copies.arrived = True
            self._complete()
        else:
            self.env.process(self._travel(copies, seconds))

    def _size(self, rank: int) -> float:
        """Bytes of a role's state that are sent."""
        return self._pace.parameters[self._pace.layout.role(rank).stage] * self._pace.footprint.state.copied

    def _travel(self, copies: _Copies, seconds: float) -> Run:
        yield self.env.timeout(seconds)
        copies.arrived = True
        if copies not in self._copying:
            return
        if self._ordinary_s < LONG_S or self._pace.layout.sharded:  # complete with the iteration
            self.tell()
            return
        self._complete()
        self._copied = set(self._built)
        self._lead()

    def _complete(self) -> None:
        """Copies whose states have arrived are complete."""
        for copies in [copies for copies in self._copying if copies.arrived]:
            self._copying.remove(copies)
            self._built |= copies.pairs.keys()
            for rank, member in copies.pairs:
                role = self._pace.layout.role(rank)
                what = {"role": (role.pipeline, role.stage), "bytes": round(self._size(rank))}
                self._emit(ev.ReplicaBuilt, member=member, step=self.step, seconds=self.env.now - copies.since, **what)
