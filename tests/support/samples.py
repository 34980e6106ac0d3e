"""The data of test jobs, for their scripts and for tests that compute what a job must have consumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

HIDDEN, CLASSES = 16, 10


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Deterministic samples that note their index when they are read."""

    def __init__(self, size: int, model: str, ledger: Path | None) -> None:
        self.size, self.model, self.ledger = size, model, ledger

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        if self.ledger is not None:
            with open(self.ledger, "a") as file:
                file.write(f"{index}\n")
        generator = torch.Generator().manual_seed(1000 + index)
        x = torch.randn(HIDDEN, generator=generator)
        label = torch.randint(0, CLASSES, (), generator=generator)
        if self.model == "tuple":
            y = torch.randn(HIDDEN, generator=generator)
            return (x, y, label.clone(), label % 2 == 0), label
        return x, label


def iterator(
    pipeline: int = 0, pipelines: int = 1, batch: int = 4, ledger: Path | None = None, model: str = "mlp"
) -> Any:
    """Micro-batches of one pipeline: pipeline d reads the samples with index = d modulo D."""
    data = Samples(1 << 20, model, ledger)
    index = pipeline
    while True:
        samples = []
        for _ in range(batch):
            samples.append(data[index])
            index += pipelines
        inputs, labels = torch.utils.data.default_collate(samples)
        yield (tuple(inputs) if isinstance(inputs, list) else inputs), labels
