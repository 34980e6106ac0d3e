"""Training with Megatron's lines and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import get_tensorboard_writer, get_timers, is_last_rank, print_rank_0, print_rank_last
from .core import mpu
from .utils import calc_params_l2_norm


def train(engine: Any, goes_on: Callable[[int], bool], held_out: Callable[[], Iterator[Any]], every: int) -> None:
    iteration = 0
    print_rank_0("before the start of training")
    while goes_on(iteration):
        loss = engine.train_batch()
        iteration += 1
        norm = calc_params_l2_norm(engine.module)
        training_log({"lm loss": loss}, norm, iteration)
        if iteration % every == 0:
            evaluate_and_print_results(f"iteration {iteration}", engine, held_out(), iteration)


def training_log(losses: dict[str, torch.Tensor], norm: float, iteration: int) -> None:
    writer = get_tensorboard_writer()
    if writer:
        for key, loss in losses.items():
            writer.add_scalar(key, loss, iteration)
        writer.add_scalar("params-norm", norm, iteration)
    print_rank_last(f"iteration {iteration} | lm loss: {float(losses['lm loss']):.9E}")
    print_rank_0(f"rank 0 has seen iteration {iteration}")
    if iteration % 2 == 0:
        get_timers().log(["interval"])


def evaluate(engine: Any, iterator: Iterator[Any]) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for _ in range(2):
        loss = engine.eval_batch(iterator)
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            total["lm loss"] = total.get("lm loss", torch.zeros(())) + loss / 2
    return total


def evaluate_and_print_results(prefix: str, engine: Any, iterator: Iterator[Any], iteration: int) -> None:
    writer = get_tensorboard_writer()
    line = f"validation at {prefix}"
    for key, loss in evaluate(engine, iterator).items():
        line += f" | {key}: {float(loss):.9E}"
        if writer and is_last_rank():
            writer.add_scalar(f"validation {key}", loss, iteration)
    print_rank_last(line)
