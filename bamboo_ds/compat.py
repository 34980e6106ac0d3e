"""Differences between versions of DeepSpeed (0.16 to 0.19) and torch (2.6 to 2.15) that concern bamboo_ds."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

from .version import torch_version

#: In torch 2.6 C++ code (DistributedDataParallel's) holds a work without its Python object, and loses its methods.
WORKS_NEED_HOLDING = torch_version() < (2, 7)


def _low_precision(engine: Any) -> torch.dtype:
    return torch.float16 if engine.fp16_enabled() else torch.bfloat16


def cast_module(engine: Any) -> None:
    """Gives ``engine.module`` the precision that DeepSpeed has given to the engine's own stage."""
    if not (engine.fp16_enabled() or engine.bfloat16_enabled()):
        return
    if not hasattr(engine, "_cast_module_mixed_precision"):  # before 0.19.2 buffers have the precision of parameters
        engine.module.to(_low_precision(engine))
        return
    from deepspeed.runtime import engine as deepspeed_engine

    parameters, buffers = engine._mixed_precision_dtypes()
    if not hasattr(deepspeed_engine, "keep_in_fp32_pattern"):  # before 0.19.8 no module is kept in fp32
        engine._cast_module_mixed_precision(parameters, buffers, False)
        return
    pattern = deepspeed_engine.keep_in_fp32_pattern(engine.module, engine._config.keep_in_fp32_modules, parameters)
    engine._cast_module_mixed_precision(parameters, buffers, False, pattern)


def wrap_optimizer(engine: Any, optimizer: Any, like: Any) -> Any:
    """DeepSpeed's optimizer around ``optimizer``, of the kind and with the settings of ``like``."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if isinstance(like, BF16_Optimizer):
        return engine._configure_bf16_optimizer(optimizer)
    if isinstance(like, DeepSpeedZeroOptimizer):
        return engine._configure_zero_optimizer(optimizer)
    arguments = [optimizer]
    if "low_precision_dtype" in signature(engine._configure_fp16_optimizer).parameters:  # since 0.17
        arguments.append(_low_precision(engine))
    return engine._configure_fp16_optimizer(*arguments)


def loss_scaler(wrapper: Any) -> Any:
    """The object with the loss scale's numbers of an fp16 optimizer without ZeRO."""
    return getattr(wrapper, "loss_scale_config", wrapper)  # before 0.18 the optimizer itself


def writes_zip_files(checkpoint_engine: Any) -> bool:
    """Whether files of checkpoints have torch's newer format."""
    return bool(getattr(checkpoint_engine, "zipfile_serialization", True))  # 0.16 has no setting


def forget_backward(optimizer: Any) -> None:
    """No backward pass is under way any more: newer optimizers wait for the hooks of one that was interrupted."""
    hooks = getattr(optimizer, "_backward_hook_state", None)
    if hooks is not None:  # since 0.18
        hooks.reset_for_new_step()
        hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0


def checks_zero_overflow(zero: Any) -> bool:
    """Whether a step of the ZeRO optimizer looks for gradients that have overflowed."""
    return bool(getattr(zero, "check_grad_overflow", zero.dtype == torch.float16))  # 0.16 has no setting


def divides_every_output() -> bool:
    """Whether DeepSpeed divides the gradients of whatever a forward pass gives by the steps of accumulation.

    In 0.18.3 to 0.19.2 it does, also of what a part of a stage gives: where a stage is divided matters then.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    hook = "_backward_prologue_per_tensor"
    return hasattr(DeepSpeedEngine, hook) and hook not in vars(PipelineEngine)


def averages_gradients(reducing: Any) -> bool:
    """Whether the engine or its ZeRO optimizer divides sums of gradients by the number of copies of the model."""
    return bool(getattr(reducing, "gradient_average", True))  # before 0.19 always


def use_zero_gradient(zero: Any, group: int, gradient: torch.Tensor) -> None:
    """Makes ``gradient`` the averaged one of the shard of parameter ``group``."""
    zero.averaged_gradients[group] = [gradient]
    if hasattr(zero, "all_grad_tensors"):  # since 0.17
        zero.all_grad_tensors[group] = None
