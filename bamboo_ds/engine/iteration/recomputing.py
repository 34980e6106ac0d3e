"""DeepSpeed's activation checkpointing with more forward passes than its schedule has, some without a backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing

from ...bare import bare
from ...devices.accelerators import HOST, accelerator, room
from ..stage.runtime import StageRuntime


def begin_forward() -> None:
    """Lets the next forward pass have contiguous buffers of its own.

    DeepSpeed has buffers for ``number_checkpoints`` layers, and takes new ones at each backward pass. Redundant forward
    passes between two backward passes would need more of them.
    """
    if checkpointing.CONTIGUOUS_CHECKPOINTING:
        checkpointing.contiguous_data_buffers = []
        checkpointing.contiguous_size_buffers = []
        checkpointing.data_offsets = []
        checkpointing.size_offsets = []


def end_iteration() -> None:
    """Frees what checkpoints of redundant forward passes hold outside of autograd's graph, which is gone."""
    checkpointing.reset()


def default_budget(device: torch.device, sharing: int) -> float | None:
    """Bytes that redundant forwards may keep where no setting says: half of what is free on a device now.

    Of that each of the members that share the device may have its part. In host memory there is no bound.
    """
    return None if device.type == HOST.type else room(device, sharing) / 2


def release_cache(device: torch.device) -> None:
    """Gives freed memory back to the device, for allocations of another size."""
    if device.type != HOST.type:
        accelerator().empty_cache()


@contextmanager
def counting_saved_bytes(runtime: StageRuntime, micro_batch: int) -> Iterator[None]:
    """Counts what the forward pass in the body keeps for its backward pass, in its part's ``saved``.

    That are the tensors that autograd saves, but parameters and what is counted already; of checkpointed layers the
    inputs.
    """
    module: Any = runtime.module
    seen = {bare(p).untyped_storage().data_ptr() for p in module.parameters()}
    checkpoint, saved = module.activation_checkpoint_func, runtime.share.part.saved
    saved[micro_batch] = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = bare(tensor).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            saved[micro_batch] += storage.nbytes()
        return tensor

    def counted(function: Any, *inputs: Any) -> Any:
        for value in inputs:
            if torch.is_tensor(value):
                pack(value)
        return checkpoint(function, *inputs)

    module.activation_checkpoint_func = counted
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
    finally:
        module.activation_checkpoint_func = checkpoint
