"""What the scripts of test jobs have in common: options, faults, how long they train, and what they leave behind."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import far_device
import torch
from deepspeed.accelerator import get_accelerator
from nccl import groups as nccl_groups
from torch.utils._pytree import tree_map_only

import bamboo_ds

#: File that tells how many steps a job had that ``--end-after`` has ended.
LAST_STEP = "last-step"


def options(steps: int = 4, slow_s: float = 0.3) -> argparse.ArgumentParser:
    """The options that tests give to all of the scripts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--slow-until", type=Path, default=None, help="--slow-s a step until this file exists")
    parser.add_argument("--slow-s", type=float, default=slow_s)
    parser.add_argument("--slow-from", type=int, default=0, help="not before so many steps are done")
    parser.add_argument("--end-after", type=int, default=0, help="end so many steps after that file exists")
    parser.add_argument("--faults", default="[]")
    return parser


def install_stand_ins() -> None:
    """Give a worker the device and the groups of tests if its environment says so."""
    far_device.install_in_job()
    nccl_groups.install_in_job()


def begin(seed: int = 7) -> None:
    """What comes before the model: the device, random numbers, and torch's process group."""
    import lean_torch  # which scripts import before torch

    install_stand_ins()
    # DeepSpeed refuses fp16 where the CPU has no instructions for it; torch computes it there all the same.
    get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(seed)
    lean_torch.install()
    deepspeed.init_distributed()


def initialize(arguments: argparse.Namespace, **given: Any) -> tuple[Any, ...]:
    """``deepspeed.initialize``, and the faults of ``--faults`` in the engine."""
    made: tuple[Any, ...] = deepspeed.initialize(args=arguments, **given)
    strike(made[0], arguments)
    return made


def strike(engine: Any, arguments: argparse.Namespace) -> None:
    """Let the faults of ``--faults`` strike in ``engine``."""
    if arguments.faults != "[]":
        from faults import install

        install(engine, arguments.faults, str(arguments.out))


def steps(arguments: argparse.Namespace, first: int = 0) -> Iterator[int]:
    """How many steps are done before each of the steps that this job has."""
    step = first
    while goes_on(arguments, step):
        yield step
        step += 1


def goes_on(arguments: argparse.Namespace, step: int) -> bool:
    """Whether the job has a step after so many; at the pace of ``--slow-until``."""
    if step >= end_of(arguments, step):
        return False
    if arguments.slow_until is not None and step >= arguments.slow_from and not bamboo_ds.is_replaying():
        deadline = time.monotonic() + arguments.slow_s
        while not arguments.slow_until.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    return True


def end_of(arguments: argparse.Namespace, step: int) -> int:
    """How many steps this job has, as far as it is known before ``step``.

    With ``--end-after`` whoever first finds the file of ``--slow-until`` decides: nobody is further than a step, since
    every step ends with a commit of all.
    """
    file: Path = arguments.out / LAST_STEP
    if arguments.end_after and not bamboo_ds.is_replaying() and arguments.slow_until.exists() and not file.exists():
        mine = file.with_suffix(f".{os.getpid()}")
        mine.write_text(str(step + arguments.end_after))
        with contextlib.suppress(FileExistsError):
            os.link(mine, file)  # whole, or not at all
        mine.unlink()
    return int(file.read_text()) if file.exists() else arguments.steps


def joined() -> bool:
    """Whether this worker came when the job was running already."""
    return bool(os.environ.get("BAMBOO_JOINER"))


def draws(arguments: argparse.Namespace) -> Path:
    """The file of the samples that this process draws."""
    name = f"drawn-{os.getpid()}" if joined() else f"samples-{torch.distributed.get_rank()}"
    file: Path = arguments.out / f"{name}.txt"
    return file


def compiled(engine: Any) -> bool:
    """Whether all layers of the role that is bound are compiled."""
    return all(layer._compiled_call_impl is not None for layer in engine.module.forward_funcs)


def forgotten_optimizers(engine: Any) -> int:
    """DeepSpeed's optimizers in memory that belong to no role of this worker, nor to its script's."""
    gc.collect()
    kind = type(engine.optimizer)
    known = {id(engine.optimizer), *(id(r.optimizer.wrapper) for r in engine._parts.binding.runtimes.values())}
    return sum(type(each) is kind and id(each) not in known for each in gc.get_objects())


def state_of(engine: Any) -> dict[str, Any]:
    """Parameters, buffers, optimizer state, learning rate and counters of the role that is bound."""
    optimizer = engine.optimizer
    parameters = list(engine.module.parameters())
    # DeepSpeed's own optimizers keep masters of the parameters, and torch's optimizer steps these.
    inner = getattr(optimizer, "optimizer", optimizer)
    stepped = [p for group in inner.param_groups for p in group["params"]]
    masters = [] if inner is optimizer else [p.detach().clone() for p in stepped]
    moments = []
    for p in stepped:
        state = inner.state.get(p, {})
        moments.append({k: v.detach().clone() if torch.is_tensor(v) else v for k, v in sorted(state.items())})
    return {
        "parameters": [p.detach().clone() for p in parameters],
        "buffers": [b.detach().clone() for b in engine.module.buffers()],
        "moments": moments,
        "masters": masters,
        "optimizer": type(optimizer).__name__,
        "scale": float(getattr(optimizer, "loss_scale", 1.0)),
        "lr": [g["lr"] for g in optimizer.param_groups],
        "decay": [g.get("weight_decay") for g in optimizer.param_groups],
        "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
    }


def dump(
    engine: Any, arguments: argparse.Namespace, results: dict[str, Any], state_of: Callable[[Any], Any] = state_of
) -> None:
    """Everything that must equal an undisturbed run."""
    rank = torch.distributed.get_rank()
    roles: dict[tuple[int, int], Any] = {}
    replicas: dict[tuple[int, int], Any] = {}
    parts = getattr(engine, "_parts", None)
    if parts is None:
        # Every tensor slice of a copy of the model has a pipeline of its own.
        pipelines = torch.distributed.get_world_size() // engine.num_stages
        roles[rank % pipelines, engine.stage_id] = state_of(engine)
    else:
        binding = parts.binding
        for runtime in binding.runtimes.values():
            runtime.catch_up()
            binding.use(runtime)
            (roles if runtime.owned else replicas)[runtime.role.pipeline, runtime.role.stage] = state_of(engine)
            results["compiled"] = results.get("compiled", True) and compiled(engine)
        binding.use(binding.local)
        results["forgotten"] = forgotten_optimizers(engine)
    name = f"joined-{os.getpid()}" if joined() else f"result-{rank}"
    found = {**results, "roles": roles, "replicas": replicas}
    torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, found), arguments.out / f"{name}.pt")
