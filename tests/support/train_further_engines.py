"""A job whose script has more engines: a reference pipeline without the block, and a copy of a model on each rank.

train_further_engines.py --deepspeed_config FILE --out FOLDER [--faults]

Each process writes what its engines give it to ``said-<start of the job>-<rank>-<process>.jsonl``. With ``--faults``
rank 1 is lost in the reference's evaluation of step 2, in the last of its micro-batches, and after the restart in the
training of step 3.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from job_script import begin
from torch import nn

STAGES, STEPS, WIDTH = 2, 5, 8
RANK, START = int(os.environ["RANK"]), int(os.environ.get("BAMBOO_RESTART_COUNT", "0"))
#: Start of the job, step, engine and pass in which rank 1 is lost.
FAULTS = ((0, 2, "reference", 2), (1, 3, "engine", 2))


class Layer(nn.Linear):
    """Is lost in its turn."""

    out: Path | None = None
    step, engine, passes = 0, "", 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = type(self)
        kind.passes += 1
        fault = START, kind.step, kind.engine, kind.passes
        if kind.out is not None and RANK == 1 and fault in FAULTS:
            (kind.out / f"fault-{START}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tanh(super().forward(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    begin()

    def pipeline() -> PipelineModule:
        layers = [LayerSpec(Layer, WIDTH, WIDTH) for _ in range(STAGES)]
        return PipelineModule(layers=layers, num_stages=STAGES, loss_fn=nn.functional.mse_loss)

    net = pipeline()
    engine, *_ = deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()))
    config = {k: v for k, v in json.loads(Path(arguments.deepspeed_config).read_text()).items() if k != "bamboo"}
    bare = {k: v for k, v in config.items() if k not in ("optimizer", "scheduler")}
    reference, *_ = deepspeed.initialize(model=pipeline(), config=bare)
    copy, *_ = deepspeed.initialize(model=nn.Linear(WIDTH, WIDTH), config=bare, mpu=reference.mpu)
    generator = torch.Generator().manual_seed(3)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)

    held_out = [batch() for _ in range(2)]
    data = iter([batch() for _ in range(2 * STEPS)])
    say = open(arguments.out / f"said-{START}-{RANK}-{os.getpid()}.jsonl", "w", buffering=1)  # noqa: SIM115
    Layer.out = arguments.out if arguments.faults else None
    for Layer.step in range(1, STEPS + 1):
        for name in ("reference", "engine", "copy"):
            Layer.engine, Layer.passes = name, 0
            if name == "reference":
                found = float(reference.eval_batch(iter(held_out)))
            elif name == "engine":
                found = float(engine.train_batch(data))
            else:
                with torch.no_grad():
                    found = float(copy(held_out[0][0]).sum())
            say.write(json.dumps([Layer.step, name, found]) + "\n")


main()
