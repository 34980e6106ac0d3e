"""Copies between the device of DeepSpeed's accelerator and host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import staging
from .accelerators import HOST, accelerator, event, page_locked
from .staging import StreamMark


class AcceleratorStreams:
    """See :class:`~bamboo_ds.devices.staging.Streams`: a stream of the accelerator for each direction."""

    def __init__(self) -> None:
        self._accelerator = accelerator()
        self._out, self._in = self._accelerator.Stream(), self._accelerator.Stream()

    def carries(self, tensor: torch.Tensor) -> bool:
        """See :class:`~bamboo_ds.devices.staging.Streams`."""
        return tensor.device.type != HOST.type

    def memory(self, size: int) -> torch.Tensor:
        """Page-locked."""
        return page_locked(size)

    def copy_out(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> StreamMark:
        """See :class:`~bamboo_ds.devices.staging.Streams`."""
        self._out.wait_stream(self._accelerator.current_stream())
        with self._accelerator.stream(self._out):
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        return self._mark(self._out)

    def copy_in(
        self, sources: Sequence[torch.Tensor], after: StreamMark | None
    ) -> tuple[list[torch.Tensor], StreamMark]:
        """See :class:`~bamboo_ds.devices.staging.Streams`."""
        device = self._accelerator.current_device_name()
        if after is not None:
            self._in.wait_event(after)
        with self._accelerator.stream(self._in):
            found = [source.to(device, non_blocking=True) for source in sources]
        for each in found:
            each.record_stream(self._accelerator.current_stream())  # the memory is the in-stream's
        return found, self._mark(self._in)

    def order(self, mark: StreamMark) -> None:
        """See :class:`~bamboo_ds.devices.staging.Streams`."""
        self._accelerator.current_stream().wait_event(mark)

    def mark(self) -> StreamMark:
        """See :class:`~bamboo_ds.devices.staging.Streams`."""
        return self._mark(self._accelerator.current_stream(), enable_timing=True)

    def seconds(self, begin: Any, end: StreamMark) -> float:
        """See :class:`~bamboo_ds.devices.staging.Streams`."""
        return float(begin.elapsed_time(end)) / 1000

    def _mark(self, stream: Any, **options: bool) -> StreamMark:
        mark: StreamMark = stream.record_event(event(**options))
        return mark


def use_accelerator() -> None:
    """Has tensors of this process's device, if it has one, go and come by streams of their own. Idempotent."""
    if staging.current() is None and accelerator().device_name() != HOST.type:
        staging.use(AcceleratorStreams())
