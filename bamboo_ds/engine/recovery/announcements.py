"""Scripts' changes to their stages between two operations, told to the other holders of these stages.

The change itself travels with the reduced gradients of the next iteration. That there is one is told before the
iteration, so that a member that takes the stage over in it knows what it lacks::

    script changes its stage --> tell --> passes ... reduced gradients, with the change
                                  |
    holders of the replica      listen, at a loss --> report --> check: go on, or restart
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...errors import EpochChanged, FatalLoss
from ...schedule import Decision
from ...topology import Plan, Role
from ..context.channels import Stream
from ..context.shared import InContext
from ..script.assigned import fingerprint
from ..stage.layers import Changes
from ..stage.runtime import StageRuntime
from .reports import Reports

logger = logging.getLogger("bamboo_ds")

#: In place of an operation's number, where the script is between two of them.
_BETWEEN = -1


@dataclass(eq=False)
class Announcements(InContext):
    """Tells what the script has changed of the local role, and listens to what owners tell of replicas held here.

    Attributes:
        assigned: the script has assigned attributes since an operation began.
    """

    assigned: bool = field(default=False, init=False)

    def begin_operation(self) -> None:
        """The script has called an operation, so that it has assigned all that it assigns before it."""
        if self.assigned:
            self.assigned = False
            self.tell(written=False, trained=None)

    def tell(self, written: bool, trained: list[bool] | None) -> None:
        """Tells the holders of the local role's replica; they may need it for a takeover.

        Nothing else is sent in this iteration before they have it.

        Args:
            written: the script has changed what the layers keep.
            trained: which parameters are trainable, if it has changed that.
        """
        # What the script has assigned is compared where it is known that nothing follows: in an operation.
        sequence = self.progress.sequence if self.progress.called else _BETWEEN
        assigned = sequence, fingerprint(self.progress.script.assigned)
        message = torch.tensor([self.progress.steps, written, *assigned, *(trained or ())], dtype=torch.int64)
        try:
            for channel in self.epoch.channels.of(Stream.TOLD, self.binding.local.role):
                if channel.source == self.epoch.member:
                    channel.send(self.progress.sequence, message)
            self.epoch.drain()
        except EpochChanged as error:
            logger.info("interrupted before operation %d: %s", self.progress.sequence, error)

    def tell_again(self) -> None:
        """A plan begins: its holders of the local role's replica get what was told of the operation under way."""
        changed, trained = bool(self.progress.script.changed), self.binding.local.trained
        assigned = bool(self.progress.script.assigned) and self.progress.called
        if not self.progress.script.joining and (changed or trained or assigned):
            self.tell(changed, trained)

    def listen(self) -> None:
        """Learns what lost owners had changed or frozen when this iteration began, if they could still say so."""
        if not self.epoch.begun:
            return
        for replica in self.binding.replicas():
            channel = self.epoch.channels.to(Stream.TOLD, replica.role, self.epoch.member)
            for _, message in channel.take() if channel else ():
                assert isinstance(message, torch.Tensor)
                step, changed, sequence, assigned, *trained = message.tolist()
                self.progress.script.told_assigned[replica.role] = sequence, assigned
                if changed:
                    replica.layers.changes.note(step)
                if trained:
                    self._freeze(replica, [bool(each) for each in trained], step)

    def _freeze(self, replica: StageRuntime, trained: list[bool], step: int) -> None:
        """A lost owner has trained only these parameters of ``replica`` in the iteration after ``step`` others."""
        replica.trained = trained
        if step <= self.progress.steps and trained != replica.trains():
            replica.catch_up()
            self.binding.refresh()
            replica.begin_again()  # its passes did not know of it
            self.binding.reload()
            replica.train_only(trained)

    def check(self, plan: Plan, reports: Reports, decision: Decision) -> None:
        """Refuses a member that takes over a stage which its script changes between two operations: it would not do so.

        Raises:
            FatalLoss: a change is missing, or would be; on all members alike.
        """
        roles = role_changes(plan, reports, decision)
        self.progress.script.known_changes = {role: each.changes for role, each in roles.items()}
        step = max(report.steps for report in reports.values())
        for refused, what in (
            (lacking(roles, step) if plan.interrupts() else [], "what the script has just changed in "),
            (abandoned(roles, step), "the script that changes "),
        ):
            if refused:
                self.job.channel.need_every_rank()  # or the restart would end in the same way
                places = [(role.pipeline, role.stage) for role in refused]
                raise FatalLoss(places, plan.lost, self.epoch.job.newest_checkpoint(plan), what)


@dataclass(frozen=True)
class RoleChanges:
    """Changes of a role by its script, as the owner under a new plan knows them.

    Attributes:
        changes: as it was told of them.
        taken: the role was just taken over, and the member that runs as its rank is not there.
        delivered: the end of this iteration brings what was changed before it.
    """

    changes: Changes
    taken: bool
    delivered: bool


def role_changes(plan: Plan, reports: Reports, decision: Decision) -> dict[Role, RoleChanges]:
    """The changes of all roles, from the ``reports`` that the members of ``plan`` have exchanged."""
    changes = {}
    for report in reports.values():
        for role_report in report.roles:
            role = Role(*role_report.role)
            away = plan.script_rank(plan.owner(role)) != plan.world.rank(role)
            delivered = decision.mode == "commit" or decision.progress[role].reduced
            changes[role] = RoleChanges(role_report.changes, role_report.state_only and away, delivered)
    return changes


def lacking(roles: Mapping[Role, RoleChanges], step: int) -> list[Role]:
    """Roles that were taken over without what their scripts have changed since the last of ``step`` steps.

    Among them those of which no member knows it: their scripts may have been lost before they could tell, where others
    have changed theirs, unless they have not done so together with these before.
    """
    changers = [each.changes for each in roles.values() if not each.taken and each.changes.last == step]
    often = any(changes.count > (step > 0) for changes in changers)

    def lacks(each: RoleChanges) -> bool:
        quiet = not changers or (often and not each.changes.count)
        return each.taken and not each.delivered and (each.changes.last == step or not quiet)

    return [role for role, each in roles.items() if lacks(each)]


def abandoned(roles: Mapping[Role, RoleChanges], step: int) -> list[Role]:
    """Roles that were taken over after ``step`` steps and that their scripts would go on to change."""
    return [
        role
        for role, each in roles.items()
        if each.taken and each.changes.last >= 0 and (each.changes.count > 1 or each.changes.last >= step - 1)
    ]
