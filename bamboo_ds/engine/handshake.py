"""What the members of a new plan tell each other before they go on, and the decision that follows from it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict
from typing_extensions import Self

from ..control.registry.records import PeerAddress
from ..schedule import Decision, MemberRecord, RoleProgress, decide, settle
from ..topology import Layout, Role
from .accounts import LedgerReport
from .layers import Changes


class _Report(BaseModel):
    """Reports travel as JSON. One that does not parse is a defect: all members run the same version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        """Every number as it is: a loss may be infinite or none."""
        return json.dumps(self.model_dump(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` gave. Raises ``ValidationError`` (a ``ValueError``) if it is something else."""
        return cls.model_validate(json.loads(text))


class StartReport(_Report):
    """What a member tells the others when its engine is built; what the member that leads tells counts for all.

    Attributes:
        seed: of the generators of passes and steps.
        nonce: names this run of the job in the ids of its saves.
        resumed: folder and tag of the checkpoint that the job goes on from, if it was started again.
        ledger: folder of the ledger, if there is one.
        exact: how many first steps are checked.
        flags: settings of the process that decide how tensors are computed; all members must have the same.
    """

    seed: int
    nonce: str
    resumed: tuple[str, str] | None
    ledger: str | None
    exact: int
    flags: dict[str, str]


class RoleReport(_Report):
    """What the owner of a role holds of the current iteration; see :class:`~bamboo_ds.schedule.RoleProgress`.

    Attributes:
        role: pipeline and stage.
        state_only: the role was taken over in this operation.
        changes: of the stage by its script, as far as the owner was told of them.
    """

    role: tuple[int, int]
    forwards: int
    backwards: int
    reduced: bool
    state_only: bool
    changes: Changes


class ScriptReport(_Report):
    """Where a member is among the script's own collectives (:class:`~bamboo_ds.comm.script.ScriptCollectives`)."""

    gap: int
    done: dict[str, int]
    open: int


class MemberReport(_Report):
    """What one member tells the others at the beginning of an epoch.

    Attributes:
        step: operations that it has committed and finished; it is in operation ``step``.
        entered: it has everything that the commit of that operation needs of it.
        roles: progress of the roles that it owns under the new plan.
        commit: sum of the last commit all-reduce; ``None`` before the first.
        received: parts of batches that it has received in this operation: pipeline (as text), part, number.
        repeatable: it could enter the commit of this operation again, if it has entered it.
        stale: it lacks what the shards of other members' steps have changed.
        replicas: ranks of the roles whose replica it holds.
        place: where it offers snapshots and the history of the job.
        joining: it has just come, and takes over from the others where the job stands.
        history: operations of the script that it knows the results of.
        steps: iterations committed.
        ahead: by how much the script's count of steps is ahead of the job's.
        consumed: micro-batches of each pipeline that committed iterations have used.
        seed: of the generators of passes and steps.
        nonce: names this run of the job in the ids of its saves.
        accounts: of the ledger, if there is one.
        script: the script's own collectives.
        exact: how many first steps are checked; 0: none any more.
    """

    step: int
    entered: bool
    roles: tuple[RoleReport, ...]
    commit: tuple[float, ...] | None
    received: dict[str, dict[str, int]]
    repeatable: bool
    stale: bool
    replicas: tuple[int, ...]
    place: PeerAddress
    joining: bool
    history: int
    steps: int
    ahead: int
    consumed: int
    seed: int
    nonce: str
    accounts: LedgerReport | None
    script: ScriptReport
    exact: int

    def progress(self) -> MemberRecord:
        """What of it decides how the operation goes on."""
        roles = {
            Role(*each.role): RoleProgress(each.forwards, each.backwards, each.reduced, each.state_only)
            for each in self.roles
        }
        return MemberRecord(self.step, self.entered, roles, self.commit)

    def script_facts(self) -> dict[str, Any]:
        """What the script's collectives agree by."""
        return {"joining": self.joining, "script": self.script.model_dump()}


#: The reports of all members of an epoch.
Reports = Mapping[str, MemberReport]


def decision_of(reports: Reports, layout: Layout, micro_batches: int, tied: Collection[int]) -> Decision:
    """How the interrupted operation goes on; equal on all members. What is resumed from is settled.

    Args:
        reports: of all members.
        layout: the logical world.
        micro_batches: of an iteration.
        tied: stages that hold weights of other stages, too.
    """
    found = decide({m: report.progress() for m, report in reports.items() if not report.joining}, layout)
    if found.mode == "commit" and all(report.repeatable for report in reports.values()):
        return found
    return replace(found, mode="resume", progress=settle(layout, micro_batches, found.progress, tied))


def newest_of(reports: Reports) -> tuple[MemberReport, list[PeerAddress]]:
    """The report of a member that knows all that the job has done, and where all such members offer it."""
    told = [report for report in reports.values() if not report.joining]
    newest = max(told, key=lambda report: (report.history, report.step))
    return newest, [report.place for report in told if report.history == newest.history]
