"""All that shows one job to users: what is known of it, the web server."""

from __future__ import annotations

from ...addresses import split_address
from ...secret import SETTING
from ..settings import AgentSettings
from .access import Access
from .feed import Feed
from .server import Change, WebServer


class Site:
    """Made, and made to listen, by a thread of its own: importing what it needs and reading takes its time.

    Attributes:
        feed: what is known of the job.
        url: ``None`` before :meth:`listen`, or where no page is wanted.
    """

    def __init__(self, settings: AgentSettings, change: Change | None) -> None:
        self._settings, self._change = settings, change
        self.feed = Feed(settings.job, settings.events)
        self._server: WebServer | None = None

    @property
    def url(self) -> str | None:
        """Where it listens; of all addresses that which other members know."""
        if self._server is None or not self._server.alive:
            return None
        own = f"//[{self._settings.address}]:" if ":" in self._settings.address else f"//{self._settings.address}:"
        return self._server.url.replace("//0.0.0.0:", own).replace("//[::]:", own)

    def listen(self) -> None:
        """Serve the page, if one is wanted. Idempotent.

        Raises:
            OSError: cannot listen at the address; the message names the setting.
        """
        address, job, secret = self._settings.bamboo.observe.http, self._settings.job, self._settings.secret
        if address is None or self.url is not None:
            return
        if not secret:
            raise OSError(f'"bamboo.observe.http" has no effect: the job has no secret to tell users by; set {SETTING}')
        host, port = split_address(address)
        access = Access(secret, job)
        try:
            self._server = WebServer(self.feed, access, job, host or self._settings.address, port, self._change)
        except OSError as error:
            what = f'cannot serve the page of the job at "bamboo.observe.http" = {address!r}, trying on'
            raise OSError(f"{what}: {error}") from error

    def close(self, timeout_s: float) -> None:
        """End; wait up to ``timeout_s`` seconds for that in all. Idempotent."""
        if self._server is not None:
            self._server.close(timeout_s)
