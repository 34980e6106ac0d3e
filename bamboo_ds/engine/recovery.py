"""Operations that survive a loss: attempt, recover, attempt again, commit.

An *operation* is what all members do together: an iteration, an evaluation, saving a checkpoint, the end of the
script. It ends with one all-reduce over all members, its commit. A loss before the commit interrupts it on all
survivors; they agree on a plan, exchange what each of them has, and finish the operation from there.
"""

from __future__ import annotations

import json
import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .. import plan_change
from ..comm.script import ScriptCollectives
from ..comm.transport import Transport
from ..errors import EpochChanged, FatalLoss
from ..schedule import Decision, MemberRecord, RoleProgress, decide, settle
from ..topology import Plan, Role, hungry
from .changes import abandoned, lacking, role_changes
from .copies import CopyingExecutor
from .exactness import ExactCheck
from .lanes import BATCH_PARTS, Lanes
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

    @property
    def watched(self) -> bool:
        """Whether it consists of many short instructions, so that one that does not end is a hang."""

    @property
    def draws(self) -> bool:
        """Whether it needs batches from the scripts' iterators."""

    @property
    def steps(self) -> bool:
        """Whether optimizers step in it."""

    @property
    def goes_on(self) -> bool:
        """Whether members may change their plan after it."""

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


class RecoveringExecutor(CopyingExecutor):
    """Runs operations until they commit, and changes the plan between them."""

    _recovery: Recovery | None = None
    _operation: Operation
    _script: ScriptCollectives

    def _protected(self, operation: Operation) -> None:
        """Run ``operation`` until it commits.

        Raises:
            FatalLoss: a stage has no holder left.
            Evicted: this member was taken for lost.
        """
        with self._job.channel.activity.at_work():
            self._run_protected(operation)

    def _run_protected(self, operation: Operation) -> None:
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
                if operation.draws and hungry(self._plan):
                    self._await_source()
                decision = self._pending
                self._interrupted = decision is not None
                with self._busy(operation):
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
        self._script.begin_gap(self._sequence)
        if behind and self._pending is not None:
            self._pending = replace(self._pending, behind=())
        if operation.steps:
            try:
                if self._plan.world.sharded:
                    self._exchange_shards()
                self._check_exactly(behind)
            except EpochChanged as error:
                logger.info("interrupted after operation %d: %s", self._sequence - 1, error)
                self._recover_at_boundary()
        self._binding.use(self._home)
        if self._recovery is not None and not behind:
            self._report_recovery(self._recovery)
            self._recovery = None
        if self._switch_due and operation.goes_on:
            self._switch()

    def _check_of(self, steps: int) -> ExactCheck | None:
        """The check of so many steps, as the members have agreed."""
        return ExactCheck(self, steps) if steps else None

    def _rehearses(self) -> bool:
        """Whether the iteration that runs is rehearsed, on all members alike: one that a loss has hit is not."""
        return self._exact is not None and not self._interrupted and self._exact.rehearses(self._committed_steps)

    def _check_exactly(self, behind: bool) -> None:
        """An iteration is over; ``behind``: the others have been in the next one before."""
        exact = self._exact
        if exact is None:
            return
        last = self._committed_steps == exact.steps
        if self._committed_steps >= exact.steps:
            self._exact = None
        if behind or self._interrupted:
            self._tell_unchecked(last)
        elif self._committed_steps <= exact.steps:
            try:
                exact.compare_replicas()
            except EpochChanged:
                self._tell_unchecked(last)
                raise

    def _tell_unchecked(self, last: bool) -> None:
        """A loss has hit a step that was to be checked, ``last`` of all."""
        if last and self._leads():
            logger.warning("a loss has hit the last step to be checked, so that the check has no result")

    @contextmanager
    def _busy(self, operation: Operation) -> Iterator[None]:
        """The body executes instructions; each is to end within a time that the ones before it suggest."""
        activity = self._job.channel.activity
        self._beat()
        activity.busy = operation.watched
        try:
            yield
        finally:
            activity.busy = False

    def _await_source(self) -> None:
        """Wait for a member that can draw the batches of all pipelines; the leader has one started.

        Raises:
            EpochChanged: there is a new plan.
            TimeoutError: there is none within the timeout of the process groups.
        """
        pipelines = ", ".join(map(str, hungry(self._plan)))
        logger.warning("no member left has an iterator over the batches of pipeline %s: waiting for one", pipelines)
        plan = self._job.channel.wait_plan(self._plan.epoch, self._job.session.timeout.total_seconds())
        raise EpochChanged(f"epoch {plan.epoch} follows")

    def _switch(self) -> None:
        """Enter the plan that all members know of, at the boundary where all of them are."""
        begin, before = time.monotonic(), self._plan
        self._switch_due = False
        undisturbed = True
        self._follow_trained()  # lanes that are closed tell nothing any more
        try:
            self._transport.close()
        except EpochChanged as error:
            logger.info("interrupted at a boundary: %s", error)
            undisturbed = False
        if not (self._recover_at_boundary() and undisturbed):
            return
        self._recovery = None
        self._job.channel.event(
            "reconfigured",
            epoch=self._plan.epoch,
            step=self._committed_steps,
            pause_seconds=time.monotonic() - begin,
            previous=before.epoch,
        )

    def _recover_at_boundary(self) -> bool:
        """Enter the newest epoch between two operations; whether that took one attempt."""
        attempts = 0
        while True:
            attempts += 1
            try:
                decision = self._recover()
                break
            except EpochChanged as error:
                logger.info("interrupted at a boundary: %s", error)
        self._go_on_from(decision)
        return attempts == 1

    def _go_on_from(self, decision: Decision) -> None:
        """The next operation begins as ``decision`` says."""
        done = any(p != RoleProgress() for p in decision.progress.values())
        self._pending = decision if done or decision.behind or decision.mode == "commit" else None

    @abstractmethod
    def _leads(self) -> bool:
        """Whether this member owns the role of rank 0, whose owner speaks for the job."""

    @abstractmethod
    def _tell_again(self) -> None:
        """A plan begins: tell the holders of this member's stage what the script has changed before the operation."""

    @abstractmethod
    def _joined(self, decision: Decision, records: Mapping[str, Mapping[str, Any]]) -> None:
        """This member has just been admitted: take over from the others' ``records`` where the job stands."""

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
        self._follow_trained()
        self._enter(plan)
        logger.info("entered epoch %d", plan.epoch)
        promoted = self._adopt_roles(plan)
        self._saves.follow(plan)
        mine = self._record()
        others = self._transport.exchange(json.dumps(mine))
        records = {member: json.loads(text) for member, text in others.items()}
        self._check_setup(plan, records)
        decision = self._decide(plan, records)
        self._check_changes(plan, records, decision)
        self._script.agree(records, decision.step)
        self._begin_copies(plan, records)
        if self._joining:
            self._joined(decision, records)
        self._report_standing()
        logger.info("agreed to %s operation %d", decision.mode, decision.step)
        behind = session.member in decision.behind
        if behind:
            self._batches.drop()
        if decision.mode == "resume" and not behind:
            self._drop_reductions(decision.progress)
            self._begin_again(decision.progress)
        self._connect_batches({m: {} if m in decision.behind else r["received"] for m, r in records.items()})
        self._accounts.write(plan, self._dataset)
        # Whoever is behind steps first and takes part then.
        if plan.world.sharded and not behind and (decision.behind or any(r["stale"] for r in records.values())):
            self._exchange_shards()
        self._job.lost_at = None
        self._recovery = Recovery(
            noticed,
            planned - noticed,
            time.monotonic() - planned,
            decision.mode,
            *self._redone(plan, decision, promoted),
        )
        self._tell_again()
        plan_change.tell(plan, session.member)
        return decision

    def _follow_trained(self) -> None:
        """Learn what lost owners had changed or frozen when this iteration began, if they could still say so."""
        if self._transport is None:
            return
        self._binding.refresh()
        for replica in self._binding.replicas():
            lane = self._lanes.told.get((replica.role, self._job.session.member))
            for told in self._transport.take(lane) if lane else ():
                assert isinstance(told, torch.Tensor)
                step, changed, *trained = told.tolist()
                if changed:
                    replica.layers.changes.note(step)
                if not trained:
                    continue
                replica.trained = now = [bool(each) for each in trained]
                if step <= self._committed_steps and now != replica.trains():
                    replica.begin_again()  # its passes did not know of it
                    replica.train_only(now)
        self._binding.reload()

    def _check_setup(self, plan: Plan, records: Mapping[str, Mapping[str, Any]]) -> None:
        """A loss that hits what scripts set up together before they train.

        Raises:
            FatalLoss: on all members alike.
        """
        begun = max(record["step"] for record in records.values())
        lost = [member for member in self._agreed if member not in plan.members]
        if lost and not begun and any(record["script"]["open"] for record in records.values()):
            raise FatalLoss([], lost, self._job.newest_checkpoint(plan))
        self._agreed = plan.members

    def _check_changes(self, plan: Plan, records: Mapping[str, Mapping[str, Any]], decision: Decision) -> None:
        """Stages that scripts change between two operations: a member that takes one over does not do so.

        Raises:
            FatalLoss: a change is missing, or would be; on all members alike.
        """
        roles = role_changes(plan, records, decision)
        self._known_changes = {role: each.changes for role, each in roles.items()}
        step = max(record["steps"] for record in records.values())
        for found, what in (
            (lacking(roles, step) if plan.lost else [], "what the script has just changed in "),
            (abandoned(roles, step), "the script that changes "),
        ):
            if found:
                places = [(role.pipeline, role.stage) for role in found]
                raise FatalLoss(places, plan.lost, self._job.newest_checkpoint(plan), what)

    def _enter(self, plan: Plan) -> None:
        """Attach to ``plan``'s epoch and open its lanes."""
        if self._transport is not None:
            self._transport.close()
        self._job.enter(plan)
        self._plan = plan
        self._doubts.begin()
        self._switch_due = False
        lanes = Lanes(plan, self._mode.eager_backward)
        self._transport = Transport.open(self._job.session, lanes.all())
        self._lanes = lanes  # those of the transport, also if it could not be opened

    def _adopt_roles(self, plan: Plan) -> list[StageRuntime]:
        """Make the runtimes those that ``plan`` gives to this member, from what it holds already.

        Replicas whose owner was lost become owners; owners become replicas where the plan says so (what both hold
        is equal between iterations, and sums that are in progress are the owner's alone); what the plan does not
        mention is dropped.

        Returns:
            The runtimes that became owners now or in an attempt at this recovery that was interrupted.

        Raises:
            FatalLoss: this member has no valid state for a role that the plan gives to it.
        """
        member, runtimes = self._job.session.member, self._binding.runtimes
        owned, followed = plan.owned_by(member), {*plan.shadowed_by(member), *plan.learned_by(member)}
        for role in owned:
            runtime = runtimes.get(role)
            if runtime is None or not (runtime.owned or runtime.valid):
                runtime = self._clone_sibling(role, plan)
            if not runtime.owned:
                logger.warning("taking over role %s with %d forwards done", role, runtime.forwards)
                runtime.owned = True
                runtime.adopted = True
        for role in [r for r in runtimes if r not in owned]:
            if role in followed and (runtimes[role].owned or runtimes[role].valid):
                runtimes[role].owned = False
            else:
                self._binding.drop(role)
        return [runtimes[role] for role in owned if runtimes[role].adopted]

    def _is_complete(self, runtime: StageRuntime) -> bool:
        """Whether there is all that the commit needs of a role. One cloned from another pipeline lacks its own's."""
        stage, last = runtime.role.stage, self.num_stages - 1
        if runtime.reduced is None or (stage == last and runtime.reduced_loss is None):
            return False
        return stage not in (0, last) or len(runtime.consumed) >= self._accounted()

    def _record(self) -> dict[str, Any]:
        """What this member tells the others (JSON)."""
        roles = []
        for runtime in self._binding.owned():
            roles.append(
                {
                    "role": [runtime.role.pipeline, runtime.role.stage],
                    "forwards": 0 if runtime.torn else runtime.forwards,
                    "backwards": 0 if runtime.torn else runtime.backwards,
                    "reduced": self._is_complete(runtime),
                    "bare": runtime.adopted,
                    "changes": [runtime.layers.changes.count, runtime.layers.changes.last],
                }
            )
        return {
            "step": self._sequence,
            "entered": self._entered,
            "roles": roles,
            "commit": list(self._vector) if self._vector is not None else None,
            "received": self._batches.received,
            "repeatable": self._operation.repeatable(),
            "stale": any(runtime.stale for runtime in self._binding.runtimes.values()),
            "replicas": [self._plan.world.rank(r.role) for r in self._binding.replicas() if r.valid],
            "place": self._snapshots.place.model_dump(),
            "joining": self._joining,
            "history": len(self._history),
            "steps": self._committed_steps,
            "ahead": self._job.channel.ahead,
            "consumed": self._consumed,
            "seed": self._seed,
            "nonce": self._saves.nonce,
            "accounts": self._accounts.record(),
            "script": self._script.record(),
            "exact": 0 if self._exact is None else self._exact.steps,
        }

    def _decide(self, plan: Plan, records: Mapping[str, Mapping[str, Any]]) -> Decision:
        """The same decision on all survivors. What is resumed from is settled."""
        parsed = {
            member: MemberRecord(
                step=record["step"],
                entered=record["entered"],
                roles={
                    Role(*r["role"]): RoleProgress(r["forwards"], r["backwards"], r["reduced"], r["bare"])
                    for r in record["roles"]
                },
                commit=tuple(record["commit"]) if record["commit"] is not None else None,
            )
            for member, record in records.items()
            if not record["joining"]
        }
        decision = decide(parsed, plan.world)
        if decision.mode == "commit" and not all(record["repeatable"] for record in records.values()):
            decision = replace(decision, mode="resume")
        if decision.mode == "commit":
            return decision
        settled = settle(plan.world, self.micro_batches, decision.progress, self._tied_stages)
        return replace(decision, progress=settled)

    def _drop_reductions(self, progress: Mapping[Role, RoleProgress]) -> None:
        """The iteration is resumed from ``progress``: reductions that it does not know of are done again."""
        self._entered = False
        for role, runtime in self._binding.runtimes.items():
            # A replica's are still what the owner has: they protect the role while the iteration is finished.
            if not progress[role].reduced:
                runtime.tied.clear()
                runtime.reduced = runtime.measured = runtime.reduced_loss = runtime.received_layers = None
        for learner in self._learners.values():
            learner.incoming = None

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

    def _connect_batches(self, received: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Tell the batches which lanes they serve, given what each member has received of this operation."""
        member, plan = self._job.session.member, self._plan
        serving, sources = [], []
        for (stream, role), lane in self._lanes.streams.items():
            part = BATCH_PARTS.get(stream)
            if part is None:
                continue
            if lane.source == member:
                has = received.get(lane.destination, {}).get(str(role.pipeline), {})
                serving.append((role.pipeline, lane, part, has.get(part, 0)))
            if lane.destination == member:
                sources.append((role.pipeline, lane, part))
        feeding = {pipeline for pipeline, _, part, _ in serving if part == "inputs"}

        def eager(pipeline: int) -> bool:
            ends = (plan.owner(Role(pipeline, stage)) for stage in (0, plan.world.stages - 1))
            return pipeline in feeding or member not in ends

        self._batches.connect(self._transport, serving, sources, eager)

    # -- events -------------------------------------------------------------------------------------------

    def _report_recovery(self, recovery: Recovery) -> None:
        now = time.monotonic()
        pause = recovery.planned + recovery.rebuilt
        self._job.channel.event(
            "recovered",
            epoch=self._plan.epoch,
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
