"""Garbage-collects stale keys so that a long job does not grow the store. Pure."""

from __future__ import annotations

from ...topology.plan import Plan
from ..registry.keys import Keys
from ..registry.mirror import Mirror
from ..registry.records import newest

#: Departed members whose keys stay: for ``bamboo status``, and for whoever compares the errors of several.
KEPT_MEMBERS = 32
#: Newest epochs whose keys stay: everybody is in the newest one, but events about earlier ones may be under way.
KEPT_EPOCHS = 8

_OF_MEMBERS = (
    Keys.KNOWN,
    Keys.LEFT,
    Keys.REPORTS,
    Keys.WORKERS,
    Keys.SUSPECTS,
    Keys.ASKED,
    Keys.HEALTH,
    Keys.PROGRESS,
    Keys.NOTICES,
    Keys.LEAVE,
)


def obsolete(mirror: Mirror, plan: Plan) -> list[str] | None:
    """Keys of members that have departed long ago and of epochs that are over.

    The claims of slots stay: a number that comes back would mean another member.

    Args:
        plan: the newest plan.

    Returns:
        ``None`` as long as somebody has not entered it.
    """
    workers = mirror.workers
    entered = all(member in workers and workers[member].epoch == plan.epoch for member in plan.members)
    if plan.layout is None or plan.lost_roles or mirror.stop is not None or not entered:
        return None
    needed = {*mirror.members, *plan.members, *plan.owners, *plan.lost}
    departed: dict[str, int] = {}  # the revisions of their newest keys
    found: list[tuple[str, list[str]]] = []
    keys: list[str] = []
    for key, revision in mirror.revisions():
        if key.startswith(Keys.EPOCHS):
            epoch = key.split("/")[1]
            if epoch.isdecimal() and int(epoch) <= plan.epoch - KEPT_EPOCHS:
                keys.append(key)
        elif key.startswith(_OF_MEMBERS):
            owners = [member for member in key.split("/")[1:] if member not in needed]
            found.append((key, owners))
            if not key.startswith(Keys.SUSPECTS):
                departed.update({member: max(revision, departed.get(member, 0)) for member in owners})
    gone = set(sorted(departed, key=departed.__getitem__)[: max(0, len(departed) - KEPT_MEMBERS)])
    if gone:
        # How far the job has come, and where it could go on.
        progress = mirror.progress.values()
        last = newest(progress), newest(progress, saved=True)
        spared = {Keys.progress(record.id) for record in last if record is not None}
        keys += [key for key, owners in found if not gone.isdisjoint(owners) and key not in spared]
    return keys
