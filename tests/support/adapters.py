"""A language model whose weights are frozen but for small adapters, its layers for a pipeline, and its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import nn

VOCABULARY, HIDDEN, RANK = 32, 16, 2


class Adapted(nn.Module):
    """A frozen linear layer and what is added to it, the product of two small matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN).requires_grad_(False)
        self.up, self.down = Adapted(nn.Linear(HIDDEN, 2 * HIDDEN)), nn.Linear(2 * HIDDEN, HIDDEN).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """All of it, which every rank has. Its parameters know what they are called in it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN).requires_grad_(False)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False).requires_grad_(False)
        for name, parameter in self.named_parameters():
            parameter.original_name = name  # type: ignore[attr-defined]

    def to_layer_specs(self) -> list[LayerSpec]:
        blocks = [LayerSpec(DecoderLayerPipe, self, block) for block in self.layers]
        return [LayerSpec(InputLayer, self), *blocks, LayerSpec(OutputLayer, self)]


class InputLayer(nn.Module):
    """(tokens, mask, labels) to (activations, mask, labels)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embed_tokens = model.embed_tokens

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens, mask, labels = inputs
        train = torch.is_grad_enabled()  # DeepSpeed wants a gradient of every number between stages
        return self.embed_tokens(tokens).requires_grad_(train), mask.clone().requires_grad_(train), labels


class DecoderLayerPipe(nn.Module):
    """A layer of the model, and the model in a list, which registers none of its parameters."""

    def __init__(self, model: Model, block: Block) -> None:
        super().__init__()
        self.pipeline_model, self.orig = [model], block

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, mask, labels = inputs
        assert len(self.pipeline_model[0].layers)
        return self.orig(x) * mask.unsqueeze(-1), mask, labels


class OutputLayer(nn.Module):
    """The loss itself, since the labels travel with the inputs."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm, self.lm_head = model.norm, model.lm_head

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, _, labels = inputs
        logits = self.lm_head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class PipelineDataLoader:
    """Micro-batches without end, one read ahead, whose sequences have the length of their batch.

    Attributes:
        epoch: of the data, from 1.
    """

    def __init__(self, batches: int, pieces: int, size: int, pipelines: int, pipeline: int, seed: int = 0) -> None:
        self.batches, self.pieces, self.size = batches, pieces, size
        self.pipelines, self.pipeline, self.seed = pipelines, pipeline, seed
        self.reset()

    def reset(self) -> None:
        self.epoch, self.num_batches_pulled, self._next = 1, 0, None
        self._data = self._pull()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return self.batches * self.pieces

    def __next__(self) -> Any:
        found = next(self._data) if self._next is None else self._next
        self._next = next(self._data, None)
        if self._next is None:
            self._data, self.num_batches_pulled = self._pull(), 0
            self._next = next(self._data)
            self.epoch += 1
        return found

    def _pull(self) -> Iterator[Any]:
        for batch in range(self.num_batches_pulled, self.batches):
            generator = torch.Generator().manual_seed(self.seed + batch * self.pipelines + self.pipeline)
            length = 4 + batch % 3
            tokens = torch.randint(0, VOCABULARY, (self.pieces * self.size, length), generator=generator)
            mask = (torch.arange(length) >= tokens[:, :1] % 2).float()
            self.num_batches_pulled += 1
            for piece in range(self.pieces):
                ours = slice(piece * self.size, (piece + 1) * self.size)
                labels = tokens[ours].masked_fill(mask[ours] == 0, -100)
                yield (tokens[ours].clone(), mask[ours], labels), None

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "num_batches_pulled": self.num_batches_pulled}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.num_batches_pulled = state["epoch"], state["num_batches_pulled"] - 1
        self._data, self._next = self._pull(), None

    def sync_epoch(self) -> None:
        """Ranks that draw nothing learn the epoch of those that do."""
        found: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(found, self.epoch)
        self.epoch = max(found)
