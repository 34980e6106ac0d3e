"""A store that outlives epochs, for torch.distributed to keep."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from .c10d import Store, dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .session import Session


class EpochStore(dist.Store):  # type: ignore[misc]
    """Delegates to the store of the session's current epoch. Its keys do not outlive the epoch.

    Every call raises ``EpochChanged`` when the epoch is aborted, also while it waits. Keep a reference: torch's
    C++ side does not keep the Python object alive.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    def _call(self, operation: Callable[[Store], Any]) -> Any:
        epoch = self._session.current
        with epoch.calling("using the store", epoch.plan.store_host):
            return operation(epoch.store("torch/"))

    def set(self, key: str, value: str | bytes) -> None:
        """See ``torch.distributed.Store``."""
        self._call(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store``."""
        value: bytes = self._call(lambda store: store.get(key))
        return value

    def add(self, key: str, value: int) -> int:
        """See ``torch.distributed.Store``."""
        return int(self._call(lambda store: store.add(key, value)))

    def check(self, keys: list[str]) -> bool:
        """See ``torch.distributed.Store``."""
        return bool(self._call(lambda store: store.check(keys)))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """See ``torch.distributed.Store``."""
        value: bytes = self._call(lambda store: store.compare_set(key, expected_value, desired_value))
        return value

    def delete_key(self, key: str) -> bool:
        """See ``torch.distributed.Store``."""
        return bool(self._call(lambda store: store.delete_key(key)))

    def num_keys(self) -> int:
        """See ``torch.distributed.Store``."""
        return int(self._call(lambda store: store.num_keys()))

    # The names by which torch's C++ side looks for them.
    deleteKey = delete_key
    getNumKeys = num_keys

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See ``torch.distributed.Store``."""
        self._call(lambda store: store.wait(keys) if timeout is None else store.wait(keys, timeout))

    def set_timeout(self, timeout: timedelta) -> None:
        """The session's timeout applies."""
