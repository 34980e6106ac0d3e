"""Members whose copy of a stage is the wrong one of several (``redundancy.on_mismatch: "evict"``)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from ...errors import CopiesDiffer, Corrupt, EpochChanged
from ...topology import Plan, Role
from ..context.shared import InContext
from ..stage.commit import Committed
from .replication import Replication
from .votes import Judgement, StateCopy, judge

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class Corruption(InContext):
    """Ends this member where its state is found to be wrong; on the others lets the right copies count.

    It is a loss, and not a leave, in which others would copy what the member has: after the commit in which all learn
    of it, and before the step, from which the replica of each of its roles goes on.
    """

    replication: Replication
    #: Why this member may not go on.
    _error: Corrupt | None = field(default=None, init=False)

    def refuse(self) -> None:
        """Raises again what has ended this member: a script may have caught it."""
        if self._error is not None:
            raise self._error

    def settle(self, agreed: Committed, plan: Plan | None, behind: bool) -> frozenset[Role]:
        """Draws the conclusions from the checksums that all members have told in a commit. Collective if they differ.

        A member with a wrong copy ends when all others know of it: what it leaves to them counts by then.

        Args:
            agreed: what the commit has agreed on.
            plan: in which this member has entered that commit: who held which copy.
            behind: others have committed it without this member, and it has learnt of it in a later epoch.

        Returns:
            Roles whose wrong copy is gone, or about to: they are not to be copied from their owner.

        Raises:
            Corrupt: this member holds a wrong copy.
            CopiesDiffer: copies differ, and none is that of most.
        """
        verdict = judge(
            self.epoch.layout, {StateCopy(role, owned): sum_ for (role, owned), sum_ in agreed.held.items()}
        )
        if verdict.split:
            raise CopiesDiffer([(role.pipeline, role.stage) for role in verdict.split])
        if not verdict.odd:
            return frozenset()
        assert plan is not None
        for role in verdict.decided & self.replication.differing.keys():
            runtime = self.binding.runtimes.get(role)
            if runtime is not None:
                runtime.verification.valid = runtime.verification.shared == verdict.right[role]
        for copy in verdict.odd:
            self._tell(copy, verdict, plan)
        if not behind:
            try:
                self.epoch.agreement.all_reduce(torch.zeros(1, dtype=torch.float64))
            except EpochChanged as error:  # a member with a wrong copy has gone on, and ended; or another one is lost
                logger.info("interrupted after a commit: %s", error)
        mine = [copy for copy in verdict.odd if _holder(copy, plan) == self.epoch.member]
        if mine:
            copies = [(copy.name, copy.role.pipeline, copy.role.stage) for copy in mine]
            self._error = Corrupt(copies, self._names(mine[0].role), self.progress.steps)
            raise self._error
        return verdict.decided

    def _names(self, role: Role) -> list[str]:
        return self.replication.differing.get(role, [])

    def _tell(self, copy: StateCopy, verdict: Judgement, plan: Plan) -> None:
        """Tells of a wrong copy; the shadow knows in which tensors it differs from the other copy of its role."""
        holder, gone = _holder(copy, plan), {_holder(each, plan) for each in verdict.odd}
        others = [plan.shadow(copy.role), *(member for member in plan.members if member not in gone)]
        if self.epoch.member != next(member for member in [*others, holder] if member is not None):
            return
        names, step = self._names(copy.role), self.progress.steps
        logger.error(
            "%s, the %s of stage %d of pipeline %d, has another state than most copies of that stage after step %d "
            "(%s): it is lost from here on",
            *(holder, copy.name, copy.role.stage, copy.role.pipeline, step, ", ".join(names) or "unknown tensors"),
        )
        self.job.channel.event(
            "member_corrupt",
            step=step,
            member_id=holder,
            role=[copy.role.pipeline, copy.role.stage],
            copy_of=copy.name,
            tensors=names,
        )


def _holder(copy: StateCopy, plan: Plan) -> str | None:
    return plan.owner(copy.role) if copy.owned else plan.shadow(copy.role)
