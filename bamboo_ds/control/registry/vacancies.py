"""Vacancies for members that come to a job: a slot of their own, and the rank that the script runs as."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...store.client import Store
from ...topology import Plan, ends
from ...topology.plan import UNSTARTED
from .keys import Keys
from .mirror import Mirror

#: Members whose scripts run at the ends of each pipeline, where scripts have iterators over its batches.
WANTED_SOURCES = 3
#: Lease times after which a job none of whose members is registered has been deserted.
_DESERTED = 3.0


def choose_script_rank(plan: Plan, script_ranks: Iterable[int]) -> int:
    """The rank that the script of a new member runs as.

    Scripts have iterators over a pipeline's batches at its ends only. Without one of them the pipeline waits for a new
    worker, so an end of a pipeline without any comes first. A member can only have roles of its script's tensor
    slice, so the slice with the fewest members is next. Then comes an end of the pipeline with the fewest sources, up
    to :data:`WANTED_SOURCES` of each, and then the rank as which the fewest scripts run.

    Args:
        plan: the newest plan, with a layout.
        script_ranks: those of all members, admitted or not.
    """
    layout, taken = plan.world, list(script_ranks)

    in_slice = Counter(script_rank % layout.slices for script_rank in taken)

    def key(rank: int) -> tuple[bool, int, int, int, bool, int]:
        at = ends(plan, layout.role(rank).pipeline)
        sources = min(sum(script_rank in at for script_rank in taken), WANTED_SOURCES) if rank in at else WANTED_SOURCES
        return sources > 0, in_slice[rank % layout.slices], sources, taken.count(rank), rank not in at, rank

    return min(range(layout.size), key=key)


@dataclass(frozen=True)
class Vacancy:
    """The place of a member that joins; the names are those of :class:`~bamboo_ds.control.settings.AgentSettings`.

    It joins what is running, or waits for the start of a job that had a fatal loss, or was not started yet.
    """

    slot: int
    script_rank: int | None
    waiting: bool
    after_epoch: int
    generation: int | None
    world_size: int
    pipelines: int | None


def find_vacancy(
    store: Store, mirror: Mirror, plan: Plan, own_slot: int | None = None, restart: bool = False
) -> Vacancy:
    """A place in the job, with a slot that is claimed for the caller.

    Args:
        mirror: the job's keys.
        plan: the newest plan among them, with a layout or fatal.
        own_slot: the slot that the caller has had; it keeps it if it waits for a restart, where it may be expected.
        restart: nobody of it is there any more, who could say that it is fatal.
    """
    spec, newest = mirror.job, mirror.restart
    size, fatal = len(plan.owners), restart or bool(plan.lost_roles)
    waiting = [record.script_rank for record in mirror.members.values() if record.id not in plan.members]
    taken = [record.slot for record in Mirror(store.get_prefix(Keys.MEMBERS)).members.values()]
    kept = own_slot if fatal else None
    free = 0 if plan.generation == UNSTARTED else max([size - 1, *taken]) + 1
    return Vacancy(
        slot=claim_slot(store, free) if kept is None else kept,
        script_rank=None if fatal else choose_script_rank(plan, [*plan.script_ranks, *waiting]),
        waiting=fatal,
        after_epoch=plan.epoch if fatal else 0,
        generation=None if not fatal else (newest or plan).generation,
        world_size=size,
        pipelines=spec.pipelines if spec else None,
    )


def claim_slot(store: Store, first: int) -> int:
    """A slot number from ``first`` on that nobody else has; claimed for the job's whole life."""
    slot, mine = first, secrets.token_hex(8)  # a request that is repeated finds its own value, not another's
    while not store.create(Keys.slot(slot), mine):
        slot += 1
    return slot


def some_finished(mirror: Mirror, plan: Plan) -> bool:
    """Whether some member of ``plan`` has finished. Then all had done the last step."""
    left = mirror.left
    # After the loss of all members, or before the first start, a plan has none; some of the lost ones had finished.
    return any(m in left and left[m].outcome == "finished" for m in (*plan.members, *plan.lost))


def is_over(mirror: Mirror) -> bool:
    """Whether the job has ended: on request, by a failure, or since some of it have finished and all are gone."""
    plan, left = mirror.plan, mirror.left
    if mirror.stop is not None or plan is None:
        return mirror.stop is not None
    return some_finished(mirror, plan) and not any(m in mirror.members and m not in left for m in plan.members)


class Desertion:
    """Notices that nobody has been there for so long that nobody will be. Then whoever comes must lead the job on.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def look(self, mirror: Mirror | None, lease_ttl_s: float) -> bool:
        """Whether it is so, by the newest ``mirror``; ``None``: the job is known to be well.

        ``lease_ttl_s`` is that of the job's members: an outage of etcd that costs their leases is not their end.
        """
        plan = mirror.plan if mirror is not None else None
        if mirror is None or plan is None or any(member in mirror.members for member in plan.members):
            self._since = None
            return False
        now = self._clock()
        self._since = now if self._since is None else self._since
        return now - self._since > _DESERTED * lease_ttl_s
