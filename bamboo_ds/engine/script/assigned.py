"""Assignments of a script after ``deepspeed.initialize``: to its engine, PipelineModule, optimizer and scheduler.

Each copy of a stage has objects of its own of these. An attribute is *followed* (a member gives the value to all roles
that it has or gets, since every member's script assigns the same), *refused* with a cure, or *own*: no copy of a stage
computes with it. Attributes of the engine that are not bound to a role hold for all roles of the member as they are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ...errors import UnsupportedError
from ...state import SCALARS
from ..stage.clones import kept_by
from ..stage.references import Rebinding
from ..stage.runtime import StageRuntime
from ..stage.tracing import content_checksum


@dataclass(frozen=True)
class Treatment:
    """The treatment of an attribute that a script assigns."""

    kind: str
    cure: str = ""


FOLLOWED: Final = Treatment("followed")
OWN: Final = Treatment("own")
_BEFORE = Treatment("refused", "do it before deepspeed.initialize")
_PLACE = Treatment("refused", "it says which role the engine computes, and is bamboo_ds's to change")
_OPTIMIZER = Treatment(
    "refused",
    "give the optimizer to deepspeed.initialize, or, to an engine that has none, by engine._configure_optimizer",
)
_FILES = Treatment("refused", "bamboo_ds decides which files of a checkpoint a member writes")

#: What a script may set on the engine; Megatron sets the first one back where a run begins anew from a checkpoint.
COUNTERS: Final = ("global_steps", "global_samples", "skipped_steps")
#: Attributes of DeepSpeed's engine that are bound to a role (:data:`..stage.runtime.BOUND_ATTRIBUTES`).
ENGINE: Final[Mapping[str, Treatment]] = {
    "lr_scheduler": FOLLOWED,
    **dict.fromkeys(COUNTERS, FOLLOWED),
    "module": Treatment("refused", "change its attributes, or give another model to deepspeed.initialize"),
    **dict.fromkeys(("optimizer", "basic_optimizer"), _OPTIMIZER),
    "param_names": Treatment("refused", "name parameters by the attributes of layers"),
    **dict.fromkeys(("data_parallel_group", "seq_data_parallel_group"), _PLACE),
    **dict.fromkeys(("stage_id", "prev_stage", "next_stage", "global_rank", "grid", "mpu"), _PLACE),
    **dict.fromkeys(
        ("module_forward_pre_hook", "module_forward_post_hook"),
        Treatment("refused", "register hooks of layers in a function given to bamboo_ds.on_stage_built"),
    ),
    **dict.fromkeys(("save_non_zero_checkpoint", "save_zero_checkpoint", "checkpoint_mp_rank"), _FILES),
    # Made anew by each iteration, or counted by it and not computed with.
    **dict.fromkeys(("pipe_buffers", "num_pipe_buffers", "grad_layer", "fwd_outputs", "losses", "micro_steps"), OWN),
    **dict.fromkeys(("loss", "total_loss", "total_additional_losses"), OWN),
}

#: Attributes that a ``PipelineModule`` has of DeepSpeed. Others are the script's, and followed.
MODULE: Final[Mapping[str, Treatment]] = {
    "loss_fn": FOLLOWED,
    **dict.fromkeys(
        ("activation_checkpoint_interval", "activation_checkpoint_func", "checkpointable_layers"), FOLLOWED
    ),
    **dict.fromkeys(("seed_layers", "seed_fn", "base_seed", "dynamic_shape"), FOLLOWED),
    "checkpoint_parallel_write_pipeline": FOLLOWED,
    **dict.fromkeys(("stage_id", "num_stages", "global_rank", "local_rank", "world_size", "world_group"), _BEFORE),
    **dict.fromkeys(("_topo", "_grid", "_layer_specs", "_num_layers", "_local_start", "_local_stop", "parts"), _BEFORE),
    **dict.fromkeys(("forward_funcs", "fwd_map", "tied_modules", "tied_weight_attrs", "tied_comms"), _BEFORE),
    # Counted in passes, or what follows from others.
    **dict.fromkeys(("micro_offset", "curr_layer", "interval_was_zero"), OWN),
    **dict.fromkeys(("is_checkpointable_results", "is_checkpointable_results_interval"), OWN),
    "training": OWN,  # set by each operation
    "_compiled_call_impl": OWN,  # by engine.compile() on each copy; else it is refused
}
#: What every module has for itself.
_OF_MODULES = frozenset(vars(nn.Module()))
_OF_PASSES = ("activation_checkpoint_interval", "activation_checkpoint_func", "checkpointable_layers")
#: What DeepSpeed's optimizers keep the loss scale in.
_SCALERS = ("loss_scaler", "loss_scale_config")
#: How deep values are looked into where they are described.
_DEPTH = 4
#: So many attributes are named.
_NAMED = 10

#: As scripts call the objects that have the attributes.
_ENGINE, _MODULE, _BASIC, _WRAPPER = "engine", "engine.module", "engine.basic_optimizer", "engine.optimizer"


#: What a script may assign, of one role: by object, as scripts call it, and name.
Values = Mapping[str, Mapping[str, Any]]


def values_of(runtime: StageRuntime) -> Values:
    """The values of ``runtime``, whose attributes must be up to date."""
    own = runtime.attributes
    basic, wrapper = own.get("basic_optimizer"), own.get("optimizer")
    names = (name for name, treatment in ENGINE.items() if treatment is not OWN and name not in COUNTERS)
    values = {_ENGINE: {name: own.get(name) for name in names}}
    if own.get("module") is not None:
        values[_MODULE] = _of_module(own["module"])
    if basic is not None:
        values[_BASIC] = {**_objects(basic), **copy.deepcopy(kept_by(basic, tensors=False))}
    if wrapper is not None and wrapper is not basic:
        values[_WRAPPER] = _scalars(wrapper)
        for name in _SCALERS:
            if hasattr(getattr(wrapper, name, None), "__dict__"):
                values[f"{_WRAPPER}.{name}"] = _scalars(getattr(wrapper, name))
    return values


def without_scheduler_and_module(values: Values, before: Values) -> Values:
    """``values``, with what the scheduler and the module's attributes were ``before``."""
    engine = {**values[_ENGINE], "lr_scheduler": before[_ENGINE]["lr_scheduler"]}
    return {**values, _ENGINE: engine, _MODULE: before[_MODULE]}


def newly_assigned(values: Values, before: Values) -> Values:
    """The ``values`` that have been assigned since they were as ``before``.

    Raises:
        UnsupportedError: copies of the stage cannot follow; names the attribute and what to do.
    """
    assigned: dict[str, dict[str, Any]] = {}
    for place, mine in values.items():
        known = before.get(place, {})
        changed = {name: value for name, value in mine.items() if not _same(value, known.get(name, _MISSING))}
        if changed:
            _check(place, changed)
            assigned[place] = changed
    return assigned


def replaces_scheduler(values: Values) -> bool:
    """Whether another scheduler is among what was assigned."""
    return "lr_scheduler" in values.get(_ENGINE, {})


_MISSING: Final = object()


def _of_module(module: Any) -> dict[str, Any]:
    own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    own = {name: value for name, value in own.items() if MODULE.get(name) is not OWN}
    own["forward_funcs"] = tuple(own.get("forward_funcs", ()))  # as they are now
    return {**own, **_parts_of(module)}


def _parts_of(module: Any) -> dict[str, nn.Module]:
    """Modules of a ``PipelineModule`` besides its layers, such as a loss function."""
    layers = {*getattr(module, "fwd_map", ()), "tied_modules"}
    return {name: part for name, part in module._modules.items() if name not in layers and part is not None}


def _objects(optimizer: Any) -> dict[str, Any]:
    """Attributes of a torch optimizer that are more than numbers and text; torch's own begin with an underscore."""
    plain = kept_by(optimizer, tensors=False)
    names = {"state", "param_groups", "step", "defaults", *plain}
    return {name: value for name, value in vars(optimizer).items() if name not in names and name[0] != "_"}


def _scalars(holder: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(holder).items() if type(value) in SCALARS}


def _same(mine: Any, other: Any) -> bool:
    if mine is other:
        return True
    if type(mine) is not type(other) or isinstance(mine, nn.Module):
        return False
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(other) and all(map(_same, mine, other))
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(_same(value, other[name]) for name, value in mine.items())
    return isinstance(mine, (*SCALARS, types.MethodType)) and bool(mine == other)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_plain, (*value, *value.values())))
    return all(map(_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, SCALARS)


def _check(place: str, changed: Mapping[str, Any]) -> None:
    """Refuses what copies of the stage cannot follow.

    Raises:
        UnsupportedError: names the attribute and what to do.
    """
    known = {_ENGINE: ENGINE, _MODULE: MODULE}.get(place, {})
    for name, value in changed.items():
        treatment = known.get(name, FOLLOWED)
        if place == _BASIC and not (isinstance(value, types.FunctionType) or _plain(value)):
            treatment = Treatment("refused", "keep in the optimizer's attributes numbers, text and functions only")
        if treatment is FOLLOWED and isinstance(value, nn.Module) and any(True for _ in nn.Module.parameters(value)):
            treatment = Treatment("refused", "its parameters are in no optimizer: give it to the PipelineModule before")
        if treatment.cure:
            raise UnsupportedError(
                f"the script has assigned {place}.{name} after deepspeed.initialize, which copies of its stage cannot "
                f"follow: {treatment.cure}"
            )


def parts_in(values: Values) -> set[str]:
    """Names of modules among what was assigned that the script has given to the ``PipelineModule``."""
    return {name for name, value in values.get(_MODULE, {}).items() if isinstance(value, nn.Module)}


def described(values: Values) -> dict[str, str]:
    """Assigned values as members compare them, by the attributes' names."""
    return {f"{place}.{name}": describe(value) for place, mine in values.items() for name, value in mine.items()}


def give_attributes(values: Values, source: Any, runtime: StageRuntime) -> None:
    """Assigns the same to ``runtime``, another role's, but for the scheduler; ``source``: the script's module."""
    own = runtime.attributes
    if values.get(_MODULE):
        give_to_module(values[_MODULE], source, own["module"])
    if parts_in(values):
        runtime.layers.look_again()
    wrapper = own.get("optimizer")
    for place, mine in values.items():
        if place == _BASIC:
            vars(own["basic_optimizer"]).update(copy.deepcopy(dict(mine)))
        elif place.startswith(_WRAPPER):
            _, _, scaler = place.removeprefix(_WRAPPER).partition(".")
            vars(getattr(wrapper, scaler) if scaler else wrapper).update(mine)


def give_to_module(values: Mapping[str, Any], mine: Any, other: Any) -> None:
    """Assigns to ``other``, another stage's ``PipelineModule``, what the script has assigned to ``mine``."""
    theirs = _parts_of(other)
    copies: dict[int, Any] = {id(mine): other}
    copies.update({id(part): theirs[name] for name, part in _parts_of(mine).items() if name in theirs})
    own = Rebinding(copies)
    for name, value in values.items():
        if isinstance(value, (nn.Module, torch.Tensor)):
            setattr(other, name, copy.deepcopy(value, {id(mine): other}))
        else:
            other._modules.pop(name, None)
            other.__dict__[name] = own.of(value)
    computed = mine.is_checkpointable_results_interval == mine.activation_checkpoint_interval
    if computed and not values.keys().isdisjoint(_OF_PASSES):
        other.is_checkpointable_results_interval = None
        other._precompute_checkpointable_values()


# -- compared by members ------------------------------------------------------------------------------------------


NOT_ALIKE: Final = (
    "the script has not assigned the same attributes on all ranks after deepspeed.initialize, and a member that takes "
    "a stage over computes it with what its own script has assigned (assign them on every rank)"
)


def fingerprint(assigned: Mapping[str, str]) -> int:
    """The fingerprint of what :func:`described` gave of all that was assigned so far: 20 bits; 0 for nothing."""
    return zlib.crc32(repr(sorted(assigned.items())).encode()) & 0xFFFFF if assigned else 0


def agree(count: int, total: float, squares: float) -> bool:
    """Whether ``count`` fingerprints are equal, by their sum and the sum of their squares (Cauchy-Schwarz)."""
    return count * int(squares) == int(total) ** 2


def differing(told: Mapping[str, Mapping[str, str]]) -> str:
    """The attributes that members, by what they have ``told``, have not assigned alike, in words."""
    names = sorted({name for assigned in told.values() for name in assigned})
    found = []
    for name in names:
        values = {member: assigned.get(name, "nothing") for member, assigned in told.items()}
        if len(set(values.values())) > 1:
            found.append(f"{name} ({', '.join(f'{member}: {value}' for member, value in values.items())})")
    return "; ".join(found[:_NAMED])


def describe(value: Any, depth: int = _DEPTH) -> str:
    """A text that is equal for values that scripts on two ranks have assigned alike."""
    if isinstance(value, SCALARS) or not depth:
        return repr(value) if isinstance(value, SCALARS) else type(value).__qualname__
    if torch.is_tensor(value):
        return f"tensor {tuple(value.shape)} {content_checksum(value):08x}"
    if inspect.isfunction(value):
        return f"{value.__module__}.{value.__qualname__}, line {value.__code__.co_firstlineno}"
    if inspect.ismethod(value):
        return f"{type(value.__self__).__qualname__}.{value.__name__}"
    if isinstance(value, functools.partial):
        return f"partial of {describe(value.func, depth - 1)}, {describe((value.args, value.keywords), depth - 1)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(describe(each, depth - 1) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {describe(each, depth - 1)}' for key, each in value.items())}}}"
    return str(value) if isinstance(value, nn.Module) else getattr(value, "__qualname__", type(value).__qualname__)
