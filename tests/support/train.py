"""A DeepSpeed pipeline job with everything that the tests vary; runs with and without bamboo.

train.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] [--model mlp] ...
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import sliced
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from job_script import begin, draws, dump, initialize, options, state_of, steps
from samples import CLASSES, HIDDEN, Samples, iterator
from torch import nn

import bamboo_ds


class Device:
    """How long a pass of a layer takes at least, and a file that names a rank where it takes a multiple of that."""

    pause_s = 0.0
    straggler: Path | None = None

    @classmethod
    def take_time(cls) -> None:
        if cls.pause_s:
            slow = cls.straggler is not None and cls.straggler.exists()
            rank, times = cls.straggler.read_text().split() if slow else ("", "1")  # type: ignore[union-attr]
            time.sleep(cls.pause_s * (float(times) if rank == os.environ["RANK"] else 1))


class Block(nn.Module):
    """Linear, optional normalisation and dropout, residual; a buffer that is made when it is needed; may count."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, cache: bool = False, counts: bool = False) -> None:
        super().__init__()
        self.cache, self.counts, self.passes = cache, counts, 0
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Device.take_time()
        x = x.to(self.linear.weight.dtype)
        if self.cache:
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.linspace(0, 0.1, HIDDEN))
            x = x + self.table
        if self.counts:
            self.passes += 1
            x = x * (1 + 1e-3 * self.passes)
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class TupleBlock(Block):
    """The same on tuples of (activations, a second float tensor, integers, a mask)."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x, y, index, mask = inputs
        x = super().forward(x) + 0.1 * y + index.unsqueeze(1) * 0.01
        return x, y * 0.9 + x.mean(), index + 1, ~mask


class TupleHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, y, index, mask = inputs
        return self.linear(x * mask.float().unsqueeze(1) + y) * (1 + 0.001 * index.float().mean())


class LossHead(nn.Module):
    """A head that returns the loss itself; the target is the sign of the input's first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


class CrossEntropy(nn.CrossEntropyLoss):
    """In fp32, as is usual."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(logits.float(), labels)


def with_noise(batches: Any, first: bool) -> Any:
    """``batches`` for the first stage or for the last one, with something else where DeepSpeed does not look."""
    noise = torch.Generator().manual_seed(5)
    for inputs, labels in batches:
        yield (inputs, torch.zeros_like(labels)) if first else (torch.randn(inputs.shape, generator=noise), labels)


def plain(stages: int) -> argparse.Namespace:
    """What :func:`build` makes a pipeline of that has nothing special."""
    usual = {"model": "mlp", "dropout": 0.0, "checkpoint_activations": 0, "slices": 0, "stages": stages, "layers": 0}
    return argparse.Namespace(**usual, **dict.fromkeys(("norm", "cache", "count_passes", "instances"), False))


def build(arguments: argparse.Namespace) -> PipelineModule:
    block = TupleBlock if arguments.model == "tuple" else Block
    kind: tuple[Any, ...] = (block, arguments.dropout, arguments.norm, arguments.cache, arguments.count_passes)
    place: dict[str, Any] = {"num_stages": arguments.stages}
    if arguments.slices:
        kind = (sliced.ParallelBlock, arguments.dropout, arguments.norm)
        copies = torch.distributed.get_world_size() // (arguments.stages * arguments.slices)
        place = {"topology": PipeModelDataParallelTopology(arguments.stages, arguments.slices, copies)}
    layers = [LayerSpec(*kind) for _ in range((arguments.layers or 2 * arguments.stages) - 1)]
    head = {"tuple": TupleHead, "loss": LossHead}.get(arguments.model)
    layers.append(LayerSpec(head) if head else LayerSpec(nn.Linear, HIDDEN, CLASSES))
    if arguments.instances:
        layers = [spec.build() for spec in layers]
    loss = None if arguments.model == "loss" else CrossEntropy()
    return PipelineModule(
        layers,
        **place,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=arguments.checkpoint_activations,
    )


class Drifting(torch.optim.SGD):
    """Depends on the process that it runs in."""

    def step(self, *arguments: Any) -> None:  # type: ignore[override]
        super().step(*arguments)
        with torch.no_grad():
            for group in self.param_groups:
                group["params"][0].add_(1e-6 * (os.getpid() % 1000))


def install_hooks(module: nn.Module, stage: int) -> None:
    """Hooks of parameters and layers without which the result is another one."""
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda layer, inputs, output: output * (0.9 + 0.01 * stage))


def compute_on_device(total: int) -> None:
    """Report that this process computes on a device of its own."""
    from bamboo_ds.control.registry.records import DeviceRecord
    from bamboo_ds.engine import parts

    def device_of(context: Any) -> DeviceRecord:
        assert sum(tensor.nbytes for tensor in context.binding.local.tensors()), "what the process has for its stage"
        return DeviceRecord(name=context.epoch.member, total=total)

    parts.device_of = device_of


def overflow(step: int) -> None:
    """Let gradients of stage 1 overflow in an iteration."""

    def poisoned(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if ENGINES and ENGINES[0].global_steps == step else gradient

    def install(module: nn.Module, stage: int) -> None:
        for parameter in module.parameters() if stage == 1 else ():
            parameter.register_hook(poisoned)

    bamboo_ds.on_stage_built(install)


def keep_small(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook that is called after a step."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


def exhaust(steps: list[int]) -> None:
    """Let the third forward of each replica in ``steps`` exhaust the memory."""

    def check(layer: nn.Module, inputs: Any) -> None:
        engine = ENGINES[0] if ENGINES else None
        parts = getattr(engine, "_parts", None)
        if parts is None or parts.progress.steps not in steps:
            return
        runtime = parts.binding.current
        if not runtime.owned and runtime.share.part.forwards == 2:
            raise torch.OutOfMemoryError("no memory is left, says the test")

    def install(module: nn.Module, stage: int) -> None:
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(check)

    bamboo_ds.on_stage_built(install)


#: This process's engine, once it is there.
ENGINES: list[Any] = []


def make_optimizer(kind: str) -> Any:
    if kind == "drifting":
        return lambda params: Drifting(params, lr=0.01)
    if kind == "fused":
        from fused import fused_adam

        return fused_adam
    if kind == "client-sgd":
        return lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
    if kind == "client-adamw":
        return lambda params: torch.optim.AdamW(params, lr=1e-2)
    return None


def main() -> None:
    parser = options()
    parser.add_argument("--model", default="mlp", choices=["mlp", "tuple", "loss"])
    parser.add_argument("--layers", type=int, default=0, help="two for each stage")
    parser.add_argument("--optimizer", default="config")
    parser.add_argument("--hooks", action="store_true", help="of layers, parameters and the optimizer")
    parser.add_argument("--freeze-at", type=int, default=-1, help="no biases are trained from this step on")
    parser.add_argument("--exhaust-at", type=int, nargs="*", default=[], help="replicas lack memory in these steps")
    parser.add_argument("--device-bytes", type=int, default=0, help="this process has a device with so much memory")
    parser.add_argument("--overflow-at", type=int, default=None, help="gradients of stage 1 overflow in this step")
    parser.add_argument("--count-samples", action="store_true", help="a client optimizer, a scheduler like Megatron's")
    parser.add_argument("--adjust", action="store_true", help="set learning rates and the count of steps by hand")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--norm", action="store_true", help="layers have buffers that passes change")
    parser.add_argument("--slices", type=int, default=0, help="layers are cut into so many, as Megatron's")
    parser.add_argument("--all-read", action="store_true", help="every slice has an iterator, nothing is broadcast")
    parser.add_argument("--count-passes", action="store_true", help="layers depend on how many they have done")
    parser.add_argument("--cache", action="store_true", help="layers make a buffer in their first pass")
    parser.add_argument("--compile", action="store_true", help="the engine's modules")
    parser.add_argument("--instances", action="store_true")
    parser.add_argument("--noise", action="store_true", help="where DeepSpeed does not look at a part of a batch")
    parser.add_argument("--training-data", action="store_true")
    parser.add_argument("--checkpoint-activations", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-until", type=int, default=None, help="no step after this one is saved")
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder of those that it saves")
    parser.add_argument("--load", default=None)
    parser.add_argument("--tag", default=None, help="of the checkpoint to load; the newest")
    parser.add_argument("--skip", type=int, default=0, help="micro-batches of so many steps are passed over")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint that the job has written")
    parser.add_argument("--reload-at", type=int, default=0, help="go back to the newest checkpoint after this step")
    parser.add_argument("--pause-s", type=float, default=0.0, help="a forward pass of a layer takes so long at least")
    parser.add_argument("--straggler", type=Path, help="names a rank and how many times as long that takes there")
    parser.add_argument("--snapshots", action="store_true", help="dump the state after every step, not only the last")
    arguments = parser.parse_args()
    arguments.checkpoints = arguments.checkpoints or arguments.out / "checkpoints"
    Device.pause_s, Device.straggler = arguments.pause_s, arguments.straggler
    from sample_scheduler import PROGRESS, SampleScheduler

    begin()
    if arguments.slices:
        sliced.initialise(arguments.slices)
    net = build(arguments)
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    batch = config["train_micro_batch_size_per_gpu"]
    # Its loader reads ahead in processes of its own, so what is read is not what is used.
    data = Samples(4096, arguments.model, None) if arguments.training_data else None
    optimizer, scheduler = make_optimizer(arguments.optimizer), None
    if arguments.count_samples:
        optimizer = torch.optim.AdamW(net.parameters())
        scheduler = SampleScheduler(optimizer, 1000)
    if arguments.hooks:
        bamboo_ds.on_stage_built(install_hooks)
    if arguments.device_bytes:
        compute_on_device(arguments.device_bytes)
    if arguments.overflow_at is not None:
        overflow(arguments.overflow_at)
    if arguments.exhaust_at:
        exhaust(arguments.exhaust_at)
    engine, *_ = initialize(
        arguments,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=scheduler,
        training_data=data,
    )
    ENGINES.append(engine)
    if arguments.hooks:
        engine.basic_optimizer.register_step_post_hook(keep_small)
    if arguments.compile:
        engine.compile(backend="eager")
    grid, ends = engine.grid, engine.stage_id in (0, arguments.stages - 1)
    reads = ends and (not arguments.slices or arguments.all_read or sliced.State.rank == 0)
    if arguments.slices and not (arguments.all_read or arguments.training_data):
        engine.set_batch_fn(sliced.batch_fn)

    def batches(ledger: Path | None) -> Any:
        if not reads:
            return None
        found = iterator(grid.data_parallel_id, grid.data_parallel_size, batch, ledger, arguments.model)
        found = with_noise(found, engine.stage_id == 0) if arguments.noise else found
        return found if engine.batch_fn is None else sliced.named(found)

    source = None if arguments.training_data else batches(draws(arguments))
    if arguments.load:
        engine.load_checkpoint(arguments.load, tag=arguments.tag)
    first = 0
    if arguments.resume:
        path, state = engine.load_checkpoint(str(arguments.checkpoints))
        first = state["step"] if path is not None else 0
    if source is not None:
        for _ in range((arguments.skip + first) * config["gradient_accumulation_steps"]):
            next(source)
    losses, evaluations, present = [], [], []
    if arguments.adjust:
        engine.global_steps = 100
    for step in steps(arguments, first):
        if arguments.freeze_at == step:
            for parameter in net.parameters():
                parameter.requires_grad_(parameter.ndim > 1)
        if arguments.adjust:
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.01 / (1 + 0.1 * step)
        losses.append(float(engine.train_batch(data_iter=source)))
        PROGRESS["tokens"] += 7 * engine.train_batch_size()
        if arguments.evaluate_every and (step + 1) % arguments.evaluate_every == 0:
            with torch.no_grad():
                evaluations.append(float(engine.eval_batch(batches(None))))
        if arguments.snapshots:
            torch.save(state_of(engine), arguments.out / f"state-{torch.distributed.get_rank()}-{step + 1}.pt")
        last = arguments.save_until or step + 1
        if arguments.save_every and (step + 1) % arguments.save_every == 0 and step + 1 <= last:
            state = {"step": step + 1}
            folder, tag = arguments.checkpoints, f"step{step + 1}"
            engine.save_checkpoint(str(folder), tag=tag, client_state=state)
            present.append((folder / tag).is_dir())
        if arguments.reload_at == step + 1:
            path, state = engine.load_checkpoint(str(arguments.checkpoints))
            assert path is not None and state["step"] <= step + 1, (path, state)
    results = {"losses": losses, "evaluations": evaluations, "present": present, "pid": os.getpid()}
    dump(engine, arguments, results)


if __name__ == "__main__":
    main()
