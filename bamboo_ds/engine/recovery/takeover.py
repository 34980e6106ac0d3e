"""Operations that survive losses: attempt, recover, attempt again, commit, finish.

A loss before the commit interrupts an operation on all survivors; they agree on a plan, exchange what each of them has
(:mod:`.protocol`), and finish the operation from there.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from ...comm.calls.script import ScriptCollectives
from ...errors import EpochChanged, FatalLoss
from ...topology import end_sources, source_ends
from ..context.operation import Operation, Outcome
from ..context.shared import InContext
from ..iteration.parts import IterationParts
from .announcements import Announcements
from .protocol import RecoveryProtocol

logger = logging.getLogger("bamboo_ds")

#: Members wait for the plan that copies were made for, as long as this part of the time that the operation took, and at
#: most so many seconds. The leader writes it in milliseconds; without it the next operation takes as long again.
_PATIENCE, _PATIENCE_S = 0.2, 1.0


@dataclass(eq=False)
class Takeover(InContext):
    """Runs operations until they commit, and changes the plan between them."""

    iteration: IterationParts
    recovery: RecoveryProtocol
    collectives: ScriptCollectives
    announcements: Announcements

    def run(self, operation: Operation) -> None:
        """Runs ``operation`` until it commits::

            attempt ---committed--------------------> finish --> boundary
             |   ^                                      ^
             |   | the decision is about this one       |
             |   +--------------------+                 |
             v                        |                 |
            interrupted --> recover --+---behind--------+
                             ^    |  the others have committed it
                             +----+
                          another loss

        Raises:
            FatalLoss: a stage has no holder left.
            Evicted: this member was taken for lost.
            CallsDiffer: the scripts of other members have called something else.
        """
        self.recovery.operation, begin = operation, time.monotonic()
        with self.job.channel.activity.at_work(), self.progress.calling(operation.call):
            self.announcements.begin_operation()
            outcome = self._attempt(operation) if self.epoch.session.aborted is None else Outcome.INTERRUPTED
            while outcome is Outcome.INTERRUPTED:
                outcome = self._recover_and_attempt(operation)
            operation.finish(outcome)
            self._cross_boundary(operation, outcome, time.monotonic() - begin)

    def _attempt(self, operation: Operation) -> Outcome:
        """Does what the last recovery has decided on, or all of ``operation``."""
        decision = self.progress.operation.pending
        try:
            if operation.draws:
                self._check_messages()
                if self.recovery.supply.hungry():
                    self._await_source()
            self.progress.operation.resumed = decision is not None
            with self.beats.busy(operation.watched):
                if decision is not None and decision.mode == "commit":
                    operation.commit()
                else:
                    operation.run(decision.progress if decision is not None else None)
        except EpochChanged as error:
            return self._interrupted(error)
        self.progress.operation.pending = None
        return Outcome.COMMITTED

    def _recover_and_attempt(self, operation: Operation) -> Outcome:
        try:
            decision = self.recovery.run()
            behind = self.epoch.member in decision.behind
            if behind and operation.goes_on:  # as before any other commit that something follows from
                self.epoch.job.await_fence()
        except EpochChanged as error:
            return self._interrupted(error)
        if not behind:
            self.progress.operation.pending = decision
            return self._attempt(operation)
        # What is decided on is the next operation, for which no member is behind any more.
        self.progress.vector, self.progress.operation.pending = decision.commit_vector, replace(decision, behind=())
        return Outcome.BEHIND

    def _interrupted(self, error: EpochChanged) -> Outcome:
        logger.info("operation %d interrupted: %s", self.progress.sequence, error)
        return Outcome.INTERRUPTED

    def _cross_boundary(self, operation: Operation, outcome: Outcome, seconds: float) -> None:
        """Does what members do before the script goes on: the operation is finished, after ``seconds``."""
        self.progress.end_operation()
        self.progress.script.at_boundary = True
        self.collectives.begin_gap(self.progress.sequence)
        if operation.takes_steps:
            try:
                if self.epoch.layout.sharded:
                    self.iteration.replication.exchange_shards()
                checks = self.iteration.checks
                checking = checks.on
                if checks.end_iteration():
                    with checks.timed():
                        self.recovery.copies.renew()
                if checking and not checks.on:
                    self.recovery.copies.tell_replicas()
            except EpochChanged as error:
                logger.info("interrupted after operation %d: %s", self.progress.sequence - 1, error)
                self.recover_between("at a boundary")
            self.iteration.own.take()
        self.binding.use(self.binding.local)
        if self.progress.operation.recovery is not None and outcome is Outcome.COMMITTED:
            self._report_recovery()
        begin = time.monotonic()
        if self.epoch.copied and operation.takes_steps and not self.epoch.switch_due:
            self._await_plan(min(_PATIENCE_S, _PATIENCE * seconds))
        if self.epoch.switch_due and operation.goes_on:
            self._switch(begin)
        self.progress.script.at_boundary = False

    def _check_messages(self) -> None:
        """Batches that may lack what a lost rank would have sent are lost, if no other end has the same.

        Raises:
            FatalLoss: they are used.
        """
        plan, messages = self.epoch.plan, self.collectives.messages
        ends = source_ends(plan, apart=True) if self.recovery.supply.apart else ()
        for (rank,) in ends:
            for place in filter(None, map(messages.missed_by, end_sources(plan, rank)[:1])):
                logger.error(
                    "the script of rank %d receives at %s from a rank that is lost, or did so before its worker had "
                    "joined, and nothing came. Its batches may lack that, and it is not known that the iterators of "
                    "the first and of the last stage give the same ones. Let both draw the same, what is random from a "
                    "generator that is seeded with the pipeline and not with the rank: then either serves for the "
                    "other after a loss",
                    rank,
                    place,
                )
                role, part = plan.world.role(rank), f"what the script receives at {place} for batches of "
                checkpoint = self.epoch.job.newest_checkpoint(plan)
                raise FatalLoss([(role.pipeline, role.stage)], plan.lost, checkpoint, part)

    def _await_source(self) -> None:
        """Waits for members that can draw the batches of all pipelines; the leader has them started.

        Raises:
            EpochChanged: there is a new plan.
            TimeoutError: there is none within the timeout of the process groups.
        """
        plan, supply = self.epoch.plan, self.recovery.supply
        ranks = ", ".join(map(str, supply.hungry()))
        alike = "" if supply.apart else ", nor of one that draws the same"
        logger.warning(
            "no member left has the iterator of rank %s%s: waiting for a worker that draws its batches", ranks, alike
        )
        supply.needs.tell(apart=supply.apart or supply.needs.apart)
        begin, operation = time.monotonic(), self.progress.operation
        plan = self.job.channel.wait_plan(plan.epoch, self.epoch.session.timeout.total_seconds())
        # Training has paused for that worker as for any other plan; another loss meanwhile is in it.
        if operation.recovery is None:
            self.job.lost_at = begin
        else:
            waited, self.job.lost_at = time.monotonic() - begin, None
            operation.recovery = replace(operation.recovery, planned=operation.recovery.planned + waited)
        raise EpochChanged(f"epoch {plan.epoch} follows")

    # -- between operations -------------------------------------------------------------------------------

    def recover_between(self, where: str) -> bool:
        """Enters the newest epoch between two operations; returns whether that took one attempt."""
        attempts = 0
        while True:
            attempts += 1
            try:
                self.progress.operation.go_on_from(self.recovery.run())
                return attempts == 1
            except EpochChanged as error:
                logger.info("interrupted %s: %s", where, error)

    def _await_plan(self, patience_s: float) -> None:
        """Waits for the plan that the copies, now complete, were made for: the leader writes it."""
        self.job.channel.await_boundary(self.epoch.plan.epoch, patience_s)
        try:
            self.epoch.switch_due = self.iteration.commits.all_know_more()
        except EpochChanged as error:
            logger.info("interrupted at a boundary: %s", error)
            self.recover_between("at a boundary")

    def _switch(self, begin: float) -> None:
        """Enters the plan that all members know of, at the boundary where all of them are since ``begin``."""
        before = self.epoch.plan
        self.epoch.switch_due = False
        undisturbed = True
        self.announcements.listen()  # channels that are concluded tell nothing any more
        try:
            self.epoch.session.confirm("changing the plan")  # which cuts off what devices are busy with
            self.epoch.session.conclude()
        except EpochChanged as error:
            logger.info("interrupted at a boundary: %s", error)
            undisturbed = False
        if not (self.recover_between("at a boundary") and undisturbed):
            return
        self.progress.operation.recovery = None
        pause = time.monotonic() - begin
        self.progress.operation.paused += pause
        self.job.channel.event(
            "reconfigured",
            epoch=self.epoch.plan.epoch,
            step=self.progress.steps,
            pause_seconds=pause,
            previous=before.epoch,
        )

    def _report_recovery(self) -> None:
        recovery, now = self.progress.operation.recovery, time.monotonic()
        assert recovery is not None
        self.progress.operation.recovery = None
        pause = recovery.planned + recovery.rebuilt
        self.progress.operation.paused += pause
        self.job.channel.event(
            "recovered",
            epoch=self.epoch.plan.epoch,
            step=self.progress.steps,
            pause_seconds=pause,
            detection_seconds=None,
            plan_seconds=recovery.planned,
            rebuild_seconds=recovery.rebuilt,
            redo_seconds=max(0.0, now - recovery.noticed - pause),
            forwards_redone=recovery.forwards_redone,
            backwards_redone=recovery.backwards_redone,
            backwards_kept=recovery.backwards_kept,
            mode=recovery.decision.mode,
            consumed=recovery.consumed.model_dump() if recovery.consumed is not None else None,
        )
