"""Worker of gpu/smoke.py: one rank alone on the "bamboo" backend, with NCCL inside where there is a GPU.

Builds DeepSpeed's pipeline engine on the backend's groups, trains, aborts while an all-reduce is queued behind a busy
kernel, enters another epoch, trains on, and ends. Prints what happened as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from bamboo_ds.comm.inner import kind_for
from bamboo_ds.comm.session import Session, init_process_group
from bamboo_ds.errors import EpochChanged
from bamboo_ds.topology import Plan

#: Clock cycles of the kernel that the all-reduce waits for: about two seconds.
BUSY = 4_000_000_000
ME, ADDRESS = "a", "127.0.0.1"

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def enter(session: Session, epoch: int) -> None:
    """Attach to an epoch of this member alone."""
    session.attach(Plan(epoch=epoch, owners=(ME,), members=(ME,), script_ranks=(0,), places=(session.place,)))
    session.meet()


def build(device: torch.device) -> tuple[Any, Any]:
    """DeepSpeed's engine of one stage, and its data."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    torch.manual_seed(0)
    net = PipelineModule([LayerSpec(nn.Linear, 64, 64) for _ in range(2)], num_stages=1, loss_fn=nn.MSELoss())
    engine, *_ = deepspeed.initialize(config=config, model=net, model_parameters=list(net.parameters()))
    x = torch.ones(4, 64)
    return engine, iter(lambda: (x, x), None)


def main(out: Path) -> None:
    """Write what happened to ``out``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    session = Session(ME, ADDRESS, timedelta(seconds=60), lambda member, reason: None)
    enter(session, 1)
    init_process_group(session, 0, 1)
    deepspeed.init_distributed()
    engine, data = build(device)
    first = float(engine.train_batch(data_iter=data))
    tensor = torch.ones(1 << 20, device=device)
    torch.distributed.all_reduce(tensor)
    sum_of_one = bool(tensor.eq(1).all())
    if device.type == "cuda":
        torch.cuda._sleep(BUSY)
    work = torch.distributed.all_reduce(tensor, async_op=True)
    begin = time.monotonic()
    killer = threading.Thread(target=session.abort, args=("the test says so",))
    killer.start()
    killer.join()
    abort_s = time.monotonic() - begin
    try:
        torch.distributed.all_reduce(tensor)
        raised = ""
    except EpochChanged as error:
        raised = str(error)
    del work
    enter(session, 2)
    second = float(engine.train_batch(data_iter=data))
    begin = time.monotonic()
    torch.distributed.destroy_process_group()
    session.close()
    result = {
        "inner": kind_for(device),
        "losses": [first, second],
        "sum_of_one": sum_of_one,
        "abort_s": abort_s,
        "raised": raised,
        "teardown_s": time.monotonic() - begin,
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
