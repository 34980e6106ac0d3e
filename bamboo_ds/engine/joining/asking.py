"""What a member that joins asks the members of the job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...control.registry.records import PeerAddress
from ...errors import ProtocolError, TransferError
from ...state.fetch import fetch

if TYPE_CHECKING:
    from ...worker.job import Job

#: Seconds that one member may take to tell what the job has done before another one is asked, in rounds. The one that
#: is asked first may just have died, while the others wait for this member.
_ASK_TIMEOUTS_S = (0.5, 3.0, 10.0)


def asked(job: Job, sources: Sequence[PeerAddress], key: str) -> str:
    """What a member of the job answers to ``key``.

    Args:
        job: this process's job.
        sources: whom to ask; if there are none, any member.
        key: one of a state server's.

    Raises:
        ProtocolError: nobody answers.
    """
    failures = []
    for timeout_s in _ASK_TIMEOUTS_S:
        end = time.monotonic() + timeout_s
        for place in sources or job.channel.wait_peers(job.settings.recovery.plan_timeout_s):
            try:
                return fetch(place.url, key, token=place.token, timeout_s=timeout_s, secret=job.channel.secret)[0]
            except TransferError as error:
                failures.append(str(error))
        time.sleep(max(0.0, end - time.monotonic()))  # those that refuse may be on their way
    raise ProtocolError(f"no worker of the job tells what it has done: {'; '.join(failures)}")
