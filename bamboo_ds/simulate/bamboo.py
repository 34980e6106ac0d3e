"""A simulated job of this package: the leader's decisions, the planner's plans, the engine's orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config import BambooConfig
from ..control.leader.actions import Wait, WritePlan
from ..control.leader.boundary import policy_of
from ..control.leader.decisions import Decider
from ..control.leader.view import View
from ..control.registry.records import LayoutRecord, MemberRecord, WorkerState
from ..observe import events as ev
from ..topology import Candidate, Costs, Move, Plan, holders_of, initial_plan, moves, with_redundancy
from ..topology.planner import plan as best_plan
from .market import Market
from .pace import Pace, Stretch
from .terms import Terms
from .training import Run, Training


def placed(pace: Pace, members: Sequence[Candidate], config: BambooConfig) -> Plan:
    """The plan of ``members`` if nobody holds any state yet: as after the start, when what it takes has been copied."""
    layout = pace.layout
    plan = with_redundancy(initial_plan([f"rank {rank}" for rank in range(layout.size)]), layout, False)
    plan = replace(plan, cuts=pace.cuts if layout.blocks else (), costs=pace.costs if layout.blocks else None)
    replicas = config.redundancy.mode.replicas
    policy = policy_of(layout, replicas, config.topology.min_gain, config.standby.replicas)
    return replace(best_plan(plan, members, policy=policy, holders={}), unheld=(), immediate=True)


class BambooJob(Training):
    """A job of this package.

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
        super().__init__(market, pace.profile, terms, seed)
        self._stretch: Stretch
        self._noticed: float | None = None  # the loss that the iteration under way was first interrupted by
        self._decided: object = None  # what the leader knew when it last had nothing to do
        self._copied: set[tuple[int, str]] = set()
        self._copying: dict[tuple[int, str], str] = {}  # the source of each copy that is being made
        shares = [count * pace.state.owner for count in pace.parameters]
        self._copy_s = max(shares) / (terms.host_gb_s * 1e9)
        self._load_s = max(shares) / (terms.storage_gb_s * 1e9)

    # -- the leader ---------------------------------------------------------------------------------------

    def _register(self, node: str) -> None:
        super()._register(node)
        slot, size = self.ready[node], self._pace.layout.size
        known = {"id": node, "slot": slot, "host": node, "zone": self.market.zones.get(node, ""), "home": slot % size}
        self._records[node] = MemberRecord(
            **known, address="", pid=0, agent_pid=0, incarnation="", joiner=self.env.now > 0
        )
        replicas = self._config.redundancy.mode.replicas
        self._reports[node] = LayoutRecord(id=node, layout=self._pace.layout, redundant=replicas, iterators=False)

    def _view(self) -> View:
        """The job as its leader sees it: all members have entered the plan, and told of the copies that they have."""
        replicas: dict[str, list[int]] = {member: [] for member in self.plan.members}
        for rank, shadow in enumerate(self.plan.shadows):
            if shadow in replicas:
                replicas[shadow].append(rank)
        for rank, learner in self.plan.learners:
            if (rank, learner) in self._copied:
                replicas[learner].append(rank)
        workers = {
            member: WorkerState.model_construct(id=member, epoch=self.plan.epoch, replicas=tuple(ranks))
            for member, ranks in replicas.items()
        }
        return View(
            world_size=self._pace.layout.size,
            plan=self.plan,
            members={node: self._records[node] for node in self.ready},
            reports={node: self._reports[node] for node in self.ready},
            workers=workers,
        )

    def _candidates(self) -> list[Candidate]:
        facts = (self._records[node] for node in self.ready)
        return [Candidate(r.id, r.slot, r.host, r.zone, r.home) for r in facts]

    def _write(self, plan: Plan, reason: str, lost: Sequence[str] = ()) -> None:
        lent = [(each.rank, *plan.lent_blocks(each)) for each in plan.lent]
        self.epoch = plan.epoch
        self._emit_plan(plan.members, plan.owners, plan.shadows, lost, lent, reason)
        self._enter(plan.members)
        self.plan = plan
        self.outcome.facts["plans"] = self.outcome.facts.get("plans", 0) + 1
        self._copy()

    # -- the job ------------------------------------------------------------------------------------------

    def _gather(self, first: bool = False) -> Run:
        while True:
            if not first:
                yield from self._hold(self.terms.restart_s + self._load_s)
            chosen = self._candidates()
            plan = placed(self._pace, chosen, self._config) if chosen else None
            if plan is not None and self._pace.fits(plan):
                break
            if first:
                self.outcome.idle = "the states of its stages do not fit on the members that there are"
            yield from self._wait()
        self.outcome.idle = None
        if first:
            self._begin()
        else:
            self._restore()
        self._write(replace(plan, epoch=self.epoch + 1), "start")
        self._pace_up()
        self._checkpoint_due = self.env.now + self.terms.checkpoint_s

    def _pace_up(self) -> None:
        """Iterations are those of the plan from now on."""
        self._stretch = Stretch(self._pace, self.plan)
        self.iteration_s = self._stretch.seconds
        self.faster(len(self.plan.members), self.iteration_s)

    def _boundary(self) -> Run:
        if self.env.now >= self._checkpoint_due:
            self._checkpoint_due = self.env.now + self.terms.checkpoint_s
            whole = sum(self._pace.parameters) * self._pace.state.owner
            written_s = max(self._load_s, whole / len(self.plan.members) / (self.terms.storage_gb_s * 1e9))
            yield from self._checkpoint(self._copy_s, written_s)
        while (known := self._known()) != self._decided:
            action = self._decider.decide(self._view(), self.env.now)
            if not isinstance(action, WritePlan):
                self._decided = known
                return
            if not self._pace.fits(action.plan):
                self._decided = known
                self.outcome.refused += 1
                return
            previous = self.plan.epoch
            self._write(action.plan, action.reason)
            self._pace_up()
            yield self.env.timeout(self.terms.switch_s)
            told = {"step": self.step, "pause_seconds": self.terms.switch_s, "previous": previous}
            for member in self.plan.members:
                self._emit(ev.Reconfigured, member=member, **told)
            if self._copying:
                # The target stays while its copies are made, so there is nothing to do before they are.
                self._decided = self._known()

    def _known(self) -> tuple[object, ...]:
        """What the leader's decisions depend on between two losses."""
        return self.plan.epoch, tuple(self.ready), frozenset(self._copied)

    def _recover(self) -> Run:
        """Take over from lost members in the middle of an iteration, and finish it."""
        _, at_s = self._within()
        begun = self._segment is not None
        committed = self._commit_segment()
        if committed or not begun:
            # What was interrupted is not what was resumed before.
            self._noticed = None
            self._stretch = Stretch(self._pace, self.plan)
        if not begun:
            self._step_began = self.env.now
        left, ordinary = self._stretch, self.iteration_s
        while True:
            self._noticed = self.env.now if self._noticed is None else self._noticed
            yield from self._hold(self.terms.detection_s)
            action = self._decider.decide(self._view(), self.env.now)
            while isinstance(action, Wait) and action.until is not None:
                yield from self._hold(max(0.0, action.until - self.env.now))
                action = self._decider.decide(self._view(), self.env.now)
            if isinstance(action, WritePlan) and action.losses:
                plan, lost = action.plan, [loss.member for loss in action.losses]
                if plan.unheld or not self._pace.fits(plan):
                    yield from self._fatal(plan, lost)
                    return
                left = left.after(plan, at_s)
                at_s = 0.0
                self._write(plan, action.reason, lost)
            if not (yield from self._hold(self.terms.rebuild_s)) and not self._absent():
                break
        self._stretch = left
        yield from self._finish(left.seconds, ordinary)

    def _finish(self, left_s: float, ordinary: float) -> Run:
        """The rest of the interrupted iteration. Another loss interrupts it again."""
        agreed, began = self.env.now, self._step_began
        self.iteration_s = left_s
        self._segment = agreed, left_s
        try:
            yield self.env.timeout(left_s)
        except self._simpy.Interrupt:
            self.iteration_s = ordinary
            yield from self._recover()
            return
        pause = {"pause_seconds": agreed - (self._noticed or agreed) - self.terms.detection_s}
        times = {**pause, "detection_seconds": self.terms.detection_s, "plan_seconds": None, "rebuild_seconds": 0.0}
        for member in self.plan.members:
            work = {"redo_seconds": left_s, "forwards_redone": 0, "backwards_redone": 0, "mode": "resume"}
            self._emit(ev.Recovered, member=member, step=self.step + 1, **times, **work)
        self._commit_segment()
        self._noticed = None
        self.outcome.pauses.append(self.env.now - began - ordinary)
        self._pace_up()

    def _fatal(self, plan: Plan, lost: Sequence[str]) -> Run:
        """Nobody holds some stage, or the heirs have not the memory for it: the job starts again."""
        self._emit_losses(lost)
        if not plan.unheld:
            self.outcome.refused += 1
        stages = [(role.pipeline, role.stage) for role in map(plan.world.role, plan.unheld)]
        self._emit(ev.Fatal, stages=stages, members=list(lost), checkpoint=self.saved.path)
        self.epoch = plan.epoch
        self._enter([member for member in self.members if member not in lost])
        self._noticed = None
        yield from self._gather()

    # -- copies -------------------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Begin the copies of the plan that are not under way."""
        plan = self.plan
        learners = set(plan.learners)
        self._copied &= learners
        alive = set(plan.members)
        self._copying = {pair: source for pair, source in self._copying.items() if pair in learners and source in alive}
        wanted = learners.difference(self._copied, self._copying)
        if not wanted:
            return
        owners, shadows = list(plan.owners), list(plan.shadows)
        for rank, learner in plan.learners:
            # Two copies of a role's state are one for its owner and one for its shadow.
            if (rank, shadows[rank]) in learners:
                owners[rank] = learner
            else:
                shadows[rank] = learner
        new = replace(plan, owners=tuple(owners), shadows=tuple(shadows))
        sizes = Costs(state_bytes=tuple(round(count * self._pace.state.shadow) for count in self._pace.parameters))
        each = [m for m in moves(plan, new, holders_of(plan), sizes) if (m.rank, m.destination) in wanted]
        load: dict[tuple[bool, str], int] = {}
        for move in each:
            self._copying[move.rank, move.destination] = move.source
            for end in ((False, move.source), (True, move.destination)):
                load[end] = load.get(end, 0) + move.bytes
        bound = self._config.topology.transfer_mb_per_s
        rate = min(self.terms.network_gb_s * 1e9, float("inf") if bound is None else bound * 1e6)
        seconds = max(load.values(), default=0) / rate + self.terms.message_ms / 1000
        self.outcome.facts["copied_gb"] = self.outcome.facts.get("copied_gb", 0.0) + sum(m.bytes for m in each) / 1e9
        pairs = {(m.rank, m.destination): m for m in each}
        self.env.process(self._complete(pairs, seconds))

    def _complete(self, pairs: dict[tuple[int, str], Move], seconds: float) -> Run:
        yield self.env.timeout(seconds)
        for pair, move in pairs.items():
            if self._copying.get(pair) == move.source:
                del self._copying[pair]
                self._copied.add(pair)
                role = self._pace.layout.role(move.rank)
                what = {"role": (role.pipeline, role.stage), "seconds": seconds, "bytes": move.bytes}
                self._emit(ev.ReplicaBuilt, member=move.destination, step=self.step, **what)
        if not self._copying:
            self.tell()
