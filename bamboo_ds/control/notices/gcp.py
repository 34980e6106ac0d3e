"""Google Cloud: preemption and host maintenance, from the metadata server.

The server can hold an answer back until a value changes, so news arrives within milliseconds at a few
requests per minute. https://cloud.google.com/compute/docs/metadata/querying-metadata#waitforchange
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .notice import Notice, NoticeSource
from .transport import ANSWER_TIMEOUT_S, Answer, SourceBroken, SourceError, request

if TYPE_CHECKING:
    import aiohttp

#: By address: the name ``metadata.google.internal`` would need a resolver.
GCP_URL = "http://169.254.169.254"

_PREEMPTED = "preempted"
_MAINTENANCE = "maintenance-event"
_KEYS = (_PREEMPTED, _MAINTENANCE)
_FLAVOR = {"Metadata-Flavor": "Google"}

#: Seconds between the notice of a preemption and the end of power.
_PREEMPTION_S = 30.0
#: The shortest time between a maintenance event's notice and its begin, in seconds; with GPUs it is longer.
_MAINTENANCE_S = 60.0
#: Seconds that the server is asked to hold an answer back for.
_WAIT_S = 10

_MEANINGS: dict[str, dict[str, Notice | None]] = {
    _PREEMPTED: {
        "TRUE": Notice("preempt", "gcp", "the instance is preempted", _PREEMPTION_S, key=_PREEMPTED),
        "FALSE": None,
    },
    _MAINTENANCE: {
        "TERMINATE_ON_HOST_MAINTENANCE": Notice(
            "maintenance", "gcp", "the instance ends for host maintenance", _MAINTENANCE_S, key="terminate"
        ),
        "MIGRATE_ON_HOST_MAINTENANCE": Notice(
            "maintenance", "gcp", "the instance migrates to another host", _MAINTENANCE_S, vanishes=False, key="migrate"
        ),
        "NONE": None,
    },
}


class GcpSource(NoticeSource):
    """Asks the metadata server of a Compute Engine instance.

    The first :meth:`poll` returns at once, later ones when something has changed or after ``_WAIT_S``
    seconds. A server that does not offer that (no ``ETag``, or 400) is asked plainly.

    Args:
        base_url: URL of the server, without a path.
    """

    name = "gcp"

    def __init__(self, base_url: str = GCP_URL) -> None:
        self.where = base_url
        self._can_wait = True
        self._etags: dict[str, str] = {}
        self._notices: dict[str, Notice | None] = {}

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        waiting = self._can_wait and len(self._etags) == len(_KEYS)
        tasks = [asyncio.create_task(self._read(session, key, waiting)) for key in _KEYS]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED if waiting else asyncio.ALL_COMPLETED)
        finally:
            # What changes while nobody waits is not lost: the ETag then differs at the next poll.
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        faults = [end for end in ended if isinstance(end, SourceError)]
        if faults:
            self._etags.clear()
        # A preemption that one request has found out is told even where the other one failed.
        notice = next((self._notices[key] for key in _KEYS if self._notices.get(key) is not None), None)
        if notice is None or notice.kind != "preempt":
            for end in ended:
                if isinstance(end, Exception):
                    raise end
        return notice

    async def _read(self, session: aiohttp.ClientSession, key: str, waiting: bool) -> None:
        """Read the value of ``key``, ``waiting`` for it to differ from what was read last."""
        answer = await self._get(session, key, waiting)
        if waiting and answer.status == 400:
            self._can_wait = False
            answer = await self._get(session, key, waiting=False)
        answer.expect(200)
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise SourceBroken(f"{answer.url} did not come from Google's metadata server")
        meanings = _MEANINGS[key]
        if answer.text not in meanings:
            raise SourceBroken(f"{answer.url} is {answer.text[:80]!r}; known values: {', '.join(meanings)}")
        self._notices[key] = meanings[answer.text]
        etag = answer.headers.get("ETag")
        if etag:
            self._etags[key] = etag
        else:
            self._etags.pop(key, None)

    async def _get(self, session: aiohttp.ClientSession, key: str, waiting: bool) -> Answer:
        url = f"{self.where}/computeMetadata/v1/instance/{key}"
        if not waiting:
            return await request(session, "GET", url, headers=_FLAVOR)
        change = {"wait_for_change": "true", "last_etag": self._etags[key], "timeout_sec": str(_WAIT_S)}
        timeout_s = _WAIT_S + ANSWER_TIMEOUT_S
        return await request(session, "GET", url, headers=_FLAVOR, params=change, timeout_s=timeout_s)
