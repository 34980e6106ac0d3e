"""DeepSpeed's ``FusedAdam`` on processors: its own class, with a stand-in for the kernel that it loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.op_builder.builder import OpBuilder

from bamboo_ds.engine.replicas import refusals

Lists = list[list[torch.Tensor]]


def fused_adam(parameters: Any) -> FusedAdam:
    """The optimizer. With it DeepSpeed takes its fused fp16 optimizer, as on GPUs by default.

    On processors its kernel keeps state in C++, for which the package refuses it; that of GPUs has none, nor has the
    stand-in.
    """
    OpBuilder._loaded_ops["fused_adam"] = SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
    refusals._IN_CPP.pop("FusedAdam", None)
    return FusedAdam(parameters, lr=1e-2, weight_decay=0.01)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step over all tensors, as the kernel's: gradients, parameters, and both moments are in ``lists``.

    Nothing is done where the flag is set. All are changed in place, also with gradients of zero.
    """
    assert len({len(each) for each in lists}) == 1 and len(lists) == 4
    if noop_flag.item():
        return
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, mean, square in zip(*lists, strict=True):
        assert gradient.dtype == parameter.dtype == mean.dtype == torch.float32, "DeepSpeed's masters"
        for begin in range(0, parameter.numel(), chunk_size):
            g, p, m, v = (each.view(-1)[begin : begin + chunk_size] for each in (gradient, parameter, mean, square))
            gained = g if decoupled else g + weight_decay * p
            m.mul_(beta1).add_((1 - beta1) * gained)
            v.mul_(beta2).add_((1 - beta2) * gained * gained)
            update = (m / first) / ((v / second).sqrt() + eps)
            p.sub_(lr * (update + weight_decay * p if decoupled else update))
