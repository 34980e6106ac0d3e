"""Setting the engine up, training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from . import NeoXArgs, print_rank_0
from .checkpointing import load_checkpoint, save_checkpoint
from .learning_rates import AnnealingLR
from .model import GPT2ModelPipe
from .utils import Timers, count_parameters, reduce_losses

Batches = Iterator[dict[str, torch.Tensor]] | None


def get_batch_pipe(data: dict[str, torch.Tensor], neox_args: NeoXArgs) -> Any:
    """Texts to ((tokens, positions, mask), (labels, which of them count))."""
    tokens, labels = data["text"][:, :-1].contiguous(), data["text"][:, 1:].contiguous()
    batch, length = tokens.shape
    assert length <= neox_args.sequence
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    positions = torch.arange(length).expand(batch, length).contiguous()
    return (tokens, positions, mask), (labels, torch.ones(batch, length))


def param_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Biases and normalisations do not decay."""
    decay: dict[str, Any] = {"params": [p for p in model.parameters() if p.dim() > 1]}
    return [decay, {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]


def setup_model_and_optimizer(args: NeoXArgs) -> tuple[Any, Any]:
    pipelines = torch.distributed.get_world_size() // args.stages
    model = GPT2ModelPipe(args, PipeModelDataParallelTopology(num_pp=args.stages, num_mp=1, num_dp=pipelines))
    optimizer = torch.optim.AdamW(param_groups(model), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = AnnealingLR(optimizer, args.lr, args.min_lr, args.warmup_iters, args.decay_iters)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        args=args,
        lr_scheduler=scheduler,
        dist_init_required=False,
        model_parameters=None,
    )
    engine.total_params = count_parameters(engine.module)
    print_rank_0(f" > total params: {engine.total_params}")
    engine.set_has_attention_mask(True)
    engine.set_batch_fn(partial(get_batch_pipe, neox_args=args))
    args.iteration = load_checkpoint(args, engine)
    scheduler.optimizer = engine.optimizer
    return engine, scheduler


def evaluate(args: NeoXArgs, engine: Any, batches: Batches) -> float:
    engine.eval()
    with torch.no_grad():
        losses = [engine.eval_batch(batches) for _ in range(args.eval_iters)]
    engine.train()
    return float(reduce_losses(losses).mean())


def train(
    args: NeoXArgs,
    engine: Any,
    batches: Batches,
    held_out: Callable[[], Batches],
    goes_on: Callable[[int], bool],
) -> tuple[list[float], list[float]]:
    """Losses and evaluations; a checkpoint every second iteration, an evaluation every third."""
    timers, losses, evaluations = Timers(), [], []
    engine.train()
    while goes_on(args.iteration):
        timers.start("interval time")
        losses.append(float(engine.train_batch(data_iter=batches)))
        timers.stop("interval time")
        args.iteration += 1
        rate = engine.optimizer.param_groups[0].get("lr", 0)
        print_rank_0(f"iteration {args.iteration} | learning rate: {rate:.3E} | lm_loss: {losses[-1]:.6E}")
        timers.log(["interval time"])
        if args.iteration % 2 == 0:
            save_checkpoint(args, engine)
        if args.iteration % 3 == 0:
            evaluations.append(evaluate(args, engine, held_out()))
            print_rank_0(f"validation results at iteration {args.iteration} | lm_loss value: {evaluations[-1]:.6E}")
    return losses, evaluations
