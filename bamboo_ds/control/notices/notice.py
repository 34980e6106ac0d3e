"""Notices, and the seam behind which the clouds differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import aiohttp

NoticeKind = Literal["preempt", "rebalance", "maintenance", "device", "leave"]


@dataclass(frozen=True)
class Notice:
    """An announcement of what will happen to this node.

    Attributes:
        kind: ``preempt`` (the cloud takes the node away), ``rebalance`` (it has become likely that it will),
            ``maintenance`` (the host is serviced), ``device`` (the worker's device fails), ``leave`` (somebody asks the
            member to leave).
        source: name of the source that it came from.
        detail: what the source said, for the log.
        deadline_s: seconds from the receipt of the notice until the node vanishes (pauses, where
            ``vanishes`` is false); ``None`` where unknown.
        vanishes: false where the node only pauses for a while (live migration, freeze), is merely at risk (rebalance),
            or the device goes on.
        key: tells a source's notices apart; the deadline does not, because it counts down.
    """

    kind: NoticeKind
    source: str
    detail: str
    deadline_s: float | None
    vanishes: bool = True
    key: str = ""


class NoticeSource(ABC):
    """A source of notices. All calls are made on one event loop, one at a time.

    Attributes:
        name: unique among the sources of a watcher; what :attr:`Notice.source` says.
        where: the URL or path that is asked, for the log.
    """

    name: str
    where: str

    def check(self) -> None:  # noqa: B027
        """Raises :class:`ConfigError` if it cannot be asked on this host, as far as that is known before a question."""

    @abstractmethod
    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        """The most urgent notice that stands, every time again until it is withdrawn, or ``None``.

        May take its time: other sources do not wait for this one.

        Raises:
            SourceError: the source does not answer, or not as its protocol demands.
        """

    async def acknowledge(self, session: aiohttp.ClientSession, notice: Notice) -> bool:
        """Tells the source that this node has been left and need not be spared any longer.

        Returns whether the source was told: false where it takes no such message, as most do.

        Raises:
            SourceError: as :meth:`poll`.
        """
        return False


def seconds_until(when: datetime, now: datetime) -> float:
    """Seconds from ``now`` to ``when``, 0 if that has passed."""
    return max(0.0, (when - now).total_seconds())
