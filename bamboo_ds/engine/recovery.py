"""One recovery: enter the newest epoch, take over what it gives to this member, and agree on how to go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ..comm.inner import runs_behind
from ..comm.script import ScriptCollectives
from ..errors import FatalLoss
from ..observe.spans import Kind
from ..schedule import Decision, RoleProgress
from ..topology import Plan, Role
from ..worker import plan_changes as plan_change
from .announcements import Announcements
from .boundaries import Boundaries
from .building import StageBuilder
from .committing import Commits
from .copies import Copies
from .deepspeed_adapter import DeepSpeedAdapter
from .exactness import ExactChecks
from .handshake import MemberReport, PartReport, Reports, RoleReport, ScriptReport, decision_of
from .history import History
from .joining import Joining
from .operation import Operation
from .recording import Recording
from .records import CurrentEpoch, Progress, Recovery
from .replication import Replication
from .runtime import RuntimeBinding, StageRuntime
from .saving import Saves
from .supply import BatchSupply

#: So many of what layers keep are named.
_NAMED = 10

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class RecoveryProtocol:
    """This member's part of recoveries.

    Attributes:
        operation: the one that is under way, or was the last one.
        agreed: members of the plan by which all have agreed last on how to go on.
    """

    ds: DeepSpeedAdapter
    binding: RuntimeBinding
    epoch: CurrentEpoch
    progress: Progress
    tied_stages: Collection[int]
    builder: StageBuilder
    boundaries: Boundaries
    replication: Replication
    commits: Commits
    copies: Copies
    supply: BatchSupply
    saves: Saves
    history: History
    collectives: ScriptCollectives
    joining: Joining
    checks: ExactChecks
    announcements: Announcements
    recording: Recording
    operation: Operation | None = field(default=None, init=False)
    agreed: tuple[str, ...] = field(default=(), init=False)

    def run(self) -> Decision:
        """Enter the newest epoch and agree with its other members on how to go on::

            loss noticed --> plan --> lanes --> roles --> reports <--> those of all members
                                                             |
              ready <-- batches, shards <-- progress <-- decision

        Raises:
            EpochChanged: another loss has interrupted it.
            FatalLoss: a stage has no holder left; what the scripts had just set up or changed is lost; or a lost
                script would go on to change its stage.
            Evicted: this member was taken for lost.
        """
        begin = time.monotonic()
        self.recording.disturbed()
        self.epoch.session.abort("recovery")
        before = self.progress.recovery
        noticed = min(self.epoch.job.lost_at or begin, begin, *([before.noticed] if before is not None else []))
        with self.recording.span(Kind.AWAIT_PLAN):
            plan = self.epoch.job.next_plan(self.epoch.session.epoch)
        planned = time.monotonic()
        logger.info("recovering to epoch %d: lost %s", plan.epoch, ", ".join(plan.lost))
        with self.recording.span(Kind.REBUILD):
            self.boundaries.forget()
            self._doubt_passes()
            self.announcements.listen()
            self.enter(plan)
            logger.info("entered epoch %d", plan.epoch)
            self.take_over_roles(plan)
            self.saves.follow(plan)
        with self.recording.span(Kind.AGREE):
            told = self.epoch.transport.exchange(self.report().to_json())
            reports = {member: MemberReport.from_json(text) for member, text in told.items()}
            decision = self._decide(plan, reports)
            logger.info("agreed to %s operation %d", decision.mode, decision.step)
            self._prepare(plan, reports, decision)
        self.epoch.job.lost_at = None
        redone = self._redone(plan, decision)
        seconds = planned - noticed, time.monotonic() - planned
        self.progress.recovery = Recovery(decision, noticed, *seconds, *redone, self.progress.newest)
        self.announcements.tell_again()
        with self.binding.for_script():
            plan_change.tell(plan, self.epoch.member)
        return decision

    def _doubt_passes(self) -> None:
        """Where collectives in passes run behind the host, a loss may have cut off those of any pass of the iteration.

        None of them has told. Passes whose sums count as reduced are whole: the reduction has made sure of that.
        """
        if self.epoch.layout.slices > 1 and runs_behind(self.ds.device):
            for runtime in self.binding.owned():
                runtime.partial_pass = runtime.partial_pass or (runtime.begun and runtime.reduced is None)

    def enter(self, plan: Plan) -> None:
        """Attach to ``plan``'s epoch."""
        self.epoch.enter(plan)
        self.replication.mismatches.begin()

    def _decide(self, plan: Plan, reports: Reports) -> Decision:
        """The same decision on all members, and what follows from it for what they do besides the operation."""
        self._check_setup(plan, reports)
        decision = decision_of(reports, plan, self.ds.micro_batches, self.tied_stages)
        self.announcements.check(plan, reports, decision)
        self.collectives.agree({m: report.script_facts() for m, report in reports.items()}, decision.step)
        self.copies.begin(plan, reports, decision.step)
        if self.joining.active:
            self.joining.take_over(decision, reports)
        self.copies.tell_replicas()
        return decision

    def _check_setup(self, plan: Plan, reports: Reports) -> None:
        """Raise ``FatalLoss``, on all members alike, where a loss hits what scripts set up before they train."""
        begun = max(report.step for report in reports.values())
        lost = [member for member in self.agreed if member not in plan.members]
        if lost and not begun and any(report.script.open for report in reports.values()):
            raise FatalLoss([], lost, self.epoch.job.newest_checkpoint(plan))
        self.agreed = plan.members

    def _prepare(self, plan: Plan, reports: Reports, decision: Decision) -> None:
        """Bring what this member holds of the interrupted operation to where it goes on."""
        behind = self.epoch.member in decision.behind
        if behind:
            self.supply.batches.drop()
        elif decision.mode == "resume":
            self._drop_reductions(decision.progress)
            self.begin_again(decision.progress)
        self.supply.connect({m: {} if m in decision.behind else report.received for m, report in reports.items()})
        # A member that is behind in an iteration steps first and takes part then.
        steps = max(report.steps for report in reports.values())
        lacking = any(reports[m].steps < steps for m in decision.behind) or any(r.stale for r in reports.values())
        if self.epoch.layout.sharded and lacking and not behind:
            self.replication.exchange_shards()

    def report(self) -> MemberReport:
        """What this member tells the others."""
        layout = self.epoch.layout
        roles = [
            RoleReport(
                role=(runtime.role.pipeline, runtime.role.stage),
                parts=_told(runtime) if runtime.begun and not runtime.partial_pass else (),
                reduced=self.commits.is_complete(runtime),
                state_only=runtime.role in self.progress.taken_over,
                changes=replace(runtime.layers.changes),
            )
            for runtime in self.binding.owned()
        ]
        return MemberReport(
            step=self.progress.sequence,
            entered=self.progress.entered,
            at_boundary=self.progress.at_boundary,
            roles=tuple(roles),
            helped=tuple((layout.rank(each.role), part) for each in self.binding.helped() for part in _told(each)),
            spent=tuple(layout.rank(replica.role) for replica in self.binding.replicas() if replica.spent),
            commit=self.progress.vector,
            received=self.supply.batches.received,
            repeatable=self.operation is None or self.operation.repeatable(),
            stale=any(runtime.stale for runtime in self.binding.runtimes.values()),
            replicas=self.copies.replicas(),
            place=self.copies.snapshots.place,
            joining=self.joining.active,
            history=len(self.history),
            steps=self.progress.steps,
            ahead=self.epoch.channel.ahead,
            consumed=self.progress.consumed,
            seed=self.progress.seed,
            nonce=self.saves.nonce,
            checksums=self.progress.checksums,
            script=ScriptReport(**self.collectives.record()),
            exact=self.checks.left,
        )

    # -- roles --------------------------------------------------------------------------------------------

    def take_over_roles(self, plan: Plan) -> None:
        """Make the runtimes those that ``plan`` gives to this member, from what it holds already.

        Replicas whose owner was lost become owners; owners become replicas where the plan says so (what both hold
        is equal between iterations, and sums that are in progress are the owner's alone); what the plan does not
        mention is dropped.

        Raises:
            FatalLoss: this member has no valid state for a role that the plan gives to it.
        """
        member, runtimes = self.epoch.member, self.binding.runtimes
        owned, followed = plan.owned_by(member), {*plan.shadowed_by(member), *plan.learned_by(member)}
        for role in owned:
            runtime = runtimes.get(role)
            if runtime is None or not (runtime.owned or runtime.valid):
                runtime = self._clone(role, plan)
            if not runtime.owned:
                logger.warning("taking over role %s with %d forwards done", role, runtime.part.forwards)
                runtime.owned, runtime.helps = True, False
                self.progress.taken_over.add(role)
            elif runtime.divided and runtime.begun and plan.lending(role) is None:
                logger.warning("taking over a part of role %s, which its shadow has computed", role)
                self.progress.taken_over.add(role)
        for role in [r for r in runtimes if r not in owned]:
            if role in followed and (runtimes[role].owned or runtimes[role].valid):
                runtimes[role].helps |= runtimes[role].owned and runtimes[role].divided
                runtimes[role].owned = False
            else:
                self.binding.drop(role)

    def _clone(self, role: Role, plan: Plan) -> StageRuntime:
        """A runtime for ``role`` from the same stage of another pipeline, which this member holds.

        Parameters and optimizer state of the two are equal; what their layers keep besides them (running statistics)
        is not, and the lost one's cannot be had any more.
        """
        alike = [] if self.epoch.layout.sharded else [each for each in self.epoch.layout.siblings(role) if each != role]
        held = (runtime for runtime in self.binding.runtimes.values() if runtime.role in alike)
        source = next((runtime for runtime in held if runtime.owned or runtime.valid), None)
        lost, checkpoint = [(role.pipeline, role.stage)], self.epoch.job.newest_checkpoint(plan)
        if source is None:
            raise FatalLoss(lost, plan.lost, checkpoint)
        kept = source.layers.kept()
        if kept:
            what = f"what layers keep besides parameters ({', '.join(kept[:_NAMED])})"
            if self.checks.stops:
                cure = '"bamboo.redundancy.on_mismatch": "warn" goes on with those'
                logger.error(
                    "role %s: pipeline %d may have other values of %s; %s", role, source.role.pipeline, what, cure
                )
                raise FatalLoss(lost, plan.lost, checkpoint, part=f"{what} of ")
            logger.warning("role %s goes on with %s in pipeline %d", role, what, source.role.pipeline)
        return self.builder.clone(source, role)

    # -- progress -----------------------------------------------------------------------------------------

    def _drop_reductions(self, progress: Mapping[Role, RoleProgress]) -> None:
        """The iteration is resumed from ``progress``: reductions that it does not know of are done again."""
        self.progress.entered = False
        for role, runtime in self.binding.runtimes.items():
            # A replica's are still what the owner has: they protect the role while the iteration is finished.
            if not progress[role].reduced:
                runtime.tied.clear()
                runtime.reduced = runtime.measured = runtime.reduced_loss = runtime.received_layers = None
        self.copies.drop_incoming()

    def begin_again(self, progress: Mapping[Role, RoleProgress]) -> None:
        """Forget the passes of this member's roles that ``progress`` does not know of: their slices do them again."""
        self.binding.refresh()
        for runtime in self.binding.owned():
            known = progress[runtime.role]
            same = all(part.progress() in known.parts for part in runtime.parts if part.begun)
            if not (known.reduced or (same and not runtime.partial_pass)):
                logger.info("role %s begins the iteration again with its other slices", runtime.role)
                runtime.begin_again()
        self.binding.reload()

    def _redone(self, plan: Plan, decision: Decision) -> tuple[int, int]:
        """Passes of roles taken over that their lost owners may have done already and that are done again here."""
        forwards = backwards = 0
        self.progress.redone.clear()
        if decision.mode == "commit":
            return 0, 0
        for role in plan.owned_by(self.epoch.member):
            own = decision.progress[role]
            if own.reduced or role not in self.progress.taken_over:
                continue
            for index, part in enumerate(own.parts):
                seen = self._seen(decision.progress, role, index, +1), self._seen(decision.progress, role, index, -1)
                forwards += max(0, seen[0] - part.forwards)
                backwards += max(0, seen[1] - part.backwards)
                self.progress.redone[role, part.begin] = seen
        return forwards, backwards

    def _seen(self, progress: Mapping[Role, RoleProgress], role: Role, index: int, step: int) -> int:
        """Of how many passes of a part the next part or stage (``step`` 1), or the one before, has used the results."""
        parts = progress[role].parts
        if 0 <= index + step < len(parts):
            beside = parts[index + step]
        elif not 0 <= role.stage + step < self.epoch.layout.stages:
            return 0
        else:
            layout = self.epoch.layout
            other = progress[layout.successor(role) if step > 0 else layout.predecessor(role)]
            if other.reduced:
                return self.ds.micro_batches
            beside = other.parts[0 if step > 0 else -1]
        return beside.forwards if step > 0 else beside.backwards


def _told(runtime: StageRuntime) -> tuple[PartReport, ...]:
    """The parts of a stage that are computed here."""
    return tuple(
        PartReport(begin=part.begin, end=part.end, forwards=part.forwards, backwards=part.backwards)
        for part in runtime.parts
    )
