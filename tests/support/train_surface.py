"""Uses what is public on the engine, between and during iterations; runs with and without bamboo.

train_surface.py --deepspeed_config FILE --out FOLDER --stages P

With DeepSpeed's curriculum learning (before 0.19.8) in the configuration: only steps, on sequences of its lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin, dump, initialize, joined, options
from torch import nn

HIDDEN, CLASSES = 8, 5


class Layer(nn.Module):
    """On (batch, length, hidden), whatever the length is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x) + x.mean(dim=1, keepdim=True))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(x.mean(dim=1))
        return logits


class Source:
    """Micro-batches of one pipeline, whose sequences have :attr:`length` elements."""

    def __init__(self, pipeline: int, size: int, seed: int) -> None:
        self.length = 4
        self._pipeline, self._size = pipeline, size
        self._seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self._seed * 100 + self._pipeline)
        self._seed += 1
        x = torch.randn(self._size, self.length, HIDDEN, generator=generator)
        return x, torch.randint(0, CLASSES, (self._size,), generator=generator)


def halved(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch function."""
    return batch[0] / 2, batch[1]


def follow_curriculum(engine: Any, source: Source | None) -> None:
    """Shorten the batches as Megatron-DeepSpeed does: to the length of the step, when they are drawn."""
    if source is not None:
        source.length = 8
    scheduler = engine.curriculum_scheduler_legacy
    engine.set_batch_fn(lambda batch: (batch[0][:, : scheduler.get_current_difficulty()], batch[1]))


class Observer:
    """Notes what a script can see of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.seen: list[Any] = []

    def note(self, *values: Any) -> None:
        engine = self._engine
        self.seen.append(
            {
                "values": values,
                "steps": (engine.global_steps, engine.global_samples, engine.skipped_steps),
                "sizes": (
                    engine.train_batch_size(),
                    engine.train_micro_batch_size_per_gpu(),
                    engine.gradient_accumulation_steps(),
                ),
                "lr": engine.get_lr(),
                "norm": None if engine.get_global_grad_norm() is None else float(engine.get_global_grad_norm()),
                "place": (engine.is_first_stage(), engine.is_last_stage(), engine.stage_id),
                "training": engine.module.training,
                "state": {name: value.clone() for name, value in engine.module.state_dict().items()},
                "parameters": [name for name, _ in engine.module.named_parameters()],
            }
        )


def main() -> None:
    arguments = options().parse_args()
    begin()
    net = PipelineModule(
        [*(LayerSpec(Layer) for _ in range(2 * arguments.stages - 1)), LayerSpec(Head)],
        num_stages=arguments.stages,
        loss_fn=nn.CrossEntropyLoss(),
        partition_method="uniform",
        dynamic_shape=True,
    )
    engine, *_ = initialize(arguments, model=net, model_parameters=list(net.parameters()))
    pipeline, pipelines = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    size = json.loads(Path(arguments.deepspeed_config).read_text())["train_micro_batch_size_per_gpu"]
    ends = engine.is_first_stage() or engine.is_last_stage()
    source = Source(pipeline, size, 0) if ends else None
    observer, losses = Observer(engine), []

    def train(steps: int) -> None:
        for _ in range(steps):
            losses.append(float(engine.train_batch(data_iter=source)))
        observer.note(losses[-steps:])

    def held_out() -> Source | None:
        return Source(pipeline, size, 1000) if ends else None

    if getattr(engine, "curriculum_enabled_legacy", bool)():
        follow_curriculum(engine, source)
        train(8)
        dump(engine, arguments, {"losses": losses, "seen": observer.seen, "evaluations": []})
        return
    train(2)
    observer.note(float(engine.eval_batch(held_out(), num_micro_batches=2)))
    loss, logits = engine.eval_batch(held_out(), return_logits=True)
    observer.note(float(loss), logits)
    observer.note(float(engine.eval_batch(held_out(), bcast_loss=False)))
    train(1)

    engine.set_train_batch_size(size * pipelines * 6)
    train(2)
    if source is not None:
        source.length = 7
    engine.reset_activation_shape()
    train(2)
    engine.set_batch_fn(halved)
    engine.set_has_attention_mask(False)
    train(1)
    engine.set_train_batch_size(size * pipelines * 3)
    train(2)
    dump(engine, arguments, {"losses": losses, "seen": observer.seen, "evaluations": []})


if __name__ == "__main__":
    assert not joined()
    main()
