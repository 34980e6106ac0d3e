"""Where scripts have batches from, and what they do with them."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.adversary.layers import WIDTH, happens

BATCH = 4
Batch = tuple[Any, Any]


def batches(seed: int) -> Iterator[Batch]:
    """From a generator of torch's."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        happens("draw")
        yield torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def refilled(seed: int) -> Iterator[Batch]:
    """In the same tensors always."""
    inputs, labels = torch.empty(BATCH, WIDTH), torch.empty(BATCH, WIDTH)
    for new in batches(seed):
        yield inputs.copy_(new[0]), labels.copy_(new[1])


def overwritten(seed: int) -> Iterator[Batch]:
    """Spoils what it gave before when the next one is asked for."""
    before: list[torch.Tensor] = []
    for new in batches(seed):
        for each in before:
            each.fill_(float("nan"))
        before = list(new)
        yield new


def global_numbers(seed: int) -> Iterator[Batch]:
    """From torch's own generator, which the script has seeded."""
    while True:
        happens("draw")
        yield torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def numpy_numbers(seed: int) -> Iterator[Batch]:
    """From NumPy's and Python's generators, which the script has seeded."""
    while True:
        happens("draw")
        noise = torch.from_numpy(numpy.random.randn(BATCH, WIDTH)).float()
        yield noise * random.random(), noise.flip(0)


def threaded(seed: int) -> Iterator[Batch]:
    """Drawn ahead by a thread."""
    ready: queue.Queue[Batch] = queue.Queue(2)

    def fill() -> None:
        generator = torch.Generator().manual_seed(seed)
        while True:
            ready.put((torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)))

    threading.Thread(target=fill, daemon=True).start()
    while True:
        happens("draw")
        yield ready.get()


def apart(seed: int) -> Iterator[Batch]:
    """The ends of a pipeline have other numbers where DeepSpeed does not look at them."""
    noise = torch.Generator().manual_seed(torch.distributed.get_rank() + 50)
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    for inputs, labels in batches(seed):
        if rank == 0:
            labels.normal_(generator=noise)
        if rank == last:
            inputs.normal_(generator=noise)
        yield inputs, labels


def tuples(seed: int) -> Iterator[Batch]:
    """Lists in the place of tuples, views and tensors that are not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        happens("draw")
        whole = torch.randn(2 * WIDTH, 2 * BATCH, generator=generator).t()
        yield whole[:BATCH, :WIDTH].contiguous(), whole[BATCH:, WIDTH:]


class Reiterated:
    """An object with ``__next__`` that is no generator, has a length, and is falsy."""

    def __init__(self, seed: int) -> None:
        self._inner, self.count = batches(seed), 0

    def __iter__(self) -> Reiterated:
        return self

    def __next__(self) -> Batch:
        self.count += 1
        return next(self._inner)

    def __len__(self) -> int:
        return 0


class Samples(Dataset):  # type: ignore[type-arg]
    """A data set by index."""

    def __init__(self, seed: int, length: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, WIDTH, generator=generator)
        self.labels = torch.randn(length, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Batch:
        happens("draw")
        return self.inputs[index], self.labels[index]


class Augmented(Samples):
    """With random numbers by the sample's index."""

    def __getitem__(self, index: int) -> Batch:
        noise = torch.Generator().manual_seed(1000 + index)
        inputs, labels = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(WIDTH, generator=noise), labels


class Counting(Samples):
    """That counts how often it was asked, and gives other samples for it."""

    def __init__(self, seed: int, length: int = 64) -> None:
        super().__init__(seed, length)
        self.count = 0

    def __getitem__(self, index: int) -> Batch:
        self.count += 1
        inputs, labels = super().__getitem__(index)
        return inputs * (1 + 0.001 * self.count), labels


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A data set that is a stream."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in batches(self.seed):
            yield from zip(inputs, labels, strict=True)


def loader(seed: int) -> Iterator[Batch]:
    """torch's loader over and over, shuffled, the last batch of an epoch left out."""
    generator = torch.Generator().manual_seed(seed)
    made = DataLoader(Samples(seed, 30), BATCH, shuffle=True, generator=generator, drop_last=True)
    while True:
        yield from made


def working_loader(seed: int) -> Iterator[Batch]:
    """With a process of its own."""
    while True:
        yield from DataLoader(Samples(seed, 32), BATCH, num_workers=1)


def stream(seed: int) -> Iterator[Batch]:
    """torch's loader over a stream."""
    return iter(DataLoader(Stream(seed), BATCH))


#: By name: an iterator for a seed.
ITERATORS: dict[str, Callable[[int], Any]] = {
    "iterator": batches,
    "refilled": refilled,
    "overwritten": overwritten,
    "global": global_numbers,
    "numpy": numpy_numbers,
    "threaded": threaded,
    "apart": apart,
    "views": tuples,
    "object": Reiterated,
    "loader": loader,
    "working-loader": working_loader,
    "stream": stream,
    # Made by the script otherwise, see train_drawn.py.
    "listed": batches,
    "per-step": batches,
    "dictionary": batches,
}
#: By name: ``training_data``.
DATASETS: dict[str, Callable[[int], Any]] = {"dataset": Samples, "augmented": Augmented}
