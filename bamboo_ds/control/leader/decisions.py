"""The leader's next action, as a pure function of etcd's contents and of the time.

No I/O: :mod:`.leader` supplies a :class:`~.view.View` and carries the action out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...config import BLOCK, BambooConfig
from ...errors import EXIT_FATAL_LOSS
from ...job_settings import differences
from ...topology import Layout, Policy, StageMemory, holders_of
from ...topology.plan import Plan
from ...topology.planner import initial_plan, takeover, with_redundancy
from ..registry.records import HealthReply, HealthRequest, LayoutRecord, LeftRecord, in_slot_order
from .actions import Action, Ask, Complete, Loss, StartDataWorkers, StopJob, Wait, WritePlan
from .boundary import as_told, next_change, policy_of, ready_copies, with_copies
from .departures import comes, drawing_ends, every_rank, vanished, wanted_feeder
from .failures import MOST_PER_STEP, hopeless
from .restarts import RestartLimits, Restarts, fatal_plan
from .view import View

#: A pair of members that cannot reach each other in a row of epochs is connected anew so often: the first time may be
#: spoilt by what one end had not noticed. A row ends where so many epochs have passed since a reconnection.
_RECONNECTIONS = 2
_RECONNECTED_EPOCHS = 4
#: Exit code of a job whose workers disagree about the layout.
EXIT_CONFIG = 2


class Decider:
    """Decides for one leader; remembers only since when it has seen members absent or accused, and of whom both.

    Args:
        settings: the job's, as far as they are known; those in the view are newer. For ``membership.settle_ms`` a loss
            waits for companions, and accusations for a better explanation. Then the agent of a member that only one
            accuses is asked, and has half of ``membership.lease_ttl_s`` for its reply. Without a reply the accused is
            dropped. With one, both are right and the connection between them is at fault: a new epoch with the same
            members rebuilds it. If they cannot reach each other after two of these either, one of them is dropped.
        limits: of a restart.
    """

    def __init__(self, settings: BambooConfig, limits: RestartLimits = RestartLimits()) -> None:  # noqa: B008  # immutable
        self._limits = limits
        self._go_by(settings)
        self._since: dict[tuple[str, int, str], float] = {}
        #: Of pairs of members: how often they were connected anew in a row, and the last epoch that has done that.
        self._reconnected: dict[frozenset[str], tuple[int, int]] = {}
        self._feeders: dict[str, int] = {}  # workers that were to draw batches, by the rank that each runs as
        self._calm: View | None = None  # one in which the plan was the planner's choice

    def _go_by(self, settings: BambooConfig) -> None:
        self._settings = settings
        self._settle_s = settings.membership.settle_ms / 1000
        self._reply_timeout_s = settings.membership.lease_ttl_s / 2
        self._restarts = Restarts(settings.recovery, self._limits) if settings.recovery.max_restarts else None

    def decide(self, view: View, now: float) -> Action:
        """The next action; ``now`` is monotonic seconds."""
        if view.settings is not None and view.settings.values != self._settings:
            self._go_by(view.settings.values)
        if view.stopping:
            return Wait()
        for departure in view.left.values():
            if departure.outcome == "failed" and _takes_part(departure, view):
                return _stop_after(departure, "failed")
        given_up = hopeless(view.left.values())
        if given_up is not None:
            return StopJob(given_up[0].code, given_up[1])
        if view.plan is None:
            return self._start(view)
        if view.plan.lost_roles:
            return self._restarts.next(view, view.plan, now) if self._restarts else Wait()
        for departure in view.left.values():
            if departure.outcome == "fatal" and departure.id in view.plan.members:
                if self._restarts is None:
                    return _stop_after(departure, "reported a fatal loss")
                what = f"{departure.id} cannot go on ({departure.reason}: {departure.detail})"
                return WritePlan(fatal_plan(view.plan, view.plan.members), what)
        return self._keep(view, view.plan, now)

    def _start(self, view: View) -> Action:
        for departure in view.left.values():
            if departure.outcome != "finished":
                return _stop_after(departure, "was lost before the job had started")
        workers = {
            member.script_rank: member.id for member in in_slot_order(view.members.values()) if not member.joiner
        }
        if len(workers) < view.world_size:
            return Wait()
        return WritePlan(initial_plan([workers[rank] for rank in sorted(workers)]), "all members are there")

    def _keep(self, view: View, plan: Plan, now: float) -> Action:
        self._feeders.update((r.id, r.script_rank) for r in view.members.values() if r.feeder and r.joiner)
        absent = [m for m in plan.members if m not in view.members and not view.finished(m)] + vanished(view, plan)
        sure = [m for m in absent if m in view.left or now >= view.trusted_from]
        if sure:
            noticed = min(self._first_seen("absent", plan.epoch, member, now) for member in sure)
            if now < noticed + self._settle_s:
                return Wait(noticed + self._settle_s)
            return self._take_over(view, plan, [self._loss(view, plan, member, now) for member in sure])
        action = self._judge(view, plan, now)
        if isinstance(action, Wait) and plan.layout is None:
            action = self._settle_layout(view, plan) or action
        if isinstance(action, Wait) and absent:
            until = view.trusted_from if action.until is None else min(view.trusted_from, action.until)
            return Wait(until)
        if action == Wait() and plan.layout is not None and not self._is_calm(view):
            ends = [at for at in drawing_ends(view, plan) if not set(at).intersection(plan.script_ranks)]
            if ends:
                return self._feed(view, plan, ends)
            change = next_change(view, plan, self._policy(view, plan))
            if change is not None:
                return change
            rank = wanted_feeder(view, plan)
            if rank is not None:
                why = self._unable(view, (rank,))
                if why is not None:
                    return Wait(None, f"who draws the batches of rank {rank} cannot leave, since {why}")
                return StartDataWorkers((rank,))
            self._calm = view
        return action

    def _is_calm(self, view: View) -> bool:
        """Whether all that the planner's choice follows from is as it was when that was the plan."""
        calm = self._calm
        if calm is None or calm.near_deadline != view.near_deadline:
            return False
        names = "plan", "members", "known", "left", "reports", "workers", "settings"
        return all(getattr(calm, name) is getattr(view, name) for name in names)

    def _settle_layout(self, view: View, plan: Plan) -> Action | None:
        """Gives the roles their shadows once every engine has reported the same layout."""
        reports = [view.reports[member] for member in plan.members if member in view.reports]
        for report in reports:
            if (report.layout, report.redundant) != (reports[0].layout, reports[0].redundant):
                return StopJob(
                    EXIT_CONFIG,
                    "the members' engines differ: "
                    f"{reports[0].id} has {_described(reports[0])}, {report.id} has {_described(report)}; "
                    "all workers must run the same script with the same configuration",
                )
            if report.layout.size != len(plan.owners):
                return StopJob(
                    EXIT_CONFIG,
                    f"the engine of {report.id} has {_described(report)}, which needs {report.layout.size} "
                    f"members, but the job was started with {len(plan.owners)}; "
                    f"start it with -n {report.layout.size} (bamboo join: --start {report.layout.size}; with fewer "
                    f"members --ranks {report.layout.size}) or change the number of stages",
                )
        told = {report.id: report.settings for report in reports if report.settings is not None}
        if told and view.settings is None:
            return None  # the agent that starts the job has yet to write what they are compared with
        opened = view.settings is not None and view.settings.open
        settings = next(iter(told.values()), self._settings) if opened else self._settings
        for member, own in told.items():
            if names := differences(own, settings):
                what = f"the script of {member} differs from others in {', '.join(names)} of its {BLOCK!r} block"
                return StopJob(EXIT_CONFIG, f"{what}: all workers must run by the same configuration")
        if len(reports) < len(plan.members):
            return None
        if opened and told:
            return Complete(settings)
        members = list(view.candidates(plan).values())
        layout = reports[0].layout
        memory, apart = _told_memory(plan, layout, reports), self._settings.topology.zones_apart
        new_plan = with_redundancy(plan, layout, reports[0].redundant, members, memory, apart)
        return WritePlan(new_plan, f"the engines are built: {_described(reports[0])}")

    # -- losses -------------------------------------------------------------------------------------

    def _take_over(self, view: View, plan: Plan, losses: Sequence[Loss]) -> Action:
        who = ", ".join(f"{loss.member} ({loss.reason}: {loss.detail})" for loss in losses)
        if plan.layout is None:
            what = f"lost {who} before the engines were built, when nobody held a replica of its stage yet"
            if self._restarts is None:
                return StopJob(EXIT_FATAL_LOSS, what, tuple(losses))
            missed = [loss.member for loss in losses]
            new_plan = fatal_plan(plan, [member for member in plan.members if member not in missed], missed)
            return WritePlan(new_plan, what, tuple(losses))
        # A member that has finished can own nothing any more, although it is no loss by itself.
        gone = {loss.member for loss in losses} | {m for m in plan.members if view.finished(m)}
        plan = as_told(view.workers, plan, gone)
        holders = holders_of(plan, ready_copies(view.workers, plan))
        new_plan = takeover(plan, gone, holders, view.candidates(plan).values())
        new_plan = with_copies(view, new_plan, self._policy(view, plan))
        return WritePlan(new_plan, f"lost {who}", tuple(losses))

    def _policy(self, view: View, plan: Plan) -> Policy:
        redundant = any(report.redundant for report in view.reports.values())
        return policy_of(plan.world, redundant, self._settings)

    def _feed(self, view: View, plan: Plan, ends: Sequence[tuple[int, ...]]) -> Action:
        """Has members draw the batches of ``ends``, which nobody in the plan does."""
        for at in ends:
            why = self._unable(view, at)
            if why is not None:
                return self._unfed(plan, at, why)
        return fed(view, plan, ends)

    def _unable(self, view: View, at: tuple[int, ...]) -> str | None:
        """The reason why no worker that joins would draw the batches of ``at``, or ``None``."""
        if every_rank(view):
            return (
                "a worker that joins cannot replay what the script computes with an engine without a "
                '"bamboo" block, or does to its stage between two steps'
            )
        left = [
            view.left[each] for each, script_rank in self._feeders.items() if script_rank in at and each in view.left
        ]
        begun = [record for record in left if record.step is None and record.reason == "exit"]
        ended = sorted(record.id for record in begun if record.outcome == "finished")
        if ended:
            return (
                f"worker {', '.join(ended)}, which was to do so, has ended before: while its script replays alone it "
                "goes another way, such as by a broadcast from another rank, which then gives it its own value"
            )
        failed = [record for record in begun if record.outcome == "lost"]
        if len(failed) < MOST_PER_STEP:
            return None
        last = max(failed, key=lambda record: record.slot)
        how = f"exit code {last.detail}: its output says why" if last.detail.isdecimal() else last.detail
        return f"each of {len(failed)} workers that were to do so has failed, the last one, {last.id}, by {how}"

    def _unfed(self, plan: Plan, at: tuple[int, ...], why: str) -> Action:
        """A new worker could draw the batches of the ends ``at``, but does not get there."""
        what = f"nobody draws the batches of rank {at[-1]} any more, and {why}"
        if self._restarts is None:
            return StopJob(EXIT_FATAL_LOSS, what)
        return WritePlan(fatal_plan(plan, plan.members), what)

    def _loss(self, view: View, plan: Plan, member: str, now: float) -> Loss:
        noticed = self._first_seen("absent", plan.epoch, member, now)
        departure = view.left.get(member)
        if departure is None:
            return Loss(member, "lease", "ran out", None, noticed)
        age = departure.age_s(noticed)
        detection = None if age is None else max(0.0, age)
        return Loss(member, departure.reason, departure.detail, detection, noticed)

    def _judge(self, view: View, plan: Plan, now: float) -> Action:
        """Weighs the accusations of the current epoch, the member that most others accuse first."""
        accusers: dict[str, list[str]] = {}
        living = set(plan.members) & set(view.members)
        current = [suspicion for suspicion in view.suspicions.values() if suspicion.epoch == plan.epoch]
        stuck = {each.by: each.accused[each.by] for each in current if each.by in each.accused and each.by in living}
        if stuck and (let_go := self._let_go(view, plan, stuck, now)) is not None:
            return let_go
        for accuser, accused in ((each.by, accused) for each in current for accused in each.accused):
            departure = view.left.get(accused)
            if departure is not None and departure.abrupt:
                return _stop_without(departure, accuser, plan)
            if accuser in living and accused in living and accuser != accused:
                accusers.setdefault(accused, []).append(accuser)
        wake: list[float] = []
        unasked: list[str] = []
        for accused in sorted(accusers, key=lambda m: (-len(accusers[m]), -view.members[m].slot)):
            by = sorted(accusers[accused])
            several, replied = len(by) > 1, _told_in(plan.epoch, view.healthy.get(accused))
            noticed = self._first_seen("accused twice" if several else "accused", plan.epoch, accused, now)
            settled = noticed + self._settle_s
            due = settled if several else settled + self._reply_timeout_s
            if now < settled:  # others may be about to accuse it, too; then no word of it is needed
                wake.append(settled)
            elif now < due:
                if replied or _told_in(plan.epoch, view.asked.get(accused)):
                    wake.append(due)
                else:
                    unasked.append(accused)
            elif several or not replied:
                return self._take_over(view, plan, [Loss(accused, "suspects", ", ".join(by), None, noticed)])
            else:
                return self._reconnect(view, plan, accused, by[0], noticed)
        if unasked:
            return Ask(tuple(unasked))
        held = f"{', '.join(sorted(stuck))} cannot go on, and nobody else holds their stages" if stuck else None
        return Wait(min(wake, default=None), held)

    def _reconnect(self, view: View, plan: Plan, accused: str, by: str, noticed: float) -> Action:
        """One member cannot reach another one that is alive: they connect anew. If that does not help, one has to go.

        The one whose loss costs less: there are holders for its roles; it has fewer of them.
        """
        pair = frozenset((accused, by))
        rows = self._reconnected.items()
        self._reconnected = {p: (n, at) for p, (n, at) in rows if plan.epoch - at < _RECONNECTED_EPOCHS}
        times, at = self._reconnected.pop(pair, (0, 0))
        times -= at > plan.epoch  # that one was never written
        if times < _RECONNECTIONS:
            self._reconnected[pair] = times + 1, plan.epoch + 1
            new_plan = replace(plan, epoch=plan.epoch + 1, lost=(), when="now")
            return WritePlan(new_plan, f"{by} cannot reach {accused}, which is alive")
        loser, winner = sorted(pair, key=self._cost_in(view, plan))
        return self._take_over(view, plan, [Loss(loser, "suspects", winner, None, noticed)])

    def _let_go(self, view: View, plan: Plan, stuck: Mapping[str, str], now: float) -> Action | None:
        """Evicts one of the members that cannot enter the plan's epoch; ``stuck`` has the reasons that they tell.

        Only one at a time, since its end may free the others; first one whose stages members hold that are not stuck.
        And none whose stages nobody else holds: it may come after all, and gives up by itself if it does not.
        """
        noticed = {member: self._first_seen("stuck", plan.epoch, member, now) for member in stuck}
        settled = min(noticed.values()) + self._settle_s
        if now < settled:
            return Wait(settled)
        cost = self._cost_in(view, plan)
        plan = as_told(view.workers, plan)
        holders = holders_of(plan, ready_copies(view.workers, plan)) if plan.layout else {}
        at_risk = [held for held in holders.values() if set(held) <= set(stuck)]
        member = min(stuck, key=lambda m: (cost(m)[0], sum(m in held for held in at_risk), cost(m)))
        if cost(member)[0]:
            return None
        return self._take_over(view, plan, [Loss(member, "abort", stuck[member], None, noticed[member])])

    def _cost_in(self, view: View, plan: Plan) -> Callable[[str], tuple[int, int, int]]:
        """The cost of a member's loss, to compare: roles that no other member holds; roles; else its slot.

        Before the engines are built nobody holds anything for others.
        """
        plan = as_told(view.workers, plan)
        holders = holders_of(plan, ready_copies(view.workers, plan)) if plan.layout else None
        members = view.candidates(plan).values()

        def cost(member: str) -> tuple[int, int, int]:
            fatal = len(takeover(plan, {member}, holders, members).lost_roles)
            return fatal, plan.owners.count(member), -view.members[member].slot

        return cost

    def _first_seen(self, what: str, epoch: int, member: str, now: float) -> float:
        for key in [key for key in self._since if key[1] < epoch]:
            del self._since[key]
        return self._since.setdefault((what, epoch, member), now)


def _told_in(epoch: int, record: HealthRequest | HealthReply | None) -> bool:
    return record is not None and record.epoch == epoch


def fed(view: View, plan: Plan, ends: Sequence[tuple[int, ...]]) -> Action:
    """Admits a member whose script runs at one of ``ends``, at once: nobody comes to a boundary without its batches."""
    coming = [r for r in in_slot_order(view.members.values()) if comes(view, plan, r)]
    for ready in coming:
        if ready.id in view.reports and any(ready.script_rank in at for at in ends):
            new_plan = replace(
                plan,
                epoch=plan.epoch + 1,
                members=(*plan.members, ready.id),
                script_ranks=(*plan.script_ranks, ready.script_rank),
                lost=(),
                when="now",
            )
            return WritePlan(new_plan, f"{ready.id} draws the batches of rank {ready.script_rank}")
    script_ranks = {record.script_rank for record in coming}
    ranks = tuple(at[-1] for at in ends if script_ranks.isdisjoint(at))
    return StartDataWorkers(ranks) if ranks else Wait()


def _told_memory(plan: Plan, layout: Layout, reports: Sequence[LayoutRecord]) -> tuple[StageMemory, ...]:
    """Memory of the stages, as the members whose scripts run as them have reported; empty if not all have."""
    told: dict[int, list[StageMemory]] = {}
    for report in reports:
        if report.stage is not None:
            told.setdefault(layout.role(plan.script_rank(report.id)).stage, []).append(report.stage)
    if len(told) < layout.stages:
        return ()
    return tuple(max(told[stage], key=lambda each: each.replica) for stage in range(layout.stages))


def _takes_part(departure: LeftRecord, view: View) -> bool:
    """Whether it is the job's worker that has ended, and not one that the job goes on without."""
    plan, restart = view.plan, view.restart
    starting = plan is None or (plan.lost_roles and restart is not None and departure.generation == restart.generation)
    return starting or (plan is not None and departure.id in plan.members)


def _stop_after(departure: LeftRecord, what: str) -> StopJob:
    reason = f"member {departure.id} {what} ({departure.reason}: {departure.detail})"
    own_code = departure.outcome in ("failed", "fatal")
    return StopJob(departure.code if own_code else EXIT_FATAL_LOSS, reason)


def _stop_without(departure: LeftRecord, by: str, plan: Plan) -> StopJob:
    """Ends a job in which ``by`` needs a member that has ended as if it had finished."""
    script_ranks = dict(zip(plan.members, plan.script_ranks, strict=True))
    told = f"has ended with exit code 0 (the newest step that it told: {departure.step})"
    return StopJob(
        1,
        f"the process of rank {script_ranks[departure.id]} ({departure.id}) {told}, while rank {script_ranks[by]} goes "
        "on. The scripts of all ranks must end after the same step",
    )


def _described(report: LayoutRecord) -> str:
    layout = report.layout
    sliced = f"{layout.copies} x {layout.slices}" if layout.slices > 1 else f"{layout.pipelines}"
    return f"{sliced} pipelines of {layout.stages} stages {'with' if report.redundant else 'without'} redundancy"
