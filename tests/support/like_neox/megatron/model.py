"""The model, whose layers keep tables of positions in plain attributes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from . import NeoXArgs

Pair = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding(nn.Module):
    """Cosines and sines of the whole sequence, made in the constructor; neither buffers nor parameters."""

    def __init__(self, dim: int, sequence: int) -> None:
        super().__init__()
        frequencies = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", frequencies, persistent=False)
        angles = torch.outer(torch.arange(sequence).float(), frequencies)
        self.emb = torch.cat((angles, angles), dim=-1)
        self.cos_cached, self.sin_cached = self.emb.cos()[:, None, None], self.emb.sin()[:, None, None]
        self.max_seq_len = sequence

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: (length, batch, heads, dim)."""
        first, second = x.chunk(2, dim=-1)
        length = x.shape[0]
        return x * self.cos_cached[:length] + torch.cat((-second, first), dim=-1) * self.sin_cached[:length]


class AliBi(nn.Module):
    """A bias by distance, made in the first pass and kept, with its length, for the later ones."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.cached_matrix: torch.Tensor | None = None
        self.cached_seq_len: int | None = None
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1).float())

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        length = scores.shape[-1]
        if self.cached_seq_len is None or self.cached_seq_len < length:
            places = torch.arange(length)
            self.cached_matrix = -(places[:, None] - places).tril() * self.slopes[:, None, None]
            self.cached_seq_len = length
        assert self.cached_matrix is not None
        return scores + self.cached_matrix[:, :length, :length]


class EmbeddingPipe(nn.Module):
    def __init__(self, args: NeoXArgs) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(args.vocabulary, args.hidden_size)

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> Pair:
        tokens, _, mask = inputs
        return self.word_embeddings(tokens), mask


class ParallelTransformerLayerPipe(nn.Module):
    """One layer on ([length, batch, hidden], mask); attention and MLP side by side."""

    def __init__(self, neox_args: NeoXArgs, attention_mask_func: Any, layer_number: int) -> None:
        super().__init__()
        self.neox_args, self.attention_mask_func, self.layer_number = neox_args, attention_mask_func, layer_number
        hidden, self.heads = neox_args.hidden_size, neox_args.heads
        self.norm = nn.LayerNorm(hidden)
        self.query_key_value, self.dense = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        rotary = neox_args.pos_emb == "rotary"
        self.rotary_emb = RotaryEmbedding(hidden // self.heads, neox_args.sequence) if rotary else None
        self.alibi_embed = None if rotary else AliBi(self.heads)
        self.layer_past = None

    def forward(self, inputs: Pair) -> Pair:
        x, mask = inputs
        y = self.norm(x)
        return x + self.attention(y, mask) + self.mlp(y), mask

    def attention(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length, batch, hidden = x.shape
        query, key, value = self.query_key_value(x).view(length, batch, self.heads, -1).chunk(3, dim=-1)
        if self.rotary_emb is not None:
            query, key = self.rotary_emb.turn(query), self.rotary_emb.turn(key)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        scores = query @ key.transpose(-1, -2) / (hidden // self.heads) ** 0.5
        if self.alibi_embed is not None:
            scores = self.alibi_embed(scores)
        seen = self.attention_mask_func(scores, mask).softmax(dim=-1) @ value
        return self.dense(seen.permute(2, 0, 1, 3).reshape(length, batch, hidden))


def mask_scores(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(mask, torch.finfo(scores.dtype).min)


def cross_entropy(output: torch.Tensor, labels: Pair, _fp16: bool = False) -> torch.Tensor:
    targets, counts = labels
    losses = nn.functional.cross_entropy(output.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counts.flatten()).sum() / counts.sum()


class GPT2ModelPipe(PipelineModule, nn.Module):
    """The pipeline; it has attributes before it is one."""

    def __init__(self, neox_args: NeoXArgs, topology: Any) -> None:
        self.neox_args, self.use_cache, self.__topology__ = neox_args, False, topology
        self.hidden_size = neox_args.hidden_size
        self.specs: list[Any] = []
        self.init_specs()
        super().__init__(
            layers=self.specs,
            loss_fn=partial(cross_entropy, _fp16=False),
            topology=topology,
            partition_method="type:transformer",
            checkpointable_layers=["ParallelTransformerLayerPipe"],
        )

    def init_specs(self) -> None:
        args = self.neox_args

        def logits(embedding: EmbeddingPipe, x: torch.Tensor) -> torch.Tensor:
            assert self.hidden_size == x.shape[-1]
            return nn.functional.linear(x, embedding.word_embeddings_weight)

        embedding: Any = LayerSpec(EmbeddingPipe, args)
        head: Any = LayerSpec(nn.Linear, args.hidden_size, args.vocabulary, bias=False)
        if args.tied:
            tie = {"tied_weight_attr": "word_embeddings_weight"}
            embedding = TiedLayerSpec("embed", EmbeddingPipe, args, **tie)
            head = TiedLayerSpec("embed", EmbeddingPipe, args, forward_fn=logits, **tie)
        layers = [
            LayerSpec(ParallelTransformerLayerPipe, args, attention_mask_func=mask_scores, layer_number=number)
            for number in range(args.stages)
        ]
        self.specs += [embedding, lambda x: (x[0].transpose(0, 1).contiguous(), *x[1:]), *layers]
        self.specs += [lambda x: x[0].transpose(0, 1).contiguous(), LayerSpec(nn.LayerNorm, args.hidden_size), head]
