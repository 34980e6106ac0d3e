"""Worker of overhead.py and degraded.py: a pipeline of emulated devices. Knows nothing of bamboo.

An emulated layer holds its "device" for a set time without using the CPU, so that many stages run at their full
speed on few cores. The rest (a tiny linear layer) is real.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

WIDTH = 8

# DeepSpeed would compile a CPU collective on first use.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


#: Names a process and how many times as long its device takes, once it is there.
slow_file: Path | None = None


def slowness() -> float:
    """How many times as long as usual this process's device takes."""
    try:
        pid, times = slow_file.read_text().split() if slow_file else ("", "")
    except (FileNotFoundError, ValueError):  # not there yet, or being written
        return 1.0
    return float(times) if pid == str(os.getpid()) else 1.0


def hold(seconds: float) -> None:
    """Keep the emulated device for ``seconds``, or longer if it is slow."""
    deadline = time.perf_counter() + seconds * slowness()
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


class Hold(torch.autograd.Function):
    """The identity that takes ``forward_s`` seconds forward and ``backward_s`` seconds backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        hold(forward_s)
        ctx.backward_s = backward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hold(ctx.backward_s)
        return gradients[0], None, None


class EmulatedLayer(nn.Module):
    """(..., WIDTH) -> (..., WIDTH); with ``more`` parameters, which have gradients and cost hardly any computing."""

    def __init__(self, forward_s: float, backward_s: float, more: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.more = nn.Parameter(torch.zeros(more)) if more else None
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.to(self.linear.weight.dtype))
        if self.more is not None:
            y = y * (1 + self.more.mean())
        return Hold.apply(y, self.forward_s, self.backward_s)


class Loss(nn.MSELoss):
    """In fp32, as is usual."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output.float(), target)


def batches(pipeline: int, size: int, boundary_bytes: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same batch of a pipeline for ever, of so many bytes in fp32."""
    rows = boundary_bytes // (4 * WIDTH * size)
    shape = (size, rows, WIDTH) if rows else (size, WIDTH)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1 + pipeline))
    while True:
        yield x, x


class StockTrace:
    """What stock DeepSpeed's engine does, as bamboo's records what it does itself (``observe.timeline``)."""

    def __init__(self, engine: Any, folder: Path, rank: int) -> None:
        from bamboo_ds.observe.spans import Kind, Span, SpanFile, path_for  # not there in some other checkouts

        self._kind, self._span = Kind, Span
        member = f"stock{rank}"
        self._file = SpanFile(path_for(folder / "events.jsonl", member), "stock", member, rank)
        self.spans: list[Any] = []
        self.step = 0
        handlers = {kind: self._timed(kind.__name__, call) for kind, call in engine._INSTRUCTION_MAP.items()}
        type(engine)._INSTRUCTION_MAP = handlers

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        kind = self._kind(name)

        def run(*arguments: Any, **keywords: Any) -> Any:
            begin = time.monotonic()
            result = call(*arguments, **keywords)
            m = keywords.get("buffer_id")
            self.spans.append(self._span(kind, self.step, begin, time.monotonic(), micro_batch=m))
            return result

        return run

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """The body is an iteration."""
        self.step += 1
        begin = time.monotonic()
        yield
        self.spans.append(self._span(self._kind.ITERATION, self.step, begin, time.monotonic()))

    def save(self) -> None:
        """Write all spans."""
        self._file.write(self.spans)
        self._file.close()


def ended(file: Path, step: int) -> bool:
    """Whether ``file`` names this step as the last one; all members see it before they come there."""
    return file.exists() and int(file.read_text() or "0") == step


def main() -> None:
    """Train; leave the losses, the seconds of every iteration and those of processors in ``result-<rank>.json``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--forward-s", type=float, required=True)
    parser.add_argument("--backward-s", type=float, required=True)
    parser.add_argument("--layers", type=int, default=1, help="of each stage; the times are those of a layer")
    parser.add_argument("--ends", type=float, default=1.0, help="how many times as long the first and last layer take")
    parser.add_argument("--slow-file", type=Path, help="names a process and how many times as long its device takes")
    parser.add_argument("--stop-file", type=Path, help="names the last step, once it is there")
    parser.add_argument("--parameters", type=int, default=0, help="more of each stage")
    parser.add_argument(
        "--boundary-mb", type=float, default=0.0, help="size of boundary tensors; 0: as small as can be"
    )
    parser.add_argument("--tied", action="store_true", help="the first and the last stage share their weights")
    parser.add_argument("--trace", action="store_true", help="of stock DeepSpeed; bamboo records by itself")
    parser.add_argument("--out", type=Path, required=True)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.set_num_threads(1)
    # DeepSpeed refuses fp16 where the CPU has no instructions for it; torch computes it there all the same.
    get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed()
    torch.manual_seed(0)
    global slow_file
    slow_file = arguments.slow_file
    times = arguments.forward_s, arguments.backward_s, arguments.parameters
    longer = tuple(seconds * arguments.ends for seconds in times[:2])
    specs = [LayerSpec(EmulatedLayer, *times) for _ in range(arguments.stages * arguments.layers)]
    specs[0], specs[-1] = (LayerSpec(EmulatedLayer, *longer, arguments.parameters) for _ in range(2))
    if arguments.tied:
        specs[0], specs[-1] = (
            TiedLayerSpec("ends", EmulatedLayer, *times, tied_weight_attr="linear.weight") for _ in range(2)
        )
    net = PipelineModule(specs, num_stages=arguments.stages, loss_fn=Loss(), partition_method="uniform")
    engine, *_ = deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()))
    ends = engine.is_first_stage() or engine.is_last_stage()
    boundary = int(arguments.boundary_mb * 10**6)
    data = None
    if ends:
        data = batches(engine.grid.data_parallel_id, engine.train_micro_batch_size_per_gpu(), boundary)
    rank = torch.distributed.get_rank()
    trace = StockTrace(engine, arguments.out, rank) if arguments.trace else None
    losses, seconds, cpu = [], [], []
    for _ in range(arguments.steps):
        begin, used = time.perf_counter(), time.process_time()
        with trace.iteration() if trace else nullcontext():
            losses.append(float(engine.train_batch(data_iter=data)))
        seconds.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
        if arguments.stop_file and ended(arguments.stop_file, engine.global_steps):
            break
    if trace:
        trace.save()
    result = {"losses": losses, "seconds": seconds, "cpu": cpu, "cpu_seconds": time.process_time()}
    # A joiner may have the rank of another worker, and ends beside it.
    new = arguments.out / f"new-{os.getpid()}.json"
    new.write_text(json.dumps(result))
    new.rename(arguments.out / f"result-{rank}.json")


if __name__ == "__main__":
    main()
