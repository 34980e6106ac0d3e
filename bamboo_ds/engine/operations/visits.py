"""Calls of a script for each stage, such as to write its parameters; see :func:`bamboo_ds.for_each_stage`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...schedule import RoleProgress
from ...topology import Role
from ..checkpoints.saving import Saves
from ..context.operation import Outcome
from ..context.shared import InContext
from ..iteration.committing import Commits
from ..joining.replay import Replay
from ..recovery.copies import Copies
from ..recovery.takeover import Takeover
from ..script.changes import unchanged, without_process
from ..stage.answers import Refusal
from ..stage.optimizers import check_freezing
from ..stage.runtime import StageRuntime
from ..stage.tracing import content_checksum

logger = logging.getLogger("bamboo_ds")

Visit = Callable[[Any], Any]

_REFUSAL = Refusal(
    "the function given to bamboo_ds.for_each_stage",
    "members compute different numbers of stages, so call collectives before or after it",
)


@dataclass(eq=False)
class StageVisits(InContext):
    """Calls a function for each stage, as an :class:`~..context.operation.Operation`.

    A loss before its commit makes the members that take stages over call the function for these, too. So when it is
    over, the function has returned for every stage somewhere.

    Attributes:
        made: the script has done so, or what it replays has.
    """

    replay: Replay
    takeover: Takeover
    commits: Commits
    copies: Copies
    saves: Saves
    made: bool = field(default=False, init=False)
    _visit: Visit = field(init=False)
    _results: dict[Role, Any] = field(default_factory=dict, init=False)
    #: Roles of which the function has frozen parameters, or made them trainable, here; and what is trained of all such.
    _frozen: set[Role] = field(default_factory=set, init=False)
    _trains: dict[Role, list[bool]] = field(default_factory=dict, init=False)

    call = "for_each_stage"
    draws = watched = takes_steps = False
    goes_on = True

    def visit(self, function: Visit) -> list[Any]:
        """See :func:`bamboo_ds.for_each_stage`."""
        self.made = True
        done = self.replay.recorded("visit")
        if done is not None:
            local = self.binding.local
            if str(self.layout.rank(local.role)) in done:
                local.train_only(done[str(self.layout.rank(local.role))])
            return []
        self._visit, self._results, self._frozen, self._trains = function, {}, set(), {}
        self.takeover.run(self)
        results, layout = self._results, self.epoch.layout
        del self._visit, self._results
        return [results[role] for role in sorted(results, key=layout.rank)]

    def tell_absent(self) -> None:
        """Warns, at the end of the script, of stages whose own ranks have no process that computes them."""
        absent, rank = without_process(self.epoch.plan), self.epoch.layout.rank
        if absent and self.epoch.leads and not self.made:
            stages = ", ".join(f"{rank(role)} (stage {role.stage} of pipeline {role.pipeline})" for role in absent)
            logger.warning(
                "the script has ended, and no process computes the stage of its own rank for ranks %s. Files that each "
                "rank writes of its stage lack these, or have old parameters in them, unless they were written before: "
                "write them in bamboo_ds.for_each_stage(engine, function)",
                stages,
            )

    # -- the operation ------------------------------------------------------------------------------------

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        rank = self.epoch.layout.rank
        for runtime in sorted(self.binding.owned(), key=lambda runtime: rank(runtime.role)):
            if runtime.role not in self._results:
                self._results[runtime.role] = self._call(runtime)
        mine = {rank(each.role): each.trains() for each in self.binding.owned() if each.role in self._frozen}
        answers = self.epoch.agreement.exchange(mine).values()
        self._trains = {self.epoch.layout.role(int(r)): on for trains in answers for r, on in trains.items()}
        self.commit()

    def _call(self, runtime: StageRuntime) -> Any:
        before = runtime.trains()
        result = self._visited(runtime)
        if runtime.trains() != before:
            check_freezing(runtime.optimizer)
            self._frozen.add(runtime.role)
        return result

    def _visited(self, runtime: StageRuntime) -> Any:
        with (
            self.binding.bound(runtime),
            self.groups.acting_for(runtime.role, _REFUSAL),
            unchanged("the function given to bamboo_ds.for_each_stage", runtime.layers, content_checksum),
        ):
            return self._visit(self.ds.engine)

    def commit(self) -> None:
        self.progress.operation.entered = True
        self.commits.agree(torch.zeros(1, dtype=torch.float64))

    def repeatable(self) -> bool:
        """Whether the function was called for all roles that this member has now."""
        return all(runtime.role in self._results for runtime in self.binding.owned())

    def finish(self, outcome: Outcome) -> None:
        self.history.add("visit", {str(self.layout.rank(role)): trains for role, trains in self._trains.items()})
        for role, trains in self._trains.items():
            self.copies.follow_owner(role, partial(StageRuntime.train_only, trained=trains))
        self.saves.poll()
        self.copies.advance(stepped=False)
