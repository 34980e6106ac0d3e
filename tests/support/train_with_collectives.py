"""A pipeline job whose script uses torch.distributed itself: sums, barriers, broadcasts, gathers, groups of its own.

train_with_collectives.py --deepspeed_config FILE --out FOLDER [--steps N] [--faults]

Trains until the file ``over`` is in FOLDER, on whoever finds it first, or for N steps. Each member writes what it has
computed after each step to ``said-<rank>-<process>.jsonl``. With ``--faults`` rank 2 dies in a sum over all, and rank 0
in one of a group of three, once there are replicas of everything again. With ``--fault-in-setup`` rank 2 dies once in a
sum before the first step, which is to count all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import lean_torch  # noqa: F401  before torch

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from job_script import begin
from torch import distributed as dist
from torch import nn

import bamboo_ds

RANKS = 4
OWN = (0, 2, 3)


def die(out: Path, rank: int) -> None:
    """The fault, in the middle of a collective that the others can or cannot complete."""
    (out / f"fault-{rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def gathered(value: float) -> list[float]:
    parts = [torch.full((2,), -7.0) for _ in range(RANKS)]
    dist.all_gather(parts, torch.full((2,), value))
    assert all(part.shape == (2,) and part[0] == part[1] for part in parts)
    return [float(part[0]) for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--fault-in-setup", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    out: Path = arguments.out
    begin()
    rank = dist.get_rank()
    # Scripts make groups of gloo for what their processors say to each other.
    own, everybody = dist.new_group(list(OWN), backend="gloo"), dist.new_group()
    linear = [nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 32)]
    layers = [*(part for each in linear for part in (each, nn.Tanh())), nn.Linear(32, 8)]
    net = PipelineModule(layers=layers, loss_fn=nn.CrossEntropyLoss(), num_stages=RANKS, partition_method="uniform")
    generator = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(16, generator=generator), torch.randint(0, 8, (), generator=generator)) for _ in range(4 * 6 * 50)
    ]
    engine, _, _, _ = deepspeed.initialize(
        args=arguments, model=net, model_parameters=list(net.parameters()), training_data=data
    )
    ones = torch.ones(1)
    work = dist.all_reduce(ones, async_op=True)
    if arguments.fault_in_setup and rank == 2 and not (out / f"fault-{rank}").exists():
        die(out, rank)
    work.wait()
    assert int(ones) == RANKS, f"{int(ones)} of {RANKS} ranks set up"
    views: list[Any] = []
    bamboo_ds.on_plan_change(views.append)
    say = open(out / f"said-{rank}-{os.getpid()}.jsonl", "w", buffering=1)  # noqa: SIM115
    losses = []
    dies = arguments.faults and not bamboo_ds.is_replaying()
    for step in range(arguments.steps):
        losses.append(float(engine.train_batch()))
        said: dict[str, Any] = {"step": step, "rank": rank, "replaying": bamboo_ds.is_replaying()}
        ones = torch.ones(3)
        work = dist.all_reduce(ones, async_op=True)
        if dies and rank == 2 and step == 5:
            die(out, rank)
        work.wait()
        said["counted"] = ones.tolist()
        alike = torch.full((3,), losses[-1])
        dist.all_reduce(alike)
        said["alike"] = alike.tolist()
        greatest = torch.tensor([rank])
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=everybody)
        said["greatest"] = int(greatest)
        dist.barrier()
        message = torch.full((2,), float(step) if rank in (0, 1) else -1.0)
        dist.broadcast(message, src=0)
        said["broadcast"] = message.tolist()
        said["gathered"] = gathered(float(rank))
        if rank in OWN:
            mine = torch.tensor([rank + 1])
            work = dist.all_reduce(mine, group=own, async_op=True)
            plan = engine._parts.epoch.plan if dies else None
            if plan and rank == 0 and step > 8 and len(plan.members) == RANKS - 1 and None not in plan.shadows:
                die(out, rank)
            work.wait()
            said["own"] = int(mine)
            total = torch.tensor([rank + 1])
            dist.reduce(total, dst=3, group=own)
            said["reduced"] = int(total) if rank == 3 else None
        said["speaks"] = [r for r in range(RANKS) if bamboo_ds.speaks_for(r)]
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, {"rank": rank, "step": step})
        said["objects"] = objects
        told = [{"rank": rank, "step": step} if rank == 0 or dies else None, "x" * step]
        dist.broadcast_object_list(told, src=0)
        said["told"] = told
        if rank == 1:
            dist.send(torch.tensor([step]), dst=3)
        elif rank == 3:
            heard = torch.tensor([-1])
            dist.recv(heard, src=1)
            said["heard"] = int(heard)
        if rank == 3 and any(view.lost for view in views):
            # Nobody runs as the lost rank: neither may a message to it wait for ever, nor one from it.
            lost = next(r for r in range(RANKS) if r not in views[-1].ranks)
            dist.send(torch.ones(1), dst=lost)
            nothing = torch.tensor([0.5])
            dist.recv(nothing, src=lost)
            said["to"], said["from"] = lost, float(nothing)
        said["plans"] = [[v.epoch, v.reason, list(v.ranks), list(map(list, v.roles))] for v in views]
        views.clear()
        over = torch.tensor([int((out / "over").exists())])
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        say.write(json.dumps(said) + "\n")
        if over and not said["replaying"]:
            break
        if arguments.faults and step > 20 and not said["replaying"]:
            time.sleep(0.1)  # nothing but waiting for the member that joins, which needs the processor
    (out / f"losses-{rank}-{os.getpid()}.json").write_text(json.dumps(losses))


main()
