"""Calls of a coordinator to its agent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...job_settings import JobSettings
from ...topology.plan import Plan
from ..messages import Contact
from ..registry.records import LeaveRecord, RestartRecord, StopRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Callbacks:
    """Calls that the agent wants; they come on the coordinator's thread, and must not block.

    Attributes:
        on_plan: a plan with a newer epoch.
        on_peers: members that can tell one that waits to be admitted what the job has done, with the places of
            their workers; again when it changes.
        on_stop: the job is to end.
        on_restart: workers are to be started again.
        on_leave: the member is asked to leave.
        on_evicted: plans that the member has not seen may have admitted and lost it.
        on_settings: the job's record was open, and is complete.
        on_contact: etcd has just said what its newest plan is; on the thread of the lease.
        on_error: the coordinator has ended by this error; the member cannot be kept.
        on_ended: the coordinator has ended, after the departure or by an error; always the last call.
    """

    on_plan: Callable[[Plan], None]
    on_peers: Callable[[tuple[tuple[str, str], ...]], None]
    on_stop: Callable[[StopRecord], None]
    on_error: Callable[[BaseException], None]
    on_ended: Callable[[], None]
    on_restart: Callable[[RestartRecord], None] = lambda record: None
    on_leave: Callable[[LeaveRecord], None] = lambda record: None
    on_evicted: Callable[[], None] = lambda: None
    on_contact: Callable[[Contact], None] = lambda contact: None
    on_settings: Callable[[JobSettings], None] = lambda settings: None


class News(Generic[T]):
    """Tells what was not told before.

    Args:
        tell: called with it.
        once: only the first; else whatever differs from what was told last.
        known: counts as told already.
    """

    def __init__(self, tell: Callable[[T], None], once: bool = False, known: T | None = None) -> None:
        self._tell, self._once, self._told = tell, once, known

    def tell(self, what: T) -> None:
        """Tells ``what``, which is so now."""
        if what != self._told and not (self._once and self._told is not None):
            self._told = what
            self._tell(what)
