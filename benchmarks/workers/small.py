"""Worker of recovery.py and memory.py: a small real model on the CPU. Knows nothing of bamboo."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import deepspeed.comm
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

CLASSES = 10
#: Peaks of memory are those from this step on: replicas are made in the first one.
FIRST = 3

# DeepSpeed would compile a CPU collective on first use.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Block(nn.Module):
    """A residual block of two linear layers: (batch, width) -> (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return x + self.down(torch.tanh(self.up(x)))


class Loss(nn.CrossEntropyLoss):
    """In fp32, as is usual."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output.float(), target)


def batches(size: int, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random features with random classes, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(size, width, generator=generator), torch.randint(0, CLASSES, (size,), generator=generator)


def main() -> None:
    """Train and leave losses and seconds per iteration in ``result-<rank>.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--blocks", type=int, default=2, help="per stage")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--measure-memory", action="store_true")
    parser.add_argument("--device", action="store_true", help="the device of the tests; tell its peak")
    parser.add_argument("--out", type=Path, required=True)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    if arguments.device:
        sys.path.insert(0, str(Path(__file__).parents[2]))
        from tests.support import far_device

        far_device.install()
    # DeepSpeed refuses fp16 where the CPU has no instructions for it; torch computes it there all the same.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layers = [LayerSpec(Block, arguments.width) for _ in range(arguments.blocks * arguments.stages)]
    layers.append(LayerSpec(nn.Linear, arguments.width, CLASSES))
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=Loss(), partition_method="parameters")
    engine, *_ = deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()))
    ends = engine.is_first_stage() or engine.is_last_stage()
    data = batches(engine.train_micro_batch_size_per_gpu(), arguments.width) if ends else None
    meter = None
    if arguments.measure_memory:
        from meter import Meter

        meter = Meter(engine)
    losses, seconds = [], []
    for step in range(arguments.steps):
        begin = time.perf_counter()
        if step == FIRST:
            get_accelerator().reset_peak_memory_stats()
        if meter is None:
            losses.append(float(engine.train_batch(data_iter=data)))
        else:
            with meter.iteration(step):
                losses.append(float(engine.train_batch(data_iter=data)))
        seconds.append(time.perf_counter() - begin)
    rank = torch.distributed.get_rank()
    result = {"losses": losses, "seconds": seconds, "memory": meter.result() if meter else None}
    if arguments.device:
        result["device_peak"] = get_accelerator().max_memory_allocated()
    (arguments.out / f"result-{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
