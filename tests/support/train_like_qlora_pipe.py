"""A script that drives DeepSpeed as qlora-pipe does, but for its own engine. See ``adapters``.

train_like_qlora_pipe.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

import deepspeed
import torch
from adapters import Model, PipelineDataLoader
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule
from job_script import dump, initialize, options, steps
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import bamboo_ds


class CustomPipelineModule(PipelineModule):
    """Keeps the whole model beside its layers, in a list that registers nothing."""

    def __init__(self, layers: list[Any], model: Model, **options: Any) -> None:
        self._model = [model]
        super().__init__(layers, **options)


def get_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """As many groups as the stage has: only the last one has weights that do not decay."""
    parameters = list(parameters)
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    named = [p for p in vectors if p.original_name == "norm.weight"]
    others = [*matrices, *(p for p in vectors if p not in set(named))]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": named, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, betas=(0.9, 0.99))


def is_main_process() -> bool:
    return bamboo_ds.speaks_for(0)


class Saver:
    """Every stage writes what it trains; the main process puts the parts together."""

    def __init__(self, engine: Any, loader: PipelineDataLoader, root: Path) -> None:
        self.engine, self.loader, self.root = engine, loader, root

    def save_adapter(self, name: str) -> None:
        folder = self.root / name
        if is_main_process():
            (folder / "tmp").mkdir(parents=True)
        dist.barrier()
        bamboo_ds.for_each_stage(self.engine, lambda engine: self._write(engine, folder / "tmp"))
        dist.barrier()
        if is_main_process():
            whole: dict[str, torch.Tensor] = {}
            for path in sorted((folder / "tmp").glob("*.bin")):
                whole.update(torch.load(path, weights_only=True))
            torch.save(whole, folder / "adapter_model.bin")

    def _write(self, engine: Any, folder: Path) -> None:
        if engine.grid.get_data_parallel_rank() == 0:
            part = {p.original_name: p.detach() for p in engine.module.parameters() if p.requires_grad}
            torch.save(part, folder / f"state_dict_{engine.grid.get_pipe_parallel_rank()}.bin")

    def need_to_checkpoint(self, step: int) -> bool:
        """What the main process decides."""
        result = [step % 3 == 0 if is_main_process() else None]
        torch.distributed.broadcast_object_list(result, src=0)
        return bool(result[0])

    def process_step(self, step: int) -> None:
        if self.need_to_checkpoint(step):
            state = {"step": step, "custom_loader": self.loader.state_dict()}
            self.engine.save_checkpoint(
                str(self.root), client_state=state, save_latest=True, exclude_frozen_parameters=True
            )


def evaluate(engine: Any, loader: PipelineDataLoader) -> float:
    """The mean over an epoch and the pipelines, with another number of micro-batches than in training."""
    before, losses = engine.micro_batches, []
    engine.micro_batches = loader.pieces
    while loader.epoch == 1:
        engine.reset_activation_shape()
        losses.append(engine.eval_batch(iter(loader)).detach())
        loader.sync_epoch()
    loader.reset()
    engine.micro_batches = before
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean, group=engine.grid.get_data_parallel_group())
    return float(mean / engine.grid.get_data_parallel_world_size())


def main() -> None:
    arguments = options().parse_args()
    lean_torch.install()
    deepspeed.init_distributed()
    torch.manual_seed(7)
    model = Model(2 * arguments.stages)
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    arguments.deepspeed_config = None  # what follows is from the configuration that is given
    net = CustomPipelineModule(
        model.to_layer_specs(), model, num_stages=arguments.stages, partition_method="uniform", dynamic_shape=True
    )
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, optimizer, *_ = initialize(
        arguments, model=net, model_parameters=trained, optimizer=get_optimizer, config=config
    )
    engine.communication_data_type = torch.float32
    grid, pieces = engine.grid, engine.gradient_accumulation_steps()
    place = grid.get_data_parallel_world_size(), grid.get_data_parallel_rank()
    loader = PipelineDataLoader(6, pieces, engine.train_micro_batch_size_per_gpu(), *place)
    held_out = PipelineDataLoader(2, 2, engine.train_micro_batch_size_per_gpu(), *place, seed=1000)
    engine.set_dataloader(loader)
    rates: list[Any] = [LinearLR(optimizer, start_factor=1 / 3, total_iters=3), CosineAnnealingLR(optimizer, 100)]
    engine.lr_scheduler = SequentialLR(optimizer, schedulers=rates, milestones=[3])
    saver = Saver(engine, loader, arguments.out / "checkpoints")
    losses, evaluations, epochs = [], [], []
    for done in steps(arguments):
        engine.reset_activation_shape()
        losses.append(float(engine.train_batch()))
        step = done + 1
        loader.sync_epoch()
        epochs.append(loader.epoch)
        if step % 2 == 0:
            evaluations.append(evaluate(engine, held_out))
        saver.process_step(step)
    saver.save_adapter("final")
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations, "epochs": epochs})


if __name__ == "__main__":
    main()
