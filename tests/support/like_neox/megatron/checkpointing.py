"""Checkpoints, of which the newest is kept."""

from __future__ import annotations

import shutil
from typing import Any

import torch

from . import NeoXArgs


def tag_of(iteration: int) -> str:
    return f"global_step{iteration}"


def delete_old_checkpoints(args: NeoXArgs) -> None:
    """All but the newest ones go, on rank 0."""
    if torch.distributed.get_rank() == 0:
        found = sorted(args.save.glob("global_step*"), key=lambda folder: int(folder.name.removeprefix("global_step")))
        for folder in found[: -args.keep_last_n_checkpoints]:
            shutil.rmtree(folder, ignore_errors=True)


def save_checkpoint(args: NeoXArgs, engine: Any) -> None:
    engine.save_checkpoint(str(args.save), tag=tag_of(args.iteration), client_state={"iteration": args.iteration})
    torch.distributed.barrier()
    delete_old_checkpoints(args)
    torch.distributed.barrier()


def load_checkpoint(args: NeoXArgs, engine: Any) -> int:
    """The iteration to go on from; 0 if there is none."""
    path, state = engine.load_checkpoint(str(args.save), tag=None)
    return 0 if path is None else int(state["iteration"])
