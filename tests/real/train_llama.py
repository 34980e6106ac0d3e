"""A small Llama of transformers as a pipeline: masks, positions and their embeddings travel between its stages.

train_llama.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(sys.prefix, "transformers")))  # after everything that DeepSpeed has brought

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import dump, initialize, options, steps
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

SEQUENCE = 8


class EmbeddingPipe(nn.Module):
    """(tokens, which of them count) to what a layer takes."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        tokens, counts = inputs
        batch, length = tokens.shape
        x = self.embed_tokens(tokens)
        seen = torch.ones(length, length, dtype=torch.bool).tril() & counts[:, None, None, :].bool()
        mask = torch.zeros(batch, 1, length, length).masked_fill(~seen, torch.finfo(x.dtype).min)
        positions = torch.arange(length).expand(batch, length).contiguous()
        embeddings = (each.clone() for each in self.rotary_emb(x, positions))
        floats = [each.requires_grad_(torch.is_grad_enabled()) for each in (mask, *embeddings)]
        return x, positions, *floats


class DecoderLayerPipe(LlamaDecoderLayer):  # type: ignore[misc]
    """A layer of the model, on tuples."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, positions, mask, cos, sin = inputs
        out = super().forward(x, attention_mask=mask, position_ids=positions, position_embeddings=(cos, sin))
        return (out[0] if isinstance(out, tuple) else out), positions, mask, cos, sin


class HeadPipe(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.lm_head(self.norm(inputs[0]))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def batches(config: LlamaConfig, seed: int, size: int) -> Iterator[Any]:
    """Texts of several lengths, padded."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        tokens = torch.randint(0, config.vocab_size, (size, SEQUENCE), generator=generator)
        counts = torch.arange(SEQUENCE) < torch.randint(SEQUENCE // 2, SEQUENCE + 1, (size, 1), generator=generator)
        yield (tokens, counts.long()), tokens.masked_fill(~counts, -100)


def main() -> None:
    arguments = options().parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=arguments.stages,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=SEQUENCE, attn_implementation="eager",
    )  # fmt: skip
    decoders = [LayerSpec(DecoderLayerPipe, config, index) for index in range(config.num_hidden_layers)]
    layers = [LayerSpec(EmbeddingPipe, config), *decoders, LayerSpec(HeadPipe, config)]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=loss_of, partition_method="type:DecoderLayerPipe")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = initialize(arguments, model=net, optimizer=optimizer)
    ends, pipeline = engine.is_first_stage() or engine.is_last_stage(), engine.grid.data_parallel_id
    size = json.loads(Path(arguments.deepspeed_config).read_text())["train_micro_batch_size_per_gpu"]
    data = batches(config, pipeline, size) if ends else None
    losses, evaluations = [], []
    for done in steps(arguments):
        losses.append(float(engine.train_batch(data)))
        if done % 3 == 2:
            held_out = batches(config, 1000 + pipeline, size) if ends else None
            evaluations.append(float(engine.eval_batch(held_out)))
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations})


if __name__ == "__main__":
    main()
