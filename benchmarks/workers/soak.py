"""Worker of soak.py: a pipeline of emulated devices over real samples, each of which is used once.

The parameters and losses are real; only time is emulated. As long as ``--until`` does not exist, layers hold their
"device" for a while; then the rest of the steps is done as fast as possible. Knows nothing of bamboo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

WIDTH = 16

# DeepSpeed would compile a CPU collective on first use.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Hold(torch.autograd.Function):
    """The identity that takes some seconds forward and twice as many backward while ``until`` does not exist."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, until: str) -> torch.Tensor:
        ctx.hold = seconds, until
        wait(seconds, until)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        seconds, until = ctx.hold
        wait(2 * seconds, until)
        return gradients[0], None, None


def wait(seconds: float, until: str) -> None:
    """Keep the emulated device."""
    if seconds > 0 and not os.path.exists(until):
        time.sleep(seconds)


class EmulatedLayer(nn.Module):
    """(batch, WIDTH) -> (batch, WIDTH)."""

    def __init__(self, seconds: float, until: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds, self.until = seconds, until

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Hold.apply(x + torch.tanh(self.linear(x)), self.seconds, self.until)


def batches(pipeline: int, pipelines: int, size: int, ledger: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one pipeline: pipeline d reads the samples with index = d modulo D. Notes what it hands out."""
    index = pipeline
    with open(ledger, "a") as file:
        while True:
            indices = [index + pipelines * i for i in range(size)]
            index = indices[-1] + pipelines
            samples = [sample(i) for i in indices]
            file.write(f"{indices[0]} {indices[-1]}\n")
            file.flush()
            both = torch.stack(samples)
            yield both[:, 0], both[:, 1]


class Samples(torch.utils.data.Dataset):
    """The same samples by index."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = sample(index)
        return both[0], both[1]


def sample(index: int) -> torch.Tensor:
    """Input and label, (2, WIDTH)."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1 + index))


def main() -> None:
    """Train; leave the losses in ``result-<pid>.json`` and the parameters in a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--layers", type=int, default=1, help="of each stage, which share its time")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--forward-s", type=float, required=True)
    parser.add_argument("--device", action="store_true", help="the device of the tests")
    parser.add_argument("--long", action="store_true", help="tell that iterations take minutes")
    parser.add_argument("--until", required=True)
    parser.add_argument("--training-data", action="store_true", help="A dataset in place of the script's iterators.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    if arguments.device:
        from tests.support import far_device

        far_device.install(seed=1)
    if arguments.long:
        from tests.support.train_long import tell_long_iterations

        tell_long_iterations()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    layer = LayerSpec(EmulatedLayer, arguments.forward_s / arguments.layers, arguments.until)
    specs = [layer] * (arguments.stages * arguments.layers)
    net = PipelineModule(specs, num_stages=arguments.stages, loss_fn=nn.MSELoss(), partition_method="uniform")
    data = Samples() if arguments.training_data else None
    engine, *_ = deepspeed.initialize(
        args=arguments, model=net, model_parameters=list(net.parameters()), training_data=data
    )
    pipeline, pipelines = engine.grid.data_parallel_id, engine.grid.data_parallel_size
    source = None
    if data is None and (engine.is_first_stage() or engine.is_last_stage()):
        # In an hour of faults the system gives numbers of processes twice.
        ledger = arguments.out / f"ledger-{os.getpid()}-{pipeline}-{time.time_ns()}.txt"
        source = batches(pipeline, pipelines, engine.train_micro_batch_size_per_gpu(), ledger)
    losses = [float(engine.train_batch(data_iter=source)) for _ in range(arguments.steps)]
    engine.save_checkpoint(str(arguments.out / "checkpoint"), tag="last")
    (arguments.out / f"result-{os.getpid()}.json").write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
