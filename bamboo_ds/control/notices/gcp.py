"""Google Cloud: preemption and host maintenance, from the metadata server.

https://cloud.google.com/compute/docs/metadata/querying-metadata
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .notice import Notice, NoticeSource
from .transport import SourceBroken, request

if TYPE_CHECKING:
    import aiohttp

#: By address: the name ``metadata.google.internal`` would need a resolver.
GCP_URL = "http://169.254.169.254"

_FLAVOR = {"Metadata-Flavor": "Google"}

#: Seconds between the notice of a preemption and the end of power.
_PREEMPTION_S = 30.0
#: The shortest time between a maintenance event's notice and its begin, in seconds; with GPUs it is longer.
_MAINTENANCE_S = 60.0

#: By key, the more urgent one first.
_MEANINGS: dict[str, dict[str, Notice | None]] = {
    "preempted": {
        "TRUE": Notice("preempt", "gcp", "the instance is preempted", _PREEMPTION_S, key="preempted"),
        "FALSE": None,
    },
    "maintenance-event": {
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

    Args:
        base_url: URL of the server, without a path.
    """

    name = "gcp"

    def __init__(self, base_url: str = GCP_URL) -> None:
        self.where = base_url

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        for key, meanings in _MEANINGS.items():
            url = f"{self.where}/computeMetadata/v1/instance/{key}"
            answer = (await request(session, "GET", url, headers=_FLAVOR)).expect(200)
            if answer.headers.get("Metadata-Flavor") != "Google":
                raise SourceBroken(f"{answer.url} did not come from Google's metadata server")
            if answer.text not in meanings:
                raise SourceBroken(f"{answer.url} is {answer.text[:80]!r}; known values: {', '.join(meanings)}")
            notice = meanings[answer.text]
            if notice is not None:
                return notice
        return None
