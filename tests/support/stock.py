"""Runs a script as stock DeepSpeed would, without its JIT-compiled CPU collective.

stock.py SCRIPT ARGS
"""

import runpy
import sys

import deepspeed.comm  # noqa: F401
import torch

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")

# Left to the interpreter's end, gloo's threads abort the process now and then ("terminate called without ...").
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
