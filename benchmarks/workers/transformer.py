"""Worker of gpu/: a transformer, on a GPU where there is one. Knows nothing of bamboo."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import deepspeed
import deepspeed.comm
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import p2p
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

VOCABULARY = 512

# DeepSpeed would compile a CPU collective on first use.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


class Embedding(nn.Module):
    """Tokens and positions to vectors: (batch, context) -> (batch, context, width)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))


class Block(nn.Module):
    """A pre-norm block with causal attention.

    Args:
        attention: ``plain``: of matrix products, whose backward passes are deterministic; ``fused``: torch's.
    """

    def __init__(self, width: int, heads: int, attention: str = "plain") -> None:
        super().__init__()
        self.heads, self.fused = heads, attention == "fused"
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        else:
            scores = heads[0] @ heads[1].transpose(-1, -2) / (width // self.heads) ** 0.5
            future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            mixed = scores.masked_fill(future, -1e4).softmax(-1) @ heads[2]
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Vectors to logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean per token, in fp32."""
    return functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), labels.reshape(-1))


def batches(size: int, context: int, pipeline: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens, each followed by the next number; others in each pipeline."""
    generator = torch.Generator().manual_seed(1 + pipeline)
    while True:
        tokens = torch.randint(0, VOCABULARY, (size, context), generator=generator)
        yield tokens, (tokens + 1) % VOCABULARY


def memory() -> dict[str, int]:
    """Peaks in bytes: of the device's allocator on a GPU, of the process else."""
    if torch.cuda.is_available():
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


#: Calls in which the host waits for the device, and torch's operation that makes a number of a tensor.
WAITS = re.compile(r"(cuda|cu|hip)((Device|Stream|Event|Ctx)Synchronize|Memcpy(\w*[^c])?)")
ITEM = "aten::_local_scalar_dense"


@contextmanager
def profiled(file: Path, steps: int) -> Iterator[None]:
    """Write to ``file`` what happens in the body, per step of ``steps``.

    ``waits``: calls by name in which this thread waits for the device; ``elsewhere``: the same of other threads;
    ``items``: numbers made of tensors by this thread, each of which waits for the device that the tensor is on;
    ``copies``: of the device, by their direction, where "Pageable" says that a copy has kept the host waiting.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        yield
    trace = file.with_suffix(".trace")
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    trace.unlink()
    me = str(threading.get_native_id())
    found: dict[str, Counter[str]] = {name: Counter() for name in ("waits", "elsewhere", "items", "copies")}
    for event in events:
        name, mine = event.get("name", ""), str(event.get("tid")) == me
        if WAITS.fullmatch(name):
            found["waits" if mine else "elsewhere"][name] += 1
        elif name == ITEM and mine:
            found["items"][name] += 1
        elif event.get("cat") == "gpu_memcpy":
            found["copies"][name] += 1
    per_step = {what: {name: n / steps for name, n in each.most_common()} for what, each in found.items()}
    file.write_text(json.dumps({**per_step, "steps": steps}))


def ended(file: Path, step: int) -> bool:
    """Whether ``file`` names this step as the last one; all members see it before they come there."""
    return file.exists() and int(file.read_text() or "0") == step


def main() -> None:
    """Train; leave losses, seconds per iteration and peaks of memory, and a checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--attention", choices=["plain", "fused"], default="plain")
    parser.add_argument("--host-ids", action="store_true", help="NCCL takes each worker to be on a host of its own")
    parser.add_argument("--profile", type=int, default=0, help="so many of the last steps; leaves syncs-<rank>.json")
    parser.add_argument("--stop-file", type=Path, help="names the last step, once it is there")
    parser.add_argument("--no-checkpoint", action="store_true")
    parser.add_argument("--gloo", action="store_true", help="stock DeepSpeed with several workers on one GPU")
    parser.add_argument("--out", type=Path, required=True)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    torch.use_deterministic_algorithms(True)
    if arguments.host_ids:
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
    if arguments.gloo:
        # NCCL refuses a GPU that has another rank already, and gloo sends nothing from a GPU to one peer: DeepSpeed's
        # own way for old versions of torch is a broadcast among two.
        p2p.can_send_recv = lambda: False
        deepspeed.init_distributed(dist_backend="gloo")
    else:
        deepspeed.init_distributed()
    torch.manual_seed(0)
    blocks = [LayerSpec(Block, arguments.width, arguments.heads, arguments.attention) for _ in range(arguments.layers)]
    layers = [LayerSpec(Embedding, arguments.width, arguments.context), *blocks, LayerSpec(Head, arguments.width)]
    net = PipelineModule(layers, num_stages=arguments.stages, loss_fn=cross_entropy, partition_method="uniform")
    engine, *_ = deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()))
    ends, size = engine.is_first_stage() or engine.is_last_stage(), engine.train_micro_batch_size_per_gpu()
    data = batches(size, arguments.context, engine.grid.data_parallel_id) if ends else None
    losses, seconds, rank = [], [], torch.distributed.get_rank()
    with ExitStack() as profiling:
        for number in range(arguments.steps):
            if number == arguments.steps - arguments.profile:
                profiling.enter_context(profiled(arguments.out / f"syncs-{rank}.json", arguments.profile))
            begin = time.perf_counter()
            losses.append(float(engine.train_batch(data_iter=data)))
            get_accelerator().synchronize()
            seconds.append(time.perf_counter() - begin)
            if arguments.stop_file and ended(arguments.stop_file, engine.global_steps):
                break
    (arguments.out / f"losses-{rank}.json").write_text(json.dumps(losses))
    result = {"seconds": seconds, "memory": memory(), "device": get_accelerator().device_name()}
    (arguments.out / f"result-{rank}.json").write_text(json.dumps(result))
    if not arguments.no_checkpoint:
        engine.save_checkpoint(str(arguments.out), tag="final")


if __name__ == "__main__":
    main()
