"""Operations that survive a loss: attempt, recover, attempt again, commit.

An *operation* is what all members do together: an iteration, an evaluation, saving a checkpoint, the end of the
script. It ends with one all-reduce over all members, its commit. A loss before the commit interrupts it on all
survivors; they agree on a plan, exchange what each of them has, and finish the operation from there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ..comm.transport import Lane, Transport
from ..errors import EpochChanged, Evicted, FatalLoss
from ..schedule import Decision, MemberRecord, RoleProgress, decide
from ..topology import Plan, Role
from .lanes import Stream, batch_holders, lanes
from .passes import PassExecutor
from .runtime import StageRuntime

logger = logging.getLogger("bamboo_ds")


class Operation(Protocol):
    """One operation."""

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        """Do it, from ``progress`` if it was interrupted, up to and including the commit."""

    def commit(self) -> None:
        """Only the commit: all members had entered it."""

    def repeatable(self) -> bool:
        """Whether this member, which has entered the commit, could enter it again under the current plan."""

    def finish(self, behind: bool) -> None:
        """After the commit; no communication that a peer has to take part in at once.

        Args:
            behind: the others have committed already and are in the next operation.
        """


@dataclass
class Recovery:
    """Times of one recovery, in seconds on this member's clock.

    Attributes:
        noticed: when the loss was noticed (a plan arrived or an operation failed).
        planned: until the plan was there.
        rebuilt: from the plan until everybody had agreed what to do.
    """

    noticed: float
    planned: float
    rebuilt: float
    mode: str
    forwards_redone: int
    backwards_redone: int


class RecoveringExecutor(PassExecutor):
    """Runs operations until they commit."""

    _recovery: Recovery | None = None
    _operation: Operation

    def _protected(self, operation: Operation) -> None:
        """Run ``operation`` until it commits.

        Raises:
            FatalLoss: a stage has no holder left.
            Evicted: this member was taken for lost.
        """
        session = self._job.session
        self._operation = operation
        interrupted = session.aborted is not None
        behind = False
        while True:
            try:
                if interrupted:
                    self._pending = self._recover()
                    if session.member in self._pending.behind:
                        self._vector = self._pending.commit_vector
                        behind = True
                        break
                decision = self._pending
                self._interrupted = decision is not None
                if decision is None:
                    operation.run(None)
                elif decision.mode == "commit":
                    operation.commit()
                else:
                    operation.run(decision.progress)
                break
            except EpochChanged as error:
                logger.info("operation %d interrupted: %s", self._sequence, error)
                interrupted = True
        if not behind:
            self._pending = None
        operation.finish(behind)
        self._entered = False
        self._sequence += 1
        if behind and self._pending is not None:
            self._pending = replace(self._pending, behind=())
        self._binding.use(self._home)
        if self._recovery is not None and not behind:
            self._report_recovery(self._recovery)
            self._recovery = None

    # -- one recovery -------------------------------------------------------------------------------------

    def _recover(self) -> Decision:
        """Enter the newest epoch and agree with the other survivors on how to go on."""
        session, begin = self._job.session, time.monotonic()
        session.abort("recovery")
        noticed = min(self._job.lost_at or begin, begin)
        if self._recovery is not None:
            noticed = min(noticed, self._recovery.noticed)
        plan = self._job.next_plan(session.epoch)
        planned = time.monotonic()
        logger.info("recovering to epoch %d: lost %s", plan.epoch, ", ".join(plan.lost))
        self._bubble_begin.clear()
        self._idle.forget()
        self._enter(plan)
        logger.info("entered epoch %d", plan.epoch)
        promoted = self._adopt_roles(plan)
        mine = self._record()
        others = self._transport.exchange(json.dumps(mine))
        records = {member: json.loads(text) for member, text in others.items()}
        decision = self._decide(plan, records)
        logger.info("agreed to %s operation %d", decision.mode, decision.step)
        behind = session.member in decision.behind
        if behind:
            self._batches.drop()
        if decision.mode == "resume" and not behind:
            self._drop_reductions(promoted)
        self._connect_batches({m: 0 if m in decision.behind else r["labels"] for m, r in records.items()})
        self._job.lost_at = None
        self._recovery = Recovery(
            noticed,
            planned - noticed,
            time.monotonic() - planned,
            decision.mode,
            *self._redone(plan, decision, promoted),
        )
        return decision

    def _enter(self, plan: Plan) -> None:
        """Attach to ``plan``'s epoch and open its lanes."""
        if self._transport is not None:
            self._transport.close()
        self._job.enter(plan)
        self._plan = plan
        self._lanes = lanes(plan, self._job.homes, self._mode.eager_backward)
        self._transport = Transport.open(self._job.session, list(self._lanes.values()))

    def _adopt_roles(self, plan: Plan) -> list[StageRuntime]:
        """Become the owner of replicas whose owner was lost; drop replicas that the plan does not know.

        Returns:
            The runtimes that became owners now or in an attempt at this recovery that was interrupted.
        """
        member, runtimes = self._job.session.member, self._binding.runtimes
        owned, shadowed = plan.owned_by(member), plan.shadowed_by(member)
        for role in owned:
            runtime = runtimes.get(role)
            if runtime is None or not (runtime.owned or runtime.valid):
                raise FatalLoss([(role.pipeline, role.stage)], plan.lost, self._job.newest_checkpoint)
            if not runtime.owned:
                logger.warning("taking over role %s with %d forwards done", role, runtime.forwards)
                runtime.owned = True
                runtime.adopted = True
        for role in [r for r in runtimes if r not in owned and r not in shadowed]:
            if runtimes[role] is self._home:
                raise Evicted(f"the plan of epoch {plan.epoch} gives role {role} of this living member to another")
            del runtimes[role]
        return [runtimes[role] for role in owned if runtimes[role].adopted]

    def _record(self) -> dict[str, Any]:
        """What this member tells the others (JSON)."""
        roles = []
        for runtime in self._binding.owned():
            reduced = runtime.reduced is not None and (self._entered or not self.is_data_parallel)
            roles.append(
                {
                    "role": [runtime.role.pipeline, runtime.role.stage],
                    "forwards": runtime.forwards,
                    "backwards": runtime.backwards,
                    "reduced": reduced,
                    # Its sums died with the owner: good for a commit, not for another reduction.
                    "sums": not runtime.adopted or runtime.backwards == self.micro_batches,
                }
            )
        return {
            "step": self._sequence,
            "entered": self._entered,
            "roles": roles,
            "commit": list(self._vector) if self._vector is not None else None,
            "labels": self._batches.received,
            "repeatable": self._operation.repeatable(),
        }

    def _decide(self, plan: Plan, records: Mapping[str, Mapping[str, Any]]) -> Decision:
        """The same decision on all survivors."""
        parsed = {
            member: MemberRecord(
                step=record["step"],
                entered=record["entered"],
                roles={
                    Role(*r["role"]): RoleProgress(r["forwards"], r["backwards"], r["reduced"]) for r in record["roles"]
                },
                commit=tuple(record["commit"]) if record["commit"] is not None else None,
            )
            for member, record in records.items()
        }
        decision = decide(parsed, plan.world)
        if decision.mode == "commit" and not all(record["repeatable"] for record in records.values()):
            decision = replace(decision, mode="resume")
        if decision.mode == "commit" or not self.is_data_parallel:
            return decision
        # Another pipeline may have to repeat the reduction, for which a replica's reduced gradients do not serve.
        progress = dict(decision.progress)
        for record in records.values():
            for r in record["roles"]:
                role = Role(*r["role"])
                if progress[role].reduced and not r["sums"]:
                    progress[role] = RoleProgress(r["forwards"], r["backwards"], False)
        return replace(decision, progress=progress)

    def _drop_reductions(self, promoted: list[StageRuntime]) -> None:
        """Reductions are done again, except where an adopted role has nothing but its reduced gradients."""
        self._entered = False
        for runtime in self._binding.runtimes.values():
            if runtime in promoted and not self.is_data_parallel:
                continue
            if not runtime.owned and not self.is_data_parallel:
                # Still what the owner has: it protects the role while the iteration is finished.
                continue
            runtime.reduced = runtime.reduced_loss = runtime.received_buffers = None

    def _redone(self, plan: Plan, decision: Decision, promoted: list[StageRuntime]) -> tuple[int, int]:
        """Passes of adopted roles that their lost owners may have done already and that are done again here."""
        forwards = backwards = 0
        if decision.mode == "commit":
            return 0, 0
        for runtime in promoted:
            own = decision.progress[runtime.role]
            if own.reduced:
                continue
            layout, role = plan.world, runtime.role
            if role.stage < layout.stages - 1:
                seen = decision.progress[layout.successor(role)]
                forwards += max(0, (self.micro_batches if seen.reduced else seen.forwards) - own.forwards)
            if role.stage > 0:
                seen = decision.progress[layout.predecessor(role)]
                backwards += max(0, (self.micro_batches if seen.reduced else seen.backwards) - own.backwards)
        return forwards, backwards

    # -- data ---------------------------------------------------------------------------------------------

    def _connect_batches(self, received: Mapping[str, int]) -> None:
        """Tell the batches which lanes they serve, given how many labels each member has."""
        member = self._job.session.member
        serving: dict[Lane, int] = {}
        source = None
        for (stream, _), lane in self._lanes.items():
            if stream in (Stream.LABELS, Stream.SHADOW_LABELS):
                if lane.source == member:
                    serving[lane] = received.get(lane.destination, 0)
                if lane.destination == member:
                    source = lane
        self._batches.connect(self._transport, serving, source)

    def _is_holder(self) -> bool:
        """Whether this member draws batches for its pipeline."""
        return self._job.session.member in batch_holders(self._plan, self._job.homes, self._home.role.pipeline)

    # -- events -------------------------------------------------------------------------------------------

    def _report_recovery(self, recovery: Recovery) -> None:
        now = time.monotonic()
        pause = recovery.planned + recovery.rebuilt
        self._job.channel.event(
            "recovered",
            step=self._committed_steps,
            pause_seconds=pause,
            detection_seconds=None,
            plan_seconds=recovery.planned,
            rebuild_seconds=recovery.rebuilt,
            redo_seconds=max(0.0, now - recovery.noticed - pause),
            forwards_redone=recovery.forwards_redone,
            backwards_redone=recovery.backwards_redone,
            mode=recovery.mode,
        )
