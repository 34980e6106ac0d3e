"""Refusals, with a cure, of what a script has given to its own stage or optimizer and replicas cannot have."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...config import BLOCK, load_config
from ...errors import UnsupportedError
from ..stage.references import DEPTH, reached
from .replica import build_stage_module

#: Hooks by (what has them, their kind, their name).
Hooks: TypeAlias = "Counter[tuple[str, str, str]]"


def check_layers(module: nn.Module) -> None:
    """Refuses layers with sparse gradients.

    Raises:
        UnsupportedError: names the layers.
    """
    sparse = [
        f"{type(m).__name__} {name!r}"
        for name, m in module.named_modules()
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse
    ]
    if sparse:
        raise UnsupportedError(
            f'{", ".join(sparse)} has sparse gradients, which "{BLOCK}" does not support: build it with sparse=False'
        )


def check_gradients(module: nn.Module) -> None:
    """Refuses sparse gradients that no layer has announced.

    Raises:
        UnsupportedError: names the parameters.
    """
    sparse = [name for name, p in module.named_parameters() if p.grad is not None and p.grad.layout != torch.strided]
    if sparse:
        raise UnsupportedError(
            f'the gradients of {", ".join(sparse)} are sparse, which "{BLOCK}" does not support: call '
            "torch.nn.functional.embedding and the like with sparse=False"
        )


# -- hooks of modules and parameters --------------------------------------------------------------------------


def registered() -> int:
    """The number of hooks registered in this process, of any kind; each is kept under its number."""
    return int(RemovableHandle.next_id)


def hooks_of(module: nn.Module, since: int = 0) -> Hooks:
    """The hooks of ``module``'s parts and parameters, those from number ``since`` on."""
    counts: Hooks = Counter()
    for name, part in module.named_modules():
        where = f"module {name!r}" if name else "the PipelineModule"
        for kind, hooks in vars(part).items():
            if kind.endswith("_hooks") and isinstance(hooks, dict):
                counts.update((where, kind.strip("_"), _name(hook)) for n, hook in hooks.items() if n >= since)
    for name, parameter in module.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, kind, None)
            if hooks:
                place = f"parameter {name!r}", kind.strip("_")
                counts.update((*place, _name(hook)) for n, hook in hooks.items() if n >= since)
    return counts


def compiled_in(module: nn.Module) -> frozenset[str]:
    """Names of ``module``'s parts that are compiled where they are (``layer.compile()``)."""
    return frozenset(name for name, part in module.named_modules() if part._compiled_call_impl is not None)


def refuse_compiled(found: Collection[str]) -> None:
    """Raises ``UnsupportedError`` if parts of the script's stage are ``found`` that no copy of it has compiled."""
    if found:
        names = ", ".join(name or "the PipelineModule" for name in sorted(found)[:10])
        raise UnsupportedError(
            f"the script has compiled {names} of its stage, which other copies of it would not be: call the engine's "
            "compile() after deepspeed.initialize, which compiles every copy, or compile in the layers' constructors"
        )


def check_hooks(module: Any) -> None:
    """Refuses hooks and compiled layers that another copy of this stage, built from the same layers, would not have.

    Args:
        module: a ``PipelineModule`` to which only the script has done anything so far.

    Raises:
        UnsupportedError: names the hooks and what has them, or what is compiled.
    """
    hooks, compiled = hooks_of(module), compiled_in(module)
    if hooks or compiled:  # mostly there are none, and nothing is built
        other = build_stage_module(module, module.stage_id, torch.device("cpu"))
        refuse_hooks(hooks - hooks_of(other))
        refuse_compiled(compiled - compiled_in(other))


def refuse_hooks(hooks: Hooks) -> None:
    """Raises ``UnsupportedError`` if there are any ``hooks``, which other copies of the stage lack."""
    if hooks:
        listed = ", ".join(sorted(f"{name} ({kind} of {where})" for where, kind, name in hooks))
        raise UnsupportedError(
            f"the script has registered hooks that other copies of this stage would not have: {listed}. Register them "
            "in a function that you give to bamboo_ds.on_stage_built before deepspeed.initialize: it is called on "
            "every copy"
        )


# -- optimizers -----------------------------------------------------------------------------------------------

#: DeepSpeed's optimizers that keep an object in C++, by their classes, and what does the same without.
_IN_CPP = {
    "FusedAdam": '"torch_adam": true among the optimizer\'s params, or torch.optim.AdamW or Adam',
    "DeepSpeedCPUAdam": '"torch_adam": true among the optimizer\'s params, or torch.optim.AdamW or Adam',
    "DeepSpeedCPUAdagrad": "torch.optim.Adagrad",
    "DeepSpeedCPULion": "Lion in Python, or another optimizer of torch",
}


def check_optimizer(optimizer: Any, copied: bool) -> None:
    """Refuses an optimizer with state that no other copy of the stage can have.

    Args:
        optimizer: the script's or DeepSpeed's.
        copied: whether there are, or will be, other copies of the stage.

    Raises:
        UnsupportedError: names it, and what to use.
    """
    if optimizer is None:  # the engine only evaluates
        return
    if copied and isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} has never called the constructor of torch.optim.Optimizer, as some "
            "wrappers around another one do not: copies of a stage cannot have it, and torch cannot tell its state. "
            "Call super().__init__(params, defaults) in its constructor, and keep all state in `self.state`"
        )
    check_step(optimizer)
    kinds = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("deepspeed.ops.")]
    device = next((p.device.type for group in optimizer.param_groups for p in group["params"]), "cpu")
    refused = next((name for name in kinds if name in _IN_CPP and device == "cpu"), None)
    if copied and refused:
        raise _in_cpp(refused)


def check_named_optimizer(config: Any, copied: bool) -> None:
    """Does as :func:`check_optimizer` for what ``config`` has DeepSpeed make, which on processors compiles for minutes.

    Raises:
        UnsupportedError: names it, and what to use.
    """
    block = load_config(config).get("optimizer") or {}
    adam = str(block.get("type", "")).lower() in ("adam", "adamw") and not (block.get("params") or {}).get("torch_adam")
    if adam and copied and get_accelerator().device_name() == "cpu":
        raise _in_cpp("FusedAdam")


def _in_cpp(kind: str) -> UnsupportedError:
    return UnsupportedError(
        f"DeepSpeed's {kind} on processors keeps state in C++ that depends on all steps that a process has taken so "
        f'far, which copies of a stage lack: with "{BLOCK}" use {_IN_CPP[kind]}'
    )


def check_step(optimizer: Any) -> None:
    """Refuses a ``step`` that the script has put into its optimizer.

    Raises:
        UnsupportedError: names the optimizer.
    """
    step = vars(optimizer).get("step") if optimizer is not None else None
    if getattr(step, "_wrapped_by_lr_sched", False) or getattr(step, "_with_counter", False):  # torch's schedulers
        step = getattr(step, "__wrapped__", None)
    if step is not None and step is not type(optimizer).step:
        raise UnsupportedError(
            f"the script has put a `step` of its own into its optimizer {type(optimizer).__name__}, which the "
            "optimizers of other copies of the stage lack: define it in a subclass"
        )


# -- hooks of optimizers --------------------------------------------------------------------------------------


def optimizer_hooks(optimizer: Any) -> dict[str, Any]:
    """The hooks of a torch optimizer, by their names."""
    own = vars(optimizer) if optimizer is not None else {}
    kinds = (hooks for kind, hooks in own.items() if kind.endswith("_hooks") and isinstance(hooks, dict))
    return {_name(hook): hook for hooks in kinds for hook in hooks.values()}


def check_optimizer_hooks(optimizer: Any) -> None:
    """Refuses hooks that would change another stage's optimizer or parameters than those they are passed.

    Raises:
        UnsupportedError: names the hook and what it uses.
    """
    for name, hook in optimizer_hooks(optimizer).items():
        for used in reached(hook, DEPTH, {}):
            raise UnsupportedError(
                f"the hook {name} of optimizer {type(optimizer).__name__} uses a {type(used).__name__} that it is not "
                "passed: called for the optimizer of another stage it would change this one's. Use the optimizer that "
                "the hook is passed, and the parameters in its param_groups"
            )


def _name(hook: Any) -> str:
    hook = getattr(hook, "hook", hook)  # torch wraps some of them
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
