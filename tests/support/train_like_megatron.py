"""A script of Megatron-DeepSpeed, as far as its output goes: it knows nothing of bamboo. See ``like_megatron``.

train_like_megatron.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import torch
from job_script import begin, goes_on, initialize, options
from train import Samples, build, iterator, plain

sys.path.insert(0, str(Path(__file__).parent / "like_megatron"))

from megatron import set_global_variables
from megatron.core import mpu
from megatron.training import train


def main() -> None:
    arguments = options().parse_args()
    begin()
    arguments.rank, arguments.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    arguments.tensorboard_dir = arguments.out / "tensorboard"
    set_global_variables(arguments)
    mpu.initialize_model_parallel(arguments.stages)
    net = build(plain(arguments.stages))
    engine, *_ = initialize(
        arguments, model=net, model_parameters=list(net.parameters()), training_data=Samples(4096, "mlp", None)
    )
    ends = engine.stage_id in (0, arguments.stages - 1)

    def held_out() -> Iterator[Any] | None:
        return iterator(engine.grid.data_parallel_id, engine.grid.data_parallel_size) if ends else None

    train(engine, partial(goes_on, arguments), held_out, 3)


if __name__ == "__main__":
    main()
