"""Azure: Scheduled Events of the instance metadata service, and their acknowledgement.

https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

from __future__ import annotations

import logging
import math
from datetime import datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field, field_validator

from .notice import Notice, NoticeKind, NoticeSource, seconds_until
from .transport import ANSWER_TIMEOUT_S, SourceBroken, http_date, request

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger("bamboo_ds.control.notices.azure")

AZURE_URL = "http://169.254.169.254"

_EVENTS = "/metadata/scheduledevents"
_EVENTS_VERSION = {"api-version": "2020-07-01"}
_NAME = "/metadata/instance/compute/name"
_NAME_VERSION = {"api-version": "2021-02-01", "format": "text"}
_HEADERS = {"Metadata": "true"}
#: The first request for events switches the service on for this machine, which takes up to two minutes.
_FIRST_ANSWER_S = 150.0

_PREEMPTIONS = ("Preempt", "Terminate")
#: Event types after which the machine goes on where it was.
_PAUSES = ("Freeze",)


class _Event(BaseModel):
    id: str = Field(alias="EventId", min_length=1)
    type: str = Field(alias="EventType")
    resources: list[str] = Field(alias="Resources", default_factory=list)
    status: str = Field(alias="EventStatus", default="Scheduled")
    #: Empty once the event has started.
    not_before: datetime | None = Field(alias="NotBefore", default=None)
    description: str | None = Field(alias="Description", default=None)

    @field_validator("not_before", mode="before")
    @classmethod
    def _http_date(cls, value: object) -> datetime | None:
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            raise ValueError("not a date")
        return http_date(value)

    def names(self, machine: str) -> bool:
        """Whether it will happen to ``machine``."""
        return machine.casefold() in (name.casefold() for name in self.resources)

    def notice(self, source: str, now: datetime) -> Notice:
        """The notice for a machine that the event names."""
        kind: NoticeKind = "preempt" if self.type in _PREEMPTIONS else "maintenance"
        started = self.not_before is None or self.status == "Started"
        if started or self.not_before is None:
            left_s, begin = 0.0, "now"
        else:
            left_s, begin = seconds_until(self.not_before, now), f"not before {self.not_before.isoformat()}"
        what = f"scheduled event {self.id}: {self.type} {begin}"
        detail = f"{what} ({self.description})" if self.description else what
        return Notice(kind, source, detail, left_s, vanishes=self.type not in _PAUSES, key=what)


class _Document(BaseModel):
    events: list[_Event] = Field(alias="Events")


class AzureSource(NoticeSource):
    """Asks the metadata service of an Azure virtual machine.

    A changed ``NotBefore``, and the start of an event, make a new notice of it.

    Args:
        base_url: URL of the service, without a path.
    """

    name = "azure"

    def __init__(self, base_url: str = AZURE_URL) -> None:
        self.where = base_url
        self._machine: str | None = None
        self._answered = False
        self._events: dict[str, _Event] = {}
        self._acknowledged: set[str] = set()  # their ids

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        if self._machine is None:
            self._machine = await self._fetch_name(session)
        answer = await request(
            session,
            "GET",
            self.where + _EVENTS,
            headers=_HEADERS,
            params=_EVENTS_VERSION,
            timeout_s=ANSWER_TIMEOUT_S if self._answered else _FIRST_ANSWER_S,
        )
        document = answer.expect(200).parse(_Document)
        self._answered = True
        now = answer.now
        mine = [(event, event.notice(self.name, now)) for event in document.events]
        mine = [(event, notice) for event, notice in mine if event.names(self._machine)]
        self._events.update({notice.key: event for event, notice in mine})
        return min((notice for _, notice in mine), key=_urgency, default=None)

    async def acknowledge(self, session: aiohttp.ClientSession, notice: Notice) -> bool:
        """Lets the event begin. Call it when nothing on this machine is worth sparing any more.

        An event that names other machines too is not acknowledged: it would begin for all of them.
        """
        event = self._events.get(notice.key)
        if event is None:
            return False
        if len(event.resources) > 1:
            logger.info("event %s is not acknowledged: it names %s", event.id, ", ".join(event.resources))
            return False
        if event.id in self._acknowledged:  # for another notice of it
            return True
        answer = await request(
            session,
            "POST",
            self.where + _EVENTS,
            headers=_HEADERS,
            params=_EVENTS_VERSION,
            json={"StartRequests": [{"EventId": event.id}]},
        )
        answer.expect(200, 202, 204)
        self._acknowledged.add(event.id)
        return True

    async def _fetch_name(self, session: aiohttp.ClientSession) -> str:
        answer = await request(session, "GET", self.where + _NAME, headers=_HEADERS, params=_NAME_VERSION)
        name = answer.expect(200).text
        if not name:
            raise SourceBroken(f"{answer.url} answered no name for this machine")
        return name


def _urgency(notice: Notice) -> tuple[bool, float]:
    return not notice.vanishes, math.inf if notice.deadline_s is None else notice.deadline_s
