"""Pretraining of a small GPT as Megatron-DeepSpeed does it; runs with and without bamboo.

The embedding is tied to the head. Activations are ``[sequence, batch, hidden]`` and travel with a boolean attention
mask (true: not to be seen). Attention dropout draws from DeepSpeed's tracker of random number states.

train_gpt.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import set_random_seed
from job_script import begin, draws, dump, initialize, options, steps
from sample_scheduler import SampleScheduler
from torch import nn
from torch.utils.data import default_collate

VOCABULARY, SEQUENCE, HIDDEN, HEADS = 32, 8, 16, 2
END_OF_DOCUMENT = 0


#: Of this process; Megatron keeps it as a global.
_tensor_group: Any = None


@dataclass
class Mpu:
    """Megatron's ``parallel_state`` of one process, as far as DeepSpeed asks it; there are no tensor slices."""

    stages: int
    pipelines: int

    def get_tensor_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_group(self) -> Any:
        return _tensor_group

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank() % self.pipelines

    def get_data_parallel_world_size(self) -> int:
        return self.pipelines

    def get_pipeline_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank() // self.pipelines


class EmbeddingPipe(nn.Module):
    """Tokens, their positions and the mask to activations and mask."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(SEQUENCE, HIDDEN)
        self.embedding_dropout = nn.Dropout(dropout)

    @property
    def word_embeddings_weight(self) -> torch.Tensor:
        return self.word_embeddings.weight

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, positions, mask = inputs
        embedded = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return self.embedding_dropout(embedded.transpose(0, 1).contiguous()), mask


class ParallelTransformerLayerPipe(nn.Module):
    """One layer on (activations, mask)."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attention_dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.dense_h_to_4h = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.dense_4h_to_h = nn.Linear(4 * HIDDEN, HIDDEN)
        self.hidden_dropout = nn.Dropout(dropout)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = inputs
        x = x + self.hidden_dropout(self.dense(self.attention(self.input_layernorm(x), mask)))
        h = nn.functional.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x)))
        return x + self.hidden_dropout(self.dense_4h_to_h(h)), mask

    def attention(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length, batch, _ = x.shape
        heads = self.query_key_value(x).view(length, batch, HEADS, 3 * HIDDEN // HEADS).permute(1, 2, 0, 3)
        query, key, value = heads.chunk(3, dim=-1)
        scores = query @ key.transpose(-1, -2) / (HIDDEN // HEADS) ** 0.5
        probabilities = scores.masked_fill(mask, -10000.0).softmax(dim=-1)
        tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
        if tracker.get_states():
            with tracker.fork():
                probabilities = self.attention_dropout(probabilities)
        else:
            probabilities = self.attention_dropout(probabilities)
        return (probabilities @ value).permute(2, 0, 1, 3).reshape(length, batch, HIDDEN)


def logits(embedding: EmbeddingPipe, x: torch.Tensor) -> torch.Tensor:
    """The head: the transposed embedding."""
    return nn.functional.linear(x, embedding.word_embeddings_weight)


def make_tensor_groups() -> None:
    """A group for each rank, as Megatron has them without tensor slices too."""
    global _tensor_group
    for rank in range(torch.distributed.get_world_size()):
        group = torch.distributed.new_group([rank])
        if rank == torch.distributed.get_rank():
            _tensor_group = group


def cross_entropy(output: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean over the tokens that count; communicates as Megatron's does."""
    targets, counts = labels
    greatest = output.detach().float().amax(-1, keepdim=True)
    torch.distributed.all_reduce(greatest, op=torch.distributed.ReduceOp.MAX, group=_tensor_group)
    logits = output.float() - greatest
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * counts.flatten()).sum() / counts.sum()


def seed_layer(seed: int) -> None:
    """For ``seed_layers``; DeepSpeed's own way refuses the integers of numpy that its partitioning makes of seeds."""
    set_random_seed(int(seed))


class GPTModelPipe(PipelineModule):
    """The pipeline; DeepSpeed knows the class by its name.

    Args:
        mpu: the process's place.
        layers: transformer layers.
        dropout: of the embedding, attention and hidden activations.
        tied: whether the head uses the embedding's weights.
        options: more for ``PipelineModule``.
    """

    def __init__(self, mpu: Mpu, layers: int, dropout: float, tied: bool = True, **options: Any) -> None:
        attribute = "word_embeddings_weight"
        if tied:
            embedding = TiedLayerSpec("embed", EmbeddingPipe, dropout, tied_weight_attr=attribute)
            head = TiedLayerSpec("embed", EmbeddingPipe, dropout, forward_fn=logits, tied_weight_attr=attribute)
        else:
            embedding = LayerSpec(EmbeddingPipe, dropout)
            head = LayerSpec(nn.Linear, HIDDEN, VOCABULARY, bias=False)
        super().__init__(
            [
                embedding,
                *(LayerSpec(ParallelTransformerLayerPipe, dropout) for _ in range(layers)),
                lambda x: x[0].transpose(0, 1).contiguous(),
                LayerSpec(nn.LayerNorm, HIDDEN),
                head,
            ],
            topology=PipeModelDataParallelTopology(num_pp=mpu.stages, num_mp=1, num_dp=mpu.pipelines),
            loss_fn=cross_entropy,
            partition_method="type:transformer",
            seed_fn=seed_layer,
            **options,
        )


def sample(index: int) -> dict[str, torch.Tensor]:
    """The text of one sample, a token longer than what the model sees."""
    generator = torch.Generator().manual_seed(5000 + index)
    return {"text": torch.randint(0, VOCABULARY, (SEQUENCE + 1,), generator=generator)}


def batch_fn(data: dict[str, torch.Tensor]) -> Any:
    """What a batch of texts is for the pipeline: ((tokens, positions, mask), (labels, which of them count))."""
    tokens, labels = data["text"][:, :-1].contiguous(), data["text"][:, 1:].contiguous()
    batch, length = tokens.shape
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    ends = tokens.eq(END_OF_DOCUMENT)
    mask = (future | ends[:, None, :]) & ~torch.eye(length, dtype=torch.bool)
    positions = torch.arange(length).expand(batch, length).contiguous()
    return (tokens, positions, mask[:, None]), (labels, (~ends).float())


def parse() -> argparse.Namespace:
    parser = options()
    parser.add_argument("--layers", type=int, default=None, help="transformer layers; one per stage")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--checkpoint-activations", type=int, default=0, help="layers to a checkpoint")
    parser.add_argument("--checkpointable", nargs="*", help="classes of layers that are checkpointed besides")
    parser.add_argument("--seed-layers", action="store_true")
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--load", type=Path, default=None, help="folder of checkpoints instead of the job's own")
    parser.add_argument("--tag", default=None, help="of the checkpoint to load; the newest")
    parser.add_argument("--describe", action="store_true", help="for DeepSpeed's converter: what is tied")
    parser.add_argument("--weights-only", action="store_true", help="load those alone")
    return parser.parse_args()


def samples(first: int, mpu: Mpu, size: int, ledger: Path | None) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of this pipeline from sample ``first`` on; the pipelines take turns."""
    index = first + mpu.get_data_parallel_rank() * size
    while True:
        if ledger is not None:
            with open(ledger, "a") as file:
                file.write("".join(f"{i}\n" for i in range(index, index + size)))
        yield default_collate([sample(i) for i in range(index, index + size)])
        index += mpu.pipelines * size


def weight_decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, biases and normalisations do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "wd_mult": 1.0},
        {"params": [p for p in trainable if p.dim() <= 1], "wd_mult": 0.0},
    ]


def initialise(arguments: argparse.Namespace) -> tuple[Mpu, GPTModelPipe]:
    """What Megatron does before it has an engine: places, seeds, activation checkpointing, the model."""
    begin()
    make_tensor_groups()
    mpu = Mpu(arguments.stages, torch.distributed.get_world_size() // arguments.stages)
    deepspeed.checkpointing.configure(mpu, deepspeed_config=arguments.deepspeed_config)
    seed = 1234 + 100 * mpu.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    if not arguments.seed_layers:
        deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed)
    model = GPTModelPipe(
        mpu,
        arguments.layers or arguments.stages,
        arguments.dropout,
        not arguments.untied,
        activation_checkpoint_interval=arguments.checkpoint_activations,
        checkpointable_layers=arguments.checkpointable,
        seed_layers=arguments.seed_layers,
    )
    return mpu, model


def main() -> None:
    arguments = parse()
    mpu, model = initialise(arguments)
    optimizer = torch.optim.AdamW(weight_decay_groups(model))
    scheduler = SampleScheduler(optimizer, 1000)
    engine, *_ = initialize(arguments, model=model, optimizer=optimizer, lr_scheduler=scheduler)
    engine.set_batch_fn(batch_fn)
    checkpoints = arguments.out / "checkpoints"
    folder, only = str(arguments.load or checkpoints), arguments.weights_only
    loaded, state = engine.load_checkpoint(folder, tag=arguments.tag, load_module_only=only)
    iteration, consumed_samples = (state["iteration"], state["consumed_samples"]) if loaded else (0, 0)
    ends = mpu.get_pipeline_model_parallel_rank() in (0, mpu.stages - 1)
    size = json.loads(Path(arguments.deepspeed_config).read_text())["train_micro_batch_size_per_gpu"]
    source = samples(consumed_samples, mpu, size, draws(arguments)) if ends else None
    losses, evaluations = [], []
    for done in steps(arguments, iteration):
        losses.append(float(engine.train_batch(data_iter=source)))
        iteration = done + 1
        consumed_samples += engine.train_batch_size()
        if arguments.evaluate_every and iteration % arguments.evaluate_every == 0:
            held_out = samples(1 << 20, mpu, size, None) if ends else None
            with torch.no_grad():
                evaluations.append(float(engine.eval_batch(held_out)))
        if arguments.save_every and iteration % arguments.save_every == 0:
            state = {"iteration": iteration, "consumed_samples": consumed_samples}
            if arguments.describe:
                info = {"pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\..*"]}
                state["universal_checkpoint_info"] = info
            engine.save_checkpoint(str(checkpoints), tag=f"step{iteration}", client_state=state)
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations, "pid": os.getpid()})


if __name__ == "__main__":
    main()
