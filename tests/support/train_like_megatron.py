"""A script of Megatron-DeepSpeed, as far as its output goes: it knows nothing of bamboo. See ``like_megatron``.

train_like_megatron.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # before torch

import deepspeed
import torch
from job_script import goes_on, initialize, options
from train import Samples, build, iterator

sys.path.insert(0, str(Path(__file__).parent / "like_megatron"))

from megatron import set_global_variables
from megatron.core import mpu
from megatron.training import train


def main() -> None:
    parser = options()
    arguments = parser.parse_args()
    torch.manual_seed(7)
    lean_torch.install()
    deepspeed.init_distributed()
    arguments.rank, arguments.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    arguments.tensorboard_dir = arguments.out / "tensorboard"
    set_global_variables(arguments)
    mpu.initialize_model_parallel(arguments.stages)
    shape = argparse.Namespace(
        model="mlp", dropout=0.0, norm=False, cache=False, count_passes=False, stages=arguments.stages, instances=False,
        checkpoint_activations=0,
    )  # fmt: skip
    net = build(shape)
    engine, *_ = initialize(
        arguments, model=net, model_parameters=list(net.parameters()), training_data=Samples(4096, "mlp", None)
    )
    ends = engine.stage_id in (0, arguments.stages - 1)
    pipelines = arguments.world_size // arguments.stages

    def held_out() -> Iterator[Any] | None:
        return iterator(shape, engine.grid.data_parallel_id, pipelines, 4, None) if ends else None

    train(engine, partial(goes_on, arguments), held_out, 3)


if __name__ == "__main__":
    main()
