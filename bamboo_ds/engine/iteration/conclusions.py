"""Conclusions from the check of a job's first steps, told to people and as events."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...config import BLOCK
from ...errors import Inexact
from ...topology import Role
from ..context.shared import InContext
from .facts import REHEARSAL, Tally, in_words, reasons, total, union

logger = logging.getLogger("bamboo_ds")

#: How many differences are named.
_NAMED = 100


@dataclass(eq=False)
class Conclusions(InContext):
    """Tells what differs, and in the end that nothing does.

    Attributes:
        tally: what this member has compared.
        unsure: the step in which a member was lost before the check was over.
    """

    tally: Tally = field(default_factory=Tally, init=False)
    unsure: int | None = field(default=None, init=False)

    def tell(self, role: Role, found: Sequence[str], what: str, rounded: bool) -> None:
        """Tells what was ``found``, if anything; raises :class:`Inexact` if that ends the job."""
        if not found:
            return
        self.tally.differing += len(found)
        self.job.channel.event(
            "exact_mismatch",
            step=self.progress.steps,
            role=[role.pipeline, role.stage],
            found=what,
            tensors=found[:_NAMED],
        )
        cause, cures = reasons(what, role.stage in (0, self.epoch.layout.stages - 1))
        if self.unsure is not None:
            cause += f" (a member was lost in step {self.unsure}, before the check was over: results may differ since)"
        error = Inexact(self.progress.steps + (what == REHEARSAL), role.pipeline, role.stage, cause, cures, found)
        if not (self.settings.redundancy.bears or rounded):
            raise error
        logger.error("%s", error)

    def begin_again(self, unsure: int | None) -> None:
        """Counts anew what is compared; the time that it took and what differed stay."""
        if self.unsure is None:
            self.unsure = unsure
        self.tally = Tally(seconds=self.tally.seconds, differing=self.tally.differing)

    def conclude(self, checked: int, before: int) -> None:
        """All members put together what they have compared in ``checked`` steps after the first ``before``. Collective.

        One of them tells it.
        """
        tallies = self.epoch.agreement.exchange(self.tally.told()).values()
        if not self.epoch.leads:
            return
        layout, steps, tensors = self.epoch.layout, min(tally["steps"] for tally in tallies), total(tallies, "tensors")
        rehearsals, seconds = min(tally["rehearsals"] for tally in tallies), max(tally["seconds"] for tally in tallies)
        rehearsed, changed, exhausted = (union(tallies, name) for name in ("roles", "changed", "exhausted"))
        rest = [[r.pipeline, r.stage] for r in layout.roles if (r.pipeline, r.stage) not in rehearsed - exhausted]
        why = "tensor slices" if layout.slices > 1 else "divided, or without a replica"
        without = "".join(
            f" Not rehearsed{reason}: {in_words(sorted(roles))}."
            for reason, roles in (
                (f" ({why})", {(d, s) for d, s in rest} - changed - exhausted),
                (" in steps before which the script had changed it", changed),
                (" (there is too little memory, see above)", exhausted),
            )
            if roles
        )
        off = f'This took {seconds:.1f} s more; "{BLOCK}.redundancy.check_exact": 0 switches it off.'
        which = f"steps {before + 1} to {before + checked}" if before else f"the first {checked} steps"
        if total(tallies, "differing"):
            _say(f"the check of {which} has found differences, see above.{without} {off}")
            return
        _say(
            f"{which} are exact: {len(rehearsed)} stages computed again by their shadows in "
            f"{rehearsals} of them, all replicas compared after {steps}, {tensors} tensors and numbers equal to the "
            f"last bit.{without} {off}"
        )
        self.job.channel.event(
            "exact_checked",
            step=self.progress.steps,
            steps=steps,
            stages=len(rehearsed),
            tensors=tensors,
            not_rehearsed=rest,
        )


def _say(line: str) -> None:
    print(f"bamboo: {line}", flush=True)
