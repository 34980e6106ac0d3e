"""The roles of one member under a plan: those that it computes from now on, and from where."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ...comm.inner import runs_behind
from ...errors import FatalLoss
from ...schedule import Decision, RoleProgress
from ...topology import Plan, Role
from ..context.shared import InContext
from ..replicas.building import StageBuilder
from ..stage.runtime import StageRuntime

#: So many of what layers keep are named.
_NAMED = 10

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class RoleTransfer(InContext):
    """Makes this member's runtimes follow a plan, and what they hold of an iteration the decision about it."""

    builder: StageBuilder

    def doubt_passes(self) -> None:
        """Doubts the iteration's passes where collectives in them run behind the host: a loss may have cut them off.

        None of them has told. Passes whose sums count as reduced are whole: the reduction has made sure of that.
        """
        if self.epoch.layout.slices > 1 and runs_behind(self.ds.device):
            for runtime in self.binding.owned():
                share = runtime.share
                share.partial_pass = share.partial_pass or (share.begun and runtime.results.reduced is None)

    def follow(self, plan: Plan) -> None:
        """Makes the runtimes those that ``plan`` gives to this member, from what it holds already.

        Replicas whose owner was lost become owners; owners become replicas where the plan says so (what both hold
        is equal between iterations, and sums that are in progress are the owner's alone); what the plan does not
        mention is dropped.

        Raises:
            FatalLoss: this member has no valid state for a role that the plan gives to it.
        """
        member, runtimes = self.epoch.member, self.binding.runtimes
        owned, followed = plan.owned_by(member), {*plan.shadowed_by(member), *plan.built_by(member)}
        self.builder.make_room()  # of what is here, before there is more
        for role in owned:
            runtime = runtimes.get(role)
            if runtime is None or not runtime.usable:
                runtime = self._clone(role, plan)
            if not runtime.owned:
                if runtime.pending is not None:
                    logger.info("role %s has yet to take the step of the last iteration", role)
                    runtime.catch_up()
                if plan.lost:
                    logger.warning("taking over role %s with %d forwards done", role, runtime.share.part.forwards)
                else:
                    logger.info("role %s comes to this member", role)
                runtime.owned, runtime.share.helps = True, False
                self.progress.operation.taken_over.add(role)
            elif runtime.share.divided and runtime.share.begun and plan.lending(role) is None:
                logger.warning("taking over a part of role %s, which its shadow has computed", role)
                self.progress.operation.taken_over.add(role)
        for role in [r for r in runtimes if r not in owned]:
            if role in followed and runtimes[role].usable:
                share, before = runtimes[role].share, runtimes[role].owned
                share.helps |= before and share.divided
                share.spent |= before and share.begun and not share.divided
                runtimes[role].owned = False
            else:
                self.binding.drop(role)
        # What computes comes to the device when there is room for it.
        self.builder.park(plan)
        for role, runtime in runtimes.items():
            if role in owned or plan.lending(role) is not None:
                self.builder.move(runtime, parked=False)
        if not plan.lost:  # after a loss there is no time for it
            self.builder.place(plan)

    def _clone(self, role: Role, plan: Plan) -> StageRuntime:
        """A runtime for ``role`` from the same stage of another pipeline, which this member holds.

        Parameters and optimizer state of the two are equal; what their layers keep besides them (running statistics)
        is not, and the lost one's cannot be had any more.
        """
        layout = self.epoch.layout
        alike = [each for each in layout.siblings(role) if each != role] if layout.alike else []
        held = (runtime for runtime in self.binding.runtimes.values() if runtime.role in alike)
        source = next((runtime for runtime in held if runtime.usable), None)
        lost, checkpoint = [(role.pipeline, role.stage)], self.epoch.job.newest_checkpoint(plan)
        if source is None:
            raise FatalLoss(lost, plan.lost, checkpoint)
        source.catch_up()
        kept = source.layers.kept()
        if kept:
            what = f"what layers keep besides parameters ({', '.join(kept[:_NAMED])})"
            if not self.settings.redundancy.bears:
                cure = '"bamboo.redundancy.on_mismatch": "warn" goes on with those'
                logger.error(
                    "role %s: pipeline %d may have other values of %s; %s", role, source.role.pipeline, what, cure
                )
                raise FatalLoss(lost, plan.lost, checkpoint, part=f"{what} of ")
            logger.warning("role %s goes on with %s in pipeline %d", role, what, source.role.pipeline)
        return self.builder.clone(source, role)

    # -- progress -----------------------------------------------------------------------------------------

    def drop_reductions(self, progress: Mapping[Role, RoleProgress]) -> None:
        """The iteration is resumed from ``progress``: reductions that it does not know of are done again."""
        self.progress.operation.entered = False
        for role, runtime in self.binding.runtimes.items():
            # A replica's are still what the owner has: they protect the role while the iteration is finished.
            if not progress[role].reduced:
                runtime.results.drop_reduction()

    def redone(self, plan: Plan, decision: Decision) -> tuple[int, int, int]:
        """Passes of roles taken over that their lost owners may have done already and that are done again here.

        Returns:
            Forward passes, backward passes, and backward passes that are not done again, since their sums are here.
        """
        forwards = backwards = kept = 0
        self.progress.operation.redone.clear()
        if decision.mode == "commit":
            return 0, 0, 0
        for role in plan.owned_by(self.epoch.member):
            own = decision.progress[role]
            if own.reduced or role not in self.progress.operation.taken_over:
                continue
            for index, part in enumerate(own.parts):
                seen = self._seen(decision.progress, role, index, +1), self._seen(decision.progress, role, index, -1)
                forwards += max(0, seen[0] - part.forwards)
                backwards += max(0, seen[1] - part.backwards)
                kept += part.since
                self.progress.operation.redone[role, part.begin] = seen
        return forwards, backwards, kept

    def _seen(self, progress: Mapping[Role, RoleProgress], role: Role, index: int, step: int) -> int:
        """The number of a part's passes with results used by the next part or stage (``step`` 1), or the one before."""
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
