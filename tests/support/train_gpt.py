"""Pretraining of :mod:`gpt` as Megatron-DeepSpeed does it; runs with and without bamboo.

train_gpt.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import deepspeed
import torch
from gpt import GPTModelPipe, Mpu, batch_fn, make_tensor_groups, sample
from job_script import begin, draws, dump, initialize, options, steps
from sample_scheduler import SampleScheduler
from torch.utils.data import default_collate


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
    loaded, state = engine.load_checkpoint(str(arguments.load or checkpoints), tag=arguments.tag)
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
            engine.save_checkpoint(str(checkpoints), tag=f"step{iteration}", client_state=state)
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations, "pid": os.getpid()})


if __name__ == "__main__":
    main()
