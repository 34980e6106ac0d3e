"""One recovery: enter the newest epoch, take over what it gives to this member, and agree on how to go on."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

from ...comm.attachment import LISTENER
from ...comm.calls.script import ScriptCollectives
from ...errors import FatalLoss
from ...observe.spans import Kind
from ...schedule import Decision, PartProgress
from ...topology import Plan
from ...worker import plan_changes as plan_change
from ..checkpoints.saving import Saves
from ..context.operation import Operation
from ..context.records import Recovery, ScriptPhase
from ..context.shared import InContext
from ..data.supply import BatchSupply
from ..iteration.parts import IterationParts
from ..script.changes import count_of, unchanged, without_process
from ..stage.runtime import StageRuntime
from .announcements import Announcements
from .copies import Copies
from .reports import (
    JobFacts,
    MemberReport,
    Reports,
    RoleReport,
    ScriptReport,
    decision_of,
    newest_of,
)
from .roles import RoleTransfer

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class RecoveryProtocol(InContext):
    """This member's part of recoveries.

    Attributes:
        operation: the one that is under way, or was the last one.
        agreed: members of the plan by which all have agreed last on how to go on.
    """

    iteration: IterationParts
    roles: RoleTransfer
    copies: Copies
    supply: BatchSupply
    saves: Saves
    collectives: ScriptCollectives
    announcements: Announcements
    operation: Operation | None = field(default=None, init=False)
    agreed: tuple[str, ...] = field(default=(), init=False)
    _told_away: bool = field(default=False, init=False)

    def run(self) -> Decision:
        """Enters the newest epoch and agrees with its other members on how to go on::

            loss noticed --> plan --> channels --> roles --> reports <--> those of all members
                                                             |
              ready <-- batches, shards <-- progress <-- decision

        Raises:
            EpochChanged: another loss has interrupted it.
            FatalLoss: a stage has no holder left; what the scripts had just set up or changed is lost; or a lost
                script would go on to change its stage.
            Evicted: this member was taken for lost.
        """
        begin = time.monotonic()
        self.epoch.session.abort("recovery", orderly=True)  # else it has been aborted
        noticed = min(self.epoch.job.lost_at or begin, begin)
        with self.recording.span(Kind.AWAIT_PLAN):
            plan = self.epoch.job.next_plan(self.epoch.session.epoch)
        planned = time.monotonic()
        logger.info("recovering to epoch %d: lost %s", plan.epoch, ", ".join(plan.lost))
        with self.recording.span(Kind.REBUILD):
            self.iteration.boundaries.forget()
            self.roles.doubt_passes()
            self.announcements.listen()
            if self.epoch.begun:
                self.iteration.boundaries.keep_given()
                self.iteration.sums.collect()
            self.enter(plan)
            logger.info("entered epoch %d", plan.epoch)
            self.roles.follow(plan)
            self.saves.follow(plan)
        with self.recording.span(Kind.AGREE):
            texts = self.epoch.agreement.exchange(self.report().model_dump_json())
            reports = {member: MemberReport.model_validate_json(text) for member, text in texts.items()}
            plan = self.epoch.plan = self.copies.planned(plan, reports)
            decision = self._decide(plan, reports)
            logger.info("agreed to %s operation %d", decision.mode, decision.step)
            self._prepare(plan, reports, decision)
        self.epoch.job.lost_at = None
        redone = self.roles.redone(plan, decision)
        seconds = planned - noticed, time.monotonic() - planned
        recovery = Recovery(decision, noticed, *seconds, *redone, self.progress.newest)
        self.progress.operation.recovery = recovery.after(self.progress.operation.recovery)
        self.announcements.tell_again()
        listener = unchanged("a listener of bamboo_ds.on_plan_change", self.binding.local.layers, count_of)
        with self.binding.for_script(), self.groups.alone(LISTENER), listener:
            plan_change.tell(plan, self.epoch.member)
        return decision

    def enter(self, plan: Plan) -> None:
        """Attaches to ``plan``'s epoch."""
        self.epoch.enter(plan)
        self.iteration.replication.mismatches.begin()

    def _decide(self, plan: Plan, reports: Reports) -> Decision:
        """Makes the decision, the same on all members, and does what follows from it besides the operation."""
        self._check_setup(plan, reports)
        self.epoch.note_devices(report.device for report in reports.values())
        self._tell_away(plan)
        decision = decision_of(reports, plan, self.ds.micro_batches, self.iteration.reduction.tied_stages)
        self.announcements.check(plan, reports, decision)
        self.collectives.agree({m: report.script_facts() for m, report in reports.items()}, decision.step)
        self.copies.begin(plan, reports, decision)
        if self.progress.script.joining:
            self._join(decision, reports)
        exact = max(report.exact for report in reports.values())
        self.iteration.checks.begin_again(exact, newest_of(reports)[0].steps + 1)
        self.copies.tell_replicas()
        return decision

    def _tell_away(self, plan: Plan) -> None:
        """Tells once that no member does with a stage what only its own lost script would do."""
        away = without_process(plan)
        if away and self.epoch.leads and not self._told_away:
            self._told_away = True
            logger.warning(
                "no process runs as rank %s now. What its script would do to its own stage between two calls, such as "
                "freezing parameters or changing weights, is not done any more: do it for all stages, in "
                "bamboo_ds.for_each_stage or in the optimizer's step. This is said once",
                " or ".join(str(plan.world.rank(role)) for role in away),
            )

    def _join(self, decision: Decision, reports: Reports) -> None:
        """Takes over, as this member is admitted, from the others' ``reports`` where the job stands."""
        newest, informed = newest_of(reports)
        sources = [(member, self.epoch.plan.place(member)) for member in informed]
        progress = self.progress
        progress.script.phase, progress.script.target, progress.script.sources = (
            ScriptPhase.CATCHING_UP,
            newest.history,
            sources,
        )
        progress.sequence = decision.step
        progress.steps, progress.consumed = newest.steps, newest.consumed
        self.job.channel.ahead = newest.ahead
        self.adopt(newest)

    def adopt(self, facts: JobFacts) -> None:
        """Takes over the facts that the members of the job go by."""
        self.progress.seed, self.progress.checksums, self.saves.nonce = facts.seed, facts.checksums, facts.nonce
        self.iteration.checks.begin(facts.exact)

    def _check_setup(self, plan: Plan, reports: Reports) -> None:
        """Raises ``FatalLoss``, on all members alike, where a loss hits what scripts set up before they train."""
        begun = max(report.step for report in reports.values())
        lost = [member for member in self.agreed if member not in plan.members]
        if lost and not begun and any(report.script.open for report in reports.values()):
            raise FatalLoss([], lost, self.epoch.job.newest_checkpoint(plan))
        self.agreed = plan.members

    def _prepare(self, plan: Plan, reports: Reports, decision: Decision) -> None:
        """Brings what this member holds of the interrupted operation to where it goes on."""
        behind = self.epoch.member in decision.behind
        if behind:
            self.supply.drop()
        elif decision.mode == "resume":
            self.roles.drop_reductions(decision.progress)
            self.copies.drop_incoming()
        self.supply.connect({m: {} if m in decision.behind else report.received for m, report in reports.items()})
        # A member that is behind in an iteration steps first and takes part then.
        steps = max(report.steps for report in reports.values())
        lacking = any(reports[m].steps < steps for m in decision.behind) or any(r.stale for r in reports.values())
        if self.epoch.layout.sharded and lacking and not behind:
            self.iteration.replication.exchange_shards()

    def report(self) -> MemberReport:
        """This member's report to the others."""
        layout = self.epoch.layout
        roles = [
            RoleReport(
                role=(runtime.role.pipeline, runtime.role.stage),
                parts=_told(runtime) if runtime.share.begun or runtime.share.partial_pass else (),
                reduced=self.iteration.commits.is_complete(runtime),
                state_only=runtime.role in self.progress.operation.taken_over,
                changes=replace(runtime.layers.changes),
            )
            for runtime in self.binding.owned()
        ]
        return MemberReport(
            step=self.progress.sequence,
            entered=self.progress.operation.entered,
            at_boundary=self.progress.script.at_boundary,
            training=self.progress.training,
            roles=tuple(roles),
            helped=tuple((layout.rank(each.role), part) for each in self.binding.helped() for part in _told(each)),
            spent=tuple(layout.rank(replica.role) for replica in self.binding.replicas() if replica.share.spent),
            commit=self.progress.vector,
            received=self.supply.received,
            repeatable=self.operation is None or self.operation.repeatable(),
            stale=any(runtime.stale for runtime in self.binding.runtimes.values()),
            replicas=self.copies.replicas(),
            copying={layout.rank(role): each.source for role, each in self.copies.constructions.items()},
            sums=tuple(
                (layout.rank(role), PartProgress(begin, end, sums=counts))
                for role, begin, end, counts in self.iteration.sums.held()
            ),
            joining=self.progress.script.joining,
            history=len(self.history),
            steps=self.progress.steps,
            iteration_s=self.iteration.measures.times.iteration_s,
            ahead=self.job.channel.ahead,
            consumed=self.progress.consumed,
            seed=self.progress.seed,
            nonce=self.saves.nonce,
            checksums=self.progress.checksums,
            script=ScriptReport(**self.collectives.record()),
            exact=self.iteration.checks.left,
            device=self.epoch.device_name,
        )


def _told(runtime: StageRuntime) -> tuple[PartProgress, ...]:
    """The parts of a stage that are computed here."""
    broken = runtime.share.partial_pass
    return tuple(replace(part.progress(), given=part.gradients_held, broken=broken) for part in runtime.share.parts)
