"""Members of one process, each with a hub of its own, that reach each other over real sockets."""

from __future__ import annotations

from collections.abc import Sequence

from bamboo_ds.comm.hub import Hub
from bamboo_ds.comm.places import Listener
from bamboo_ds.secret import NONE, JobSecret


class Hubs(dict[str, Hub]):
    """The hub of each of ``names``."""

    def __init__(self, names: Sequence[str], secret: JobSecret = NONE, silence_s: float = 10.0) -> None:
        super().__init__({name: Hub(name, Listener.open("127.0.0.1"), secret, silence_s) for name in names})

    @property
    def places(self) -> tuple[str, ...]:
        """Of all, in their order."""
        return tuple(hub.place for hub in self.values())

    def close(self) -> None:
        """End all."""
        for hub in self.values():
            hub.close()
