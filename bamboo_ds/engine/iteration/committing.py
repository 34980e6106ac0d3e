"""The commit: one all-reduce over all members, with which an operation has taken place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import Isolated, UnsupportedError
from ...topology import Plan, Role, end_sources
from ..checkpoints.own import OwnCheckpoints
from ..context.shared import InContext
from ..data.supply import BatchSupply
from ..replicas.construction import Construction
from ..script.assigned import NOT_ALIKE, agree, differing, fingerprint
from ..stage.commit import Committed, Contribution, Form, Measured, decode, encode, ends_of
from ..stage.runtime import StageRuntime
from .exactness import ExactChecks


@dataclass(eq=False)
class Commits(InContext):
    """Enters commits for this member.

    Attributes:
        plan: in which it has entered that of an iteration last.
    """

    supply: BatchSupply
    own: OwnCheckpoints
    checks: ExactChecks
    constructions: Mapping[Role, Construction]
    #: Replicas that have been found to differ in this iteration.
    differing: Collection[Role]
    plan: Plan | None = field(default=None, init=False)

    def commit_iteration(self) -> None:
        """Commits the iteration, all of whose gradients are reduced and replicated."""
        self.supply.complete(self.ds.micro_batches)
        self.epoch.drain()
        self.progress.operation.entered, self.plan = True, self.epoch.plan
        self.agree(encode(self.epoch.layout, self.form(), self._contribution()))

    def agree(self, vector: torch.Tensor, fenced: bool = True) -> None:
        """Makes the sum of ``vector`` (float64) over all members that of the commit of an operation.

        Every member also tells the newest epoch that it could enter. When all know of a new one, all switch after
        this operation. And it tells how many replicas it builds, and how many of them will take longer than this
        operation. A member that may not commit now (see :mod:`bamboo_ds.control.fencing`) waits before it, unless
        nothing follows from the operation that others could contradict (``fenced`` false).
        """
        if fenced:
            self.epoch.job.await_fence()
        self.epoch.session.confirm("entering a commit")
        far = sum(not construction.near for construction in self.constructions.values())
        assigned = float(self._fingerprint())
        copies = torch.tensor([len(self.constructions), far, assigned, assigned**2], dtype=torch.float64)
        total = self.epoch.agreement.all_reduce(torch.cat([vector, copies, self._newest()])).tolist()
        if fenced:
            self.epoch.job.await_fence()  # what was on its way for long may come too late
        begun, left, sum_, squares, *newest = total[len(vector) :]
        if not agree(len(self.epoch.plan.members), sum_, squares):
            self._refuse_difference()  # a loss that interrupts it leaves the operation uncommitted everywhere
        self.progress.vector = tuple(total[: len(vector)])
        self.epoch.copied = begun > left == 0
        self.epoch.switch_due = min(newest) > self.epoch.plan.epoch

    def _fingerprint(self) -> int:
        """The fingerprint of the scripts' assignments to the roles that this member owns.

        Raises:
            UnsupportedError: one that was lost in this operation has assigned something else than this one.
        """
        mine = fingerprint(self.progress.script.assigned)
        for role, (sequence, theirs) in self.progress.script.told_assigned.items():
            if sequence == self.progress.sequence and self.epoch.owns(role) and theirs != mine:
                raise UnsupportedError(f"the lost owner of role {role}: {NOT_ALIKE}")
        return mine

    def _refuse_difference(self) -> None:
        """Finds out what members' scripts have not assigned alike.

        Raises:
            Isolated: only members that have joined differ, and this is one of them.
            UnsupportedError: others differ.
        """
        joined = self.job.channel.joiner
        answers = self.epoch.agreement.exchange([joined, self.progress.script.assigned])
        first = {member: assigned for member, (late, assigned) in answers.items() if not late}
        if not first or differing(first):
            raise UnsupportedError(f"{NOT_ALIKE}: {differing({m: assigned for m, (_, assigned) in answers.items()})}")
        if self.progress.script.assigned not in first.values():
            raise Isolated(
                f"this member's script, which came to the job later, has assigned other things than those of the "
                f"others: {differing({**first, self.epoch.member: self.progress.script.assigned})}"
            )

    def all_know_more(self) -> bool:
        """Whether all members know of a newer plan now. Collective."""
        return min(self.epoch.agreement.all_reduce(self._newest()).tolist()) > self.epoch.plan.epoch

    def _newest(self) -> torch.Tensor:
        """The newest epoch that this member could enter, by member."""
        members = self.epoch.plan.members
        told = torch.zeros(len(members), dtype=torch.float64)
        told[members.index(self.epoch.member)] = self.epoch.job.boundary(self.own.saves.busy)
        return told

    def decoded(self) -> Committed:
        """The agreement of an iteration's commit."""
        assert self.progress.vector is not None
        return decode(self.epoch.layout, self.form(), self.progress.vector)

    def form(self) -> Form:
        """The form of an iteration's commit."""
        losses = 1 + len(self.ds.module.get_additional_losses() or {})
        votes = self.settings.redundancy.on_mismatch == "evict" and self.epoch.layout.alike
        return Form(losses, self.binding.local.optimizer.norms, self._accounted(), votes)

    def _accounted(self) -> int:
        """Micro-batches of a pipeline that the commit accounts for."""
        return self.ds.micro_batches if self.progress.checksums else 0

    def is_complete(self, runtime: StageRuntime) -> bool:
        """Whether there is all that the commit needs of a role. One cloned from another pipeline lacks its own's."""
        stage, last = runtime.role.stage, self.epoch.layout.stages - 1
        if runtime.results.reduced is None or (stage == last and runtime.results.loss is None):
            return False
        return len(runtime.results.consumed) >= len(ends_of(self.epoch.layout, runtime.role)) * self._accounted()

    def drawn(self) -> dict[Role, int]:
        """Checksum of what this member's iterator has given in this operation, if it speaks for its end."""
        role, plan = self.binding.local.role, self.epoch.plan
        found = self.supply[role.pipeline].digest
        speaks = self.epoch.member in end_sources(plan, plan.world.rank(role))[:1]
        return {role: found} if found is not None and speaks else {}

    def _contribution(self) -> Contribution:
        losses: dict[int, Sequence[float]] = {}
        measured: dict[Role, Measured] = {}
        consumed = {r.role: r.results.checksums() for r in self.binding.owned() if r.results.consumed}
        for runtime in self.binding.owned():
            if runtime.results.loss is not None:
                losses[runtime.role.pipeline] = runtime.results.loss.tolist()
            assert runtime.results.measured is not None
            measured[runtime.role] = runtime.results.measured
        mismatches = [r.role for r in self.binding.replicas() if not r.verification.valid]
        redundant = [replica.share.part.forwards for replica in self.binding.replicas() if not replica.share.helps]
        ahead = sum(redundant) - self.checks.redone
        own, writes = self.own.due()
        return Contribution(losses, measured, ahead, mismatches, consumed, self.drawn(), own, writes, self._held())

    def _held(self) -> dict[tuple[Role, bool], int]:
        """Checksums of this member's copies, where they are of the last step; a wrong one that is known counts no more.

        A copy that waits for a later plan is no shadow's, of which there is one.
        """
        checksums: dict[tuple[Role, bool], int] = {}
        for role, runtime in self.binding.runtimes.items():
            counts = runtime.owned or (
                self.epoch.plan.shadow(role) == self.epoch.member
                and (runtime.verification.valid or role in self.differing)
            )
            if counts and runtime.verification.shared is not None:
                checksums[role, runtime.owned] = runtime.verification.shared
        return checksums
