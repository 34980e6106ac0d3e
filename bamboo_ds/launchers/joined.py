"""Members that have joined a job: the launcher has not started them, and they may outlive those that it has."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Container

from ..control.registry.access import open_store, put_once
from ..control.registry.keys import Keys
from ..control.registry.mirror import Mirror
from ..control.registry.records import LeftRecord, MemberRecord, StopRecord
from ..control.settings import MemberOptions
from ..errors import EXIT_FATAL_LOSS, StoreError, StoreUnavailable
from ..store.client import Store

logger = logging.getLogger("bamboo_ds.launchers")

#: Short, because whoever waits for joined members must hear a Ctrl-C too.
_STORE_TIMEOUT_S = 2.0
_POLL_S = 0.1
#: Seconds that etcd has to tell for the first time who is there.
_UNKNOWN_S = 30.0


def launchers_store(options: MemberOptions, timeout_s: float) -> Store:
    """The store of the job of ``options``; raises as :class:`~bamboo_ds.store.Store` does.

    Its secret is found by the job's name where a rank of another launcher has made it.
    """
    return open_store(options.store, options.job, timeout_s, options.secret or None)


def exit_code(mirror: Mirror) -> int:
    """The exit code of a job without members: 0 if some member has finished, since then all had."""
    if mirror.stop is not None:
        return mirror.stop.code
    left = mirror.left.values()
    if any(record.outcome == "finished" for record in left) or (left and all(r.outcome == "left" for r in left)):
        return 0
    return next((record.code for record in left if record.error is not None), EXIT_FATAL_LOSS)


def is_joined(record: MemberRecord, own: Container[int]) -> bool:
    """Whether a launcher with the slots ``own`` has not started it, nor an agent."""
    return record.slot not in own and not record.feeder


class JoinedMembers:
    """The members left of a job. Use it once, after all that the launcher has started itself are gone.

    Args:
        options: of the launcher's members. A member that etcd has forgotten, in an outage, has two lease times to
            register again, and so has one that waits for the job to start again.
        own: slots of the launcher.
    """

    def __init__(self, options: MemberOptions, own: Container[int]) -> None:
        self._own, self._return_s = own, 2 * options.bamboo.membership.lease_ttl_s
        self._restarts = options.bamboo.recovery.max_restarts > 0
        self._absent_since: dict[str, float] = {}
        #: Those that have been seen.
        self.seen: set[str] = set()

    def look(self, mirror: Mirror, now: float) -> set[str]:
        """Members that are registered or expected to be soon; ``now`` is monotonic seconds."""
        members, listed = mirror.members, {*(mirror.plan.members if mirror.plan else ())}
        self.seen |= {record.id for record in members.values() if is_joined(record, self._own)}
        silent = {*self.seen, *listed} - members.keys() - mirror.left.keys()
        if mirror.stop is None:
            silent |= {member for member in listed & mirror.left.keys() if self._returns(mirror.left[member])}
        self._absent_since = {member: self._absent_since.get(member, now) for member in silent}
        return {*members, *(member for member, since in self._absent_since.items() if now < since + self._return_s)}

    def _returns(self, record: LeftRecord) -> bool:
        """Whether the agent of a member whose worker has stopped itself is about to register again, by another name."""
        return record.outcome == "evicted" or (record.outcome == "fatal" and self._restarts)


def await_end(
    options: MemberOptions, own: Container[int], pause: Callable[[float], bool], quiet: bool, departed: bool
) -> int | None:
    """Waits until no member of the job is left.

    Args:
        options: of the launcher's members.
        own: slots of the launcher.
        pause: waits for so many seconds, attending to whatever else is to be done; false: wait no longer.
        quiet: do not say what is waited for.
        departed: members that have left before count as well.

    Returns:
        The job's exit code; ``None`` if none had joined, or if they are still there.
    """
    give_up_at = time.monotonic() + _UNKNOWN_S
    joined, told = JoinedMembers(options, own), quiet
    with launchers_store(options, _STORE_TIMEOUT_S) as store:
        while True:
            try:
                mirror = Mirror(store.get_prefix(""))
            except StoreError as error:
                refused = not isinstance(error, StoreUnavailable)
                if refused or (not joined.seen and time.monotonic() >= give_up_at):
                    logger.warning("cannot see whether members have joined that go on: %s", error)
                    return None
            else:
                left = joined.look(mirror, time.monotonic())
                if departed:
                    joined.seen.update(mirror.left)
                if not left or not joined.seen:
                    return exit_code(mirror) if joined.seen else None
                if not told:
                    told = True
                    logger.warning(
                        "all members that were started here are gone, but %s have joined and go on: the job and its "
                        "etcd stay until they end",
                        ", ".join(sorted(joined.seen)),
                    )
            if not pause(_POLL_S):
                if joined.seen:
                    logger.warning("members that have joined may still be there: %s", ", ".join(sorted(joined.seen)))
                return None


def tell_to_stop(options: MemberOptions, signum: int, told: str) -> None:
    """Has all members end, those that are about to join included, since ``told`` has got the signal."""
    record = StopRecord(code=128 + signum, reason=f"{signal.Signals(signum).name} of {told}", by="")
    try:
        with launchers_store(options, _STORE_TIMEOUT_S) as store:
            put_once(store, Keys.STOP, record.to_json())
    except StoreError as error:
        logger.error("cannot tell members that have joined that the job ends: %s", error)
