"""A store that outlives epochs, for torch.distributed to keep."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .epoch import Epoch
from .keyvalue import TorchStore


class EpochStore(TorchStore):
    """The store of the epoch that is current, as ``current`` tells. Its keys do not outlive the epoch.

    Every call raises ``EpochChanged`` when the epoch is aborted, also while it waits.
    """

    def __init__(self, current: Callable[[], Epoch]) -> None:
        super().__init__(None, "torch/")
        self._current = current

    def call(self, operation: str, timeout: timedelta | None = None, **fields: Any) -> Any:
        """See :meth:`Client.call`."""
        epoch = self._current()
        with epoch.life.calling("using the store", epoch.plan.store_host):
            return epoch.store("").call(operation, timeout, **fields)
