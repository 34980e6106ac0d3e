"""Batches of the ``training_data`` of ``deepspeed.initialize``, which every member can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from torch.utils.data import DistributedSampler


class _ResumedSampler(DistributedSampler):  # type: ignore[type-arg]
    """The sampler that DeepSpeed makes for a pipeline, without the first samples of its first pass."""

    def __init__(self, dataset: Any, pipelines: int, pipeline: int, skipped: int) -> None:
        super().__init__(dataset, num_replicas=pipelines, rank=pipeline, shuffle=False)
        self._skipped = skipped

    def __iter__(self) -> Iterator[int]:
        indices = list(super().__iter__())[self._skipped :]
        self._skipped = 0
        return iter(indices)


@dataclass
class _Stream:
    """An open loader of one pipeline and the number of the batch that it gives next."""

    loader: Iterator[Any]
    position: int


class Dataset:
    """Batches of every pipeline from the ``training_data`` that all members have.

    The contents of batch k of pipeline d depend on k and d only, so any member can read it.

    Args:
        pipelines: their number.
        batch_size: samples of a micro-batch.
        loader: makes DeepSpeed's loader with a sampler.
    """

    def __init__(self, data: Any, pipelines: int, batch_size: int, loader: Callable[[Any], Any]) -> None:
        self._data, self._pipelines, self._batch_size, self._loader = data, pipelines, batch_size, loader
        self._streams: dict[int, _Stream] = {}
        self._batches_per_pass: int | None = None

    def adopt(self, pipeline: int, loader: Iterator[Any]) -> None:
        """Uses a loader that exists already and has given nothing yet."""
        self._streams[pipeline] = _Stream(loader, 0)

    def batch(self, pipeline: int, position: int) -> Any:
        """Batch ``position`` of ``pipeline``, counted from the start of training; best asked for in order."""
        stream = self._streams.get(pipeline)
        if stream is None or stream.position != position:
            stream = self._streams[pipeline] = _Stream(self._open(pipeline, position), position)
        stream.position += 1
        return next(stream.loader)

    def samples_before(self, position: int) -> int:
        """Samples of all pipelines before batch ``position`` of each, over all passes over the dataset.

        Where the pipelines do not divide the dataset, the sampler completes a pass with its first samples. These count,
        and so do those at the end of a pass that the loader drops because they do not fill a batch.
        """
        if self._batches_per_pass is None:
            self._batches_per_pass = len(self._loader(_ResumedSampler(self._data, self._pipelines, 0, 0)))
        passes, batch = divmod(position, self._batches_per_pass)
        share = -(-len(self._data) // self._pipelines)
        return self._pipelines * (passes * share + min(batch * self._batch_size, share))

    def _open(self, pipeline: int, position: int) -> Iterator[Any]:
        with torch.random.fork_rng(devices=[]):  # a loader draws a seed for its workers
            passes = self._loader(_ResumedSampler(self._data, self._pipelines, pipeline, 0))
            skipped = position % len(passes) * self._batch_size
            return iter(RepeatingLoader(self._loader(_ResumedSampler(self._data, self._pipelines, pipeline, skipped))))
