"""A script that drives DeepSpeed as qlora-pipe does, but for its own engine.

train_like_qlora_pipe.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import dump, initialize, install_stand_ins, options, steps
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import bamboo_ds

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
    install_stand_ins()
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
