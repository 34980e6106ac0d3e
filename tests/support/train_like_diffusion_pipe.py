"""A script that drives DeepSpeed as diffusion-pipe does: what is to be told from the noise depends on the noise.

train_like_diffusion_pipe.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.schedule import LoadMicroBatch, TrainSchedule
from deepspeed.utils import groups
from job_script import dump, initialize, install_stand_ins, options, steps
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN = 16


class InitialLayer(nn.Module):
    """(noisy latents, time) to activations and modulation; trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.time_in = nn.Linear(HIDDEN, HIDDEN), nn.Linear(1, HIDDEN)
        self.requires_grad_(False)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        latents, time = inputs
        train = torch.is_grad_enabled()
        return self.img_in(latents).requires_grad_(train), self.time_in(time).requires_grad_(train)


class TransformerLayer(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        x, vec = inputs
        return x + torch.tanh(self.linear(x) + self.lora_B(self.lora_A(x)) + vec), vec * 1.0


class FinalLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, vec = inputs
        return self.out(x * (1 + vec))


def loss_of(output: torch.Tensor, label: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    target, mask = label
    loss = (output.float() - target).square()
    return (loss * mask.unsqueeze(-1) if mask.numel() else loss).mean()


class PipelineDataLoader:
    """Micro-batches of which each end of the pipeline draws all. The target depends on the noise, which is drawn from
    torch's own generator; the first end sends its target to the last one. One micro-batch is drawn ahead.
    """

    def __init__(self, engine: Any, size: int, pieces: int, batches: int, seed: int) -> None:
        self.engine, self.size, self.pieces, self.batches, self.seed = engine, size, pieces, batches, seed
        self.reset()

    def reset(self) -> None:
        self.epoch = 1
        self._data, self._next = self._pull(), None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        found = next(self._data) if self._next is None else self._next
        self._next = next(self._data, None)
        if self._next is None:
            self._data, self.epoch = self._pull(), self.epoch + 1
        return found

    def _pull(self) -> Iterator[Any]:
        grid = self.engine.grid
        for batch in range(self.batches):
            number = self.seed + batch * grid.get_data_parallel_world_size() + grid.get_data_parallel_rank()
            latents = torch.randn(self.size * self.pieces, HIDDEN, generator=torch.Generator().manual_seed(number))
            time, noise = torch.sigmoid(torch.randn(len(latents), 1)), torch.randn_like(latents)
            target = self._passed_on(noise - latents)
            features = (1 - time) * latents + time * noise, time
            parts = (torch.split(tensor, self.size) for tensor in (*features, target))
            for noisy, at, piece in zip(*parts, strict=True):
                yield (noisy, at), (piece, torch.tensor([]))

    def _passed_on(self, target: torch.Tensor) -> torch.Tensor:
        assert self.engine.is_first_stage() or self.engine.is_last_stage()
        grid = self.engine.grid
        if self.engine.is_first_stage():
            dist.send(target, grid.stage_to_global(self.engine.num_stages - 1))
        else:
            dist.recv(target, grid.stage_to_global(0))
        return target

    def sync_epoch(self) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(found, self.epoch)
        self.epoch = max(found)


def clip(engine: Any) -> None:
    """As DeepSpeed's clipping, but for stages without gradients as well."""
    parts, mpu = [p.grad for p in engine.module.parameters() if p.grad is not None], engine.mpu
    norms = [part.float().norm(2) for part in parts] if mpu.get_model_parallel_rank() == 0 else []
    total = torch.stack(norms).square().sum() if norms else torch.zeros(1)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=mpu.get_model_parallel_group())
    norm = total.pow(0.5) / float(dist.get_world_size(group=groups._get_data_parallel_group()))
    dist.all_reduce(norm, group=groups._get_data_parallel_group())
    factor = torch.clamp(engine.gradient_clipping() / (norm + 1e-6), max=1.0)
    for part in parts:
        part.mul_(factor)


def broadcast_trained(engine: Any) -> None:
    """All have read the frozen parameters from the same files."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            dist.broadcast(parameter.data, groups._get_broadcast_src_rank(), group=engine.seq_data_parallel_group)


def apply_patches() -> None:
    """A step of the schedule begins with the batch, at both ends, and layers count with all of their parameters."""
    steps = TrainSchedule.steps

    def load_first(schedule: TrainSchedule) -> Iterator[list[Any]]:
        for commands in steps(schedule):
            yield sorted(commands, key=lambda command: not isinstance(command, LoadMicroBatch))

    def count_all(module: PipelineModule) -> list[int]:
        return [sum(p.numel() for p in layer.parameters()) for layer in module._layer_specs]

    TrainSchedule.steps, PipelineModule._count_layer_params = load_first, count_all
    DeepSpeedEngine.clip_fp32_gradients = lambda engine: clip(engine)
    DeepSpeedEngine._broadcast_model = broadcast_trained


class ManualPipelineModule(PipelineModule):
    """Stages that begin where the configuration says."""

    def __init__(self, *arguments: Any, split: list[int], **options: Any) -> None:
        self.manual_partition_split = split
        super().__init__(*arguments, **options)

    def _partition_layers(self, method: str = "uniform") -> None:
        if method != "manual":
            super()._partition_layers(method)
            return
        stage = self._topo.get_coord(self.global_rank).pipe
        self.parts = [0, *self.manual_partition_split, len(self._layer_specs)]
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def data_iterator_for_step(loader: PipelineDataLoader, engine: Any, count: int) -> Iterator[Any] | None:
    """Everything that one call needs, drawn before it."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return iter([next(loader) for _ in range(count)])


def evaluate(engine: Any, loader: PipelineDataLoader) -> float:
    losses, state = [], torch.get_rng_state()
    torch.manual_seed(engine.grid.get_data_parallel_rank())  # the same at both ends
    with torch.no_grad():
        while loader.epoch == 1:
            engine.reset_activation_shape()
            iterator = data_iterator_for_step(loader, engine, loader.pieces)
            losses.append(engine.eval_batch(iterator, num_micro_batches=loader.pieces).item())
            loader.sync_epoch()
    loader.reset()
    torch.set_rng_state(state)
    return sum(losses) / len(losses)


def main() -> None:
    arguments = options().parse_args()
    apply_patches()
    install_stand_ins()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    run = [str(arguments.out / "run")]  # a member that joins is alone yet, and keeps what it has
    torch.distributed.broadcast_object_list(run, src=0)
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    arguments.deepspeed_config = None
    layers: list[Any] = [InitialLayer(), *(TransformerLayer() for _ in range(2 * arguments.stages)), FinalLayer()]
    net = ManualPipelineModule(
        layers=layers,
        num_stages=arguments.stages,
        partition_method="manual",
        split=[2 + 2 * stage for stage in range(arguments.stages - 1)],
        dynamic_shape=True,
        activation_checkpoint_interval=1,
        checkpointable_layers=["TransformerLayer"],
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
    )
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = initialize(arguments, model=net, config=config)
    engine._support_torch_style_backward = True
    net.loss_fn = loss_of

    def get_optimizer(parameters: Any) -> torch.optim.Optimizer:
        matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)

    engine._configure_optimizer(get_optimizer, trained)
    grid, pieces, size = engine.grid, engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    engine.first_last_stage_group = dist.new_group(ranks=[grid.pp_group[0], grid.pp_group[-1]])
    engine.communication_data_type = torch.float32
    engine.lr_scheduler = torch.optim.lr_scheduler.LinearLR(engine.optimizer, start_factor=1 / 5, total_iters=5)
    loader, held_out = PipelineDataLoader(engine, size, pieces, 50, 0), PipelineDataLoader(engine, size, 2, 2, 1000)
    evaluations, losses = [evaluate(engine, held_out)], []
    for _ in steps(arguments, engine.global_steps):
        if engine.global_steps == 3:
            engine.set_train_batch_size(engine.train_batch_size() // pieces * 3)
        engine.reset_activation_shape()
        iterator = data_iterator_for_step(loader, engine, engine.gradient_accumulation_steps())
        losses.append(engine.train_batch(iterator).item())
        loader.sync_epoch()
        if engine.global_steps % 4 == 0:
            evaluations.append(evaluate(engine, held_out))
    if engine.global_steps % 3 == 0:
        state = {"step": engine.global_steps, "examples": engine.global_samples, "run": run[0]}
        engine.save_checkpoint(run[0], client_state=state, save_latest=True, exclude_frozen_parameters=True)
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations})


if __name__ == "__main__":
    main()
