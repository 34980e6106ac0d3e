"""The demo's training script: a byte-level GPT as a plain DeepSpeed pipeline job.

Nothing in it knows of bamboo: only the configuration decides whether it runs with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import deepspeed
import deepspeed.comm
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn
from torch.nn import functional

CONTEXT, WIDTH, HEADS, LAYERS, VOCABULARY = 64, 64, 4, 8, 256

# DeepSpeed would compile a CPU collective on first use; a demo must not need a compiler.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Embedding(nn.Module):
    """Bytes and positions to vectors: int64 (batch, context) -> float32 (batch, context, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class Logits(nn.Module):
    """Vectors to logits over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy per byte, in nats."""
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def batches(size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the text of Python's own documentation: int64, (size, context) each."""
    text = torch.frombuffer(bytearray("\n".join(topics[k] for k in sorted(topics)).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (size,), generator=generator)
        windows = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
        yield windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Trains; leaves the losses and a checkpoint in ``--out``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, required=True)
    parser = deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    layers = [LayerSpec(Embedding), *(LayerSpec(Block) for _ in range(LAYERS)), LayerSpec(Logits)]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=cross_entropy, partition_method="uniform")
    engine, *_ = deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()))
    ends = engine.is_first_stage() or engine.is_last_stage()
    data = batches(engine.train_micro_batch_size_per_gpu()) if ends else None
    losses = []
    for step in range(1, arguments.steps + 1):
        losses.append(float(engine.train_batch(data_iter=data)))
        if rank == 0:
            print(f"step {step} loss {losses[-1]}", flush=True)
    (arguments.out / f"losses-{rank}.json").write_text(json.dumps(losses))
    engine.save_checkpoint(str(arguments.out), tag="final")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
