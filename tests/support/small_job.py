"""A small pipeline for scripts that look into their engines."""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
from samples import iterator  # beside this file
from train import build, plain


def begin(seed: int, stages: int = 2) -> tuple[Any, Any]:
    """The engine of a worker per stage, and an iterator over its batches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(seed)
    deepspeed.init_distributed()
    net = build(plain(stages))
    engine, *_ = deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()))
    return engine, iterator()
