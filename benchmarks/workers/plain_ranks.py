"""One of two ranks of plain torch: ``plain_ranks.py RANK RANKS FOLDER``, into whose ``result-RANK.json`` it writes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed as dist

#: Seconds in which a call must return; gloo's abort ends nothing.
_PATIENCE_S = 20.0 if get_accelerator().device_name() == "cuda" else 0.5


def timed(call: Callable[[], Any]) -> tuple[float | None, str]:
    """Seconds of ``call``, in a thread, and what it has raised; ``None``: it does not return."""
    raised: list[str] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # it is what is asked for
            raised.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")

    thread, begin = threading.Thread(target=run, daemon=True), time.monotonic()
    thread.start()
    thread.join(_PATIENCE_S)
    return (None if thread.is_alive() else time.monotonic() - begin), "".join(raised)


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    gpu = get_accelerator().device_name() == "cuda"
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    store = dist.FileStore(str(folder / "store"), ranks)
    found: dict[str, Any] = {"torch": torch.__version__, "group": "nccl" if gpu else "gloo"}

    def tell(**more: Any) -> None:
        found.update(more)
        (folder / f"result-{rank}.json").write_text(json.dumps(found))

    if gpu:
        found["nccl"] = ".".join(map(str, torch.get_device_module(device).nccl.version()))

    def make(name: str) -> Any:
        prefixed = dist.PrefixStore(name, store)
        if not gpu:
            return dist.ProcessGroupGloo(prefixed, rank, ranks, timedelta(seconds=30))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=30)
        return dist.ProcessGroupNCCL(prefixed, rank, ranks, options)

    ones = torch.ones(1024, device=device)
    group = make("first")
    tell(first_s=timed(lambda: group.allreduce([ones]).wait()))
    tell(second_s=timed(lambda: group.allreduce([ones]).wait()))
    options = dist.AllreduceOptions()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
        work = group.allreduce([ones], options)
        tell(synchronous_gives_a_work=work is not None)
        if work is not None:
            work.wait()
    # A collective that the other rank never joins.
    other = make("second")
    other.allreduce([ones]).wait()
    if rank == 0:
        waiting = other.allreduce([torch.ones(1 << 20, device=device)])
        tell(before_abort={"is_completed": waiting.is_completed(), "exception": str(waiting.exception())})
        tell(abort_s=timed(other.abort))
        begin = time.monotonic()
        while not waiting.is_completed() and time.monotonic() - begin < _PATIENCE_S:
            time.sleep(0.001)
        seen = {"seconds": time.monotonic() - begin, "is_completed": waiting.is_completed()}
        tell(after_abort={**seen, "exception": str(waiting.exception())})
        tell(wait_after_abort=timed(waiting.wait))
        tell(collective_after_abort=timed(lambda: other.allreduce([ones])))
    third = make("third")
    tell(after_an_abort_s=timed(lambda: third.allreduce([ones]).wait()))
    if gpu:
        get_accelerator().synchronize()
    tell(sum_is_right=bool((ones > 0).all()), done=True)
    sys.stdout.flush()
    os._exit(0)  # what hangs in an abort must not hold up the end


if __name__ == "__main__":
    main()
