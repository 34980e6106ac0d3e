"""A job of layers with tensor slices, read as Megatron does: by the first slice only. With and without bamboo.

train_sliced.py --deepspeed_config FILE --out FOLDER --stages P --slices M [--steps N] ...
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

import deepspeed
import sliced
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from job_script import draws, dump, options, steps
from torch import nn
from train import CrossEntropy, Samples, iterator


def parse() -> argparse.Namespace:
    parser = options()
    parser.add_argument("--slices", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--counting", action="store_true", help="layers have buffers that passes change")
    parser.add_argument("--all-read", action="store_true", help="every slice has an iterator, nothing is broadcast")
    parser.add_argument("--training-data", action="store_true")
    parser.add_argument("--checkpoint-activations", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--load", default=None)
    return parser.parse_args()


def named(batches: Iterator[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Batches as dictionaries, as Megatron's datasets give them."""
    for inputs, labels in batches:
        yield {"inputs": inputs, "labels": labels}


def build(arguments: argparse.Namespace, copies: int) -> PipelineModule:
    layers = [
        LayerSpec(sliced.ParallelBlock, arguments.dropout, arguments.counting) for _ in range(2 * arguments.stages - 1)
    ]
    return PipelineModule(
        [*layers, LayerSpec(nn.Linear, sliced.HIDDEN, sliced.CLASSES)],
        topology=PipeModelDataParallelTopology(arguments.stages, arguments.slices, copies),
        loss_fn=CrossEntropy(),
        partition_method="uniform",
        activation_checkpoint_interval=arguments.checkpoint_activations,
    )


def install_faults(engine: Any, faults: str, out: Path) -> None:
    """See :mod:`faults`; ``~forward`` and ``~backward`` strike before a layer communicates in such a pass."""
    import faults as module

    known = json.loads(faults)
    inside = [f for f in known if f["at"].startswith("~")]
    module.install(engine, json.dumps([f for f in known if f not in inside]), str(out))
    mine = [f for f in inside if f["rank"] == int(os.environ["RANK"])]

    def before(place: str) -> None:
        if engine._parts.progress.evaluating:
            return
        runtime = engine._parts.binding.current
        m = runtime.share.part.forwards if place == "~forward" else runtime.share.part.backwards
        for fault in mine:
            here = fault["at"] == place and fault["micro_batch"] == m and module._due(engine, fault)
            if here and not (out / module.mark(fault)).exists():
                module.strike(fault, out)

    sliced.State.before = staticmethod(before)


def main() -> None:
    arguments = parse()
    torch.manual_seed(7)
    get_accelerator().is_fp16_supported = lambda: True
    lean_torch.install()
    deepspeed.init_distributed()
    sliced.initialise(arguments.slices)
    copies = torch.distributed.get_world_size() // (arguments.stages * arguments.slices)
    net = build(arguments, copies)
    config = json.loads(Path(arguments.deepspeed_config).read_text())
    batch = config["train_micro_batch_size_per_gpu"]
    arguments.model = "mlp"
    data = None
    if arguments.training_data:
        data = Samples(4096, arguments.model, None)
    engine, *_ = deepspeed.initialize(
        args=arguments, model=net, model_parameters=list(net.parameters()), training_data=data
    )
    if arguments.faults != "[]":
        install_faults(engine, arguments.faults, arguments.out)
    copy = engine.grid.data_parallel_id
    reads = engine.stage_id in (0, arguments.stages - 1) and (arguments.all_read or sliced.State.rank == 0)

    def batches(path: Path | None) -> Any:
        return iterator(arguments, copy, copies, batch, path) if reads and not arguments.training_data else None

    source = batches(draws(arguments))
    if not (arguments.all_read or arguments.training_data):
        engine.set_batch_fn(sliced.batch_fn)
        source = named(source) if source is not None else None
    if arguments.load:
        engine.load_checkpoint(arguments.load)
    losses, evaluations = [], []
    for step in steps(arguments):
        losses.append(float(engine.train_batch(data_iter=source)))
        done = step + 1
        if arguments.evaluate_every and done % arguments.evaluate_every == 0:
            held_out = batches(None)
            if engine.batch_fn is not None and held_out is not None:
                held_out = named(held_out)
            evaluations.append(float(engine.eval_batch(held_out)))
        if arguments.save_every and done % arguments.save_every == 0:
            engine.save_checkpoint(str(arguments.out / "checkpoints"), tag=f"step{done}", client_state={"step": done})
    dump(engine, arguments, {"losses": losses, "evaluations": evaluations, "present": [], "pid": os.getpid()})


if __name__ == "__main__":
    main()
