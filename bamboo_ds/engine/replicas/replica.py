"""Replicas: building another stage's module, and copying state into it."""

from __future__ import annotations

import copy
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.module import LayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn

from ...bare import bare
from ...errors import ProtocolError, UnsupportedError
from ...state import SCALARS, Tree
from ..stage.references import Rebinding
from ..stage.rng import left_alone
from ..stage.runtime import StageRuntime
from ..stage.schedulers import capture_scheduler, restore_scheduler
from ..stage.tracing import content_checksum
from ..stage.work import Verification


def build_stage_module(module: Any, stage: int, device: torch.device) -> Any:
    """Another stage of the PipelineModule ``module``, freshly built and not initialised to anything in particular.

    The constructor of ``PipelineModule`` runs collectives, so the instance is put together without it:
    attributes of the original are shared, its layers are built from the same specs. What was given as module instances
    or parameters is copied, since the original belongs to another role; methods of the original become its own. Leaves
    the script's random numbers alone.
    """
    kind: Any = type(module)
    other = kind.__new__(kind)
    nn.Module.__init__(other)
    fresh = set(other.__dict__)
    shared = {k: v for k, v in module.__dict__.items() if k not in fresh}
    other.__dict__.update(shared)
    copies: dict[int, Any] = {id(module): other}  # what refers to the original is to refer to this one
    # What the module has besides its layers: a loss function that is a module, parts that a subclass added.
    layers = {*module.fwd_map, "tied_modules"}
    for name, child in module._modules.items():
        if name not in layers:
            other.add_module(name, _copied(child, f"part {name!r} of the PipelineModule", copies))
    for name, parameter in module._parameters.items():
        other.register_parameter(name, _copied(parameter, f"parameter {name!r} of the PipelineModule", copies))
    for name, buffer in module._buffers.items():
        other.register_buffer(name, copy.deepcopy(buffer), persistent=name not in module._non_persistent_buffers_set)
    own = Rebinding(copies)
    other.__dict__.update({name: own.of(value) for name, value in shared.items()})
    other.stage_id = stage
    other._local_start, other._local_stop = module.parts[stage], module.parts[stage + 1]
    other.forward_funcs, other.fwd_map = [], {}
    other.tied_modules, other.tied_weight_attrs, other.tied_comms = nn.ModuleDict(), {}, {}
    other.micro_offset = 0
    specs = list(module._layer_specs)
    for index in range(other._local_start, other._local_stop):
        specs[index] = with_own_parts(own.of(specs[index]), copies, f"layer {index}")
    other._layer_specs = specs
    other.seed_layers = False  # it would seed every generator of the process
    with left_alone(device):
        try:
            other._build()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the constructor of a layer raises
            number = other._local_start + len(other.forward_funcs)
            raise UnsupportedError(
                f"layer {number} ({_called(specs[number])}) cannot be built again for a copy of stage {stage} "
                f"({type(error).__name__}: {error}). Constructors of layers run once for each copy, also in processes "
                "of other stages: let them use only what every rank's script has"
            ) from error
    other._layer_specs, other.seed_layers = module._layer_specs, module.seed_layers
    names = list(module._modules)
    for name in names[names.index("tied_modules") :]:
        if name not in layers:  # added by a subclass when it had its layers: states are lists in the modules' order
            other._modules[name] = other._modules.pop(name)
    other.to(device)
    other.is_checkpointable_results, other.is_checkpointable_results_interval = [], None
    if other.activation_checkpoint_interval > 0:
        other._precompute_checkpointable_values()
    return other


def _called(spec: Any) -> str:
    """The class of a layer, by its spec, or the name of a function."""
    kind = spec.typename if isinstance(spec, LayerSpec) else spec if callable(spec) else type(spec)
    return str(getattr(kind, "__name__", type(kind).__name__))


def _copied(value: Any, what: str, copies: dict[int, Any]) -> Any:
    """A copy of a module or a tensor, with the marks that a script has put on parameters, such as names in files.

    torch copies no attributes of parameters.

    Args:
        what: it is in the stage, for errors.
        copies: what was copied before, by ``id``.

    Raises:
        UnsupportedError: it cannot be copied; names the attribute that is why.
    """
    try:
        copied = copy.deepcopy(value, copies)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a script's object makes of being copied
        raise UnsupportedError(
            f"{what} ({type(value).__name__}) cannot be copied, so that no replica of its stage can have it"
            f"{_culprit(value)} ({type(error).__name__}: {error}). Give the class of the layer and its arguments "
            "(LayerSpec), make it anew in the layer's constructor, or keep it outside of the layer"
        ) from error
    for original in value.parameters() if isinstance(value, nn.Module) else [value]:
        if id(original) in copies:
            marks = {name: mark for name, mark in vars(original).items() if isinstance(mark, SCALARS)}
            vars(copies[id(original)]).update(marks)
    return copied


def _culprit(value: Any) -> str:
    """The attribute of a module that cannot be copied."""
    for path, part in value.named_modules() if isinstance(value, nn.Module) else ():
        for name, attribute in vars(part).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(attribute)
            except Exception:  # as above
                return f": because of attribute {f'{path}.' if path else ''}{name}, a {type(attribute).__name__}"
    return ""


def with_own_parts(spec: Any, copies: dict[int, Any], what: str = "a layer") -> Any:
    """``spec`` with copies of modules and parameters among its arguments, which the layers of another role use.

    Args:
        copies: what was copied before, by ``id``; specs of a stage that share a part go on sharing it.
        what: it is, for errors.
    """
    if isinstance(spec, nn.Module):
        return _copied(spec, what, copies)
    if not isinstance(spec, LayerSpec):
        return spec
    parts = (nn.Module, torch.Tensor)
    if not any(isinstance(each, parts) for each in (*spec.module_args, *spec.module_kwargs.values())):
        return spec
    own: Any = copy.copy(spec)
    what = f"an argument of {what} ({_called(spec)})"
    own.module_args = tuple(_copied(v, what, copies) if isinstance(v, parts) else v for v in spec.module_args)
    own.module_kwargs = {
        n: _copied(v, what, copies) if isinstance(v, parts) else v for n, v in spec.module_kwargs.items()
    }
    return own


def structure_of(module: nn.Module) -> dict[str, str]:
    """The kinds of a stage's parts, by name, which all copies must have alike."""
    found = {}
    for name, part in module.named_modules():
        own = ", its forward is one of the script's" if "forward" in vars(part) else ""
        found[name or "the PipelineModule"] = f"{type(part).__qualname__}{own}"
    return found


def check_structure(module: nn.Module, state: Tree) -> None:
    """Compares ``module``, a copy of a stage, with its owner's, whose ``state`` is what :func:`capture` gave.

    Raises:
        UnsupportedError: the script has changed the owner's after its layers were built.
    """
    mine, theirs = structure_of(module), state["structure"]
    names, given = [name for name, _ in module.named_parameters()], state["names"]
    different = [f"{n} is {theirs[n]}, in the copy {mine[n]}" for n in mine if theirs.get(n, mine[n]) != mine[n]]
    different += [f"only the owner has parameter {name}" for name in given if name not in names]
    different += [f"only the copy has parameter {name}" for name in names if name not in given]
    if different:
        raise UnsupportedError(
            f"the script has changed layers of its stage after they were built, which copies of the stage lack: "
            f"{'; '.join(different[:10])}. Do it (parametrizations, shared weights, other forwards) in the layers' "
            "constructors, or in a function that you give to bamboo_ds.on_stage_built before deepspeed.initialize: it "
            "is called on every copy"
        )


def group_names(runtime: StageRuntime) -> list[list[str]]:
    """Names of the parameters of each group of the runtime's optimizer."""
    names = {id(p): n for n, p in runtime.module.named_parameters()}
    try:
        return [[names[id(p)] for p in group] for group in runtime.optimizer.groups()]
    except KeyError as error:
        raise UnsupportedError(
            "the optimizer holds parameters that do not belong to the pipeline module; give it only those"
        ) from error


#: Counters that belong to a role's state.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def capture(runtime: StageRuntime) -> Tree:
    """The role's full state: what a replica must equal. The runtime's attributes must be up to date.

    In an iteration it is what it was before the first pass, and is until the optimizer's step.
    """
    return {
        "groups": group_names(runtime),
        "structure": structure_of(runtime.module),
        "names": [name for name, _ in runtime.module.named_parameters()],
        "trains": runtime.trains(),
        "sliced": [n for n, p in runtime.module.named_parameters() if is_model_parallel_parameter(p)],
        "parameters": [bare(p) for p in runtime.module.parameters()],
        "layers": runtime.share.first_layers or runtime.layers.capture(whole=True),
        "began": runtime.layers.began,
        "optimizer": runtime.optimizer.capture(),
        "scheduler": capture_scheduler(runtime),
        "counters": {name: runtime.attributes[name] for name in _COUNTERS},
    }


def restore(runtime: StageRuntime, state: Tree) -> None:
    """Makes ``runtime`` equal to the state that :func:`capture` gave on its owner."""
    runtime.pending = None  # of the state before
    parameters = list(runtime.module.parameters())
    if len(parameters) != len(state["parameters"]):
        raise ProtocolError(
            f"replica of role {runtime.role} has {len(parameters)} parameters, its owner has "
            f"{len(state['parameters'])}: do all members build the same model?"
        )
    with torch.no_grad():
        for name, target, source in zip(state["names"], parameters, state["parameters"], strict=True):
            if target.shape != source.shape:
                raise ProtocolError(
                    f"parameter {name} of stage {runtime.role.stage} has shape {tuple(source.shape)} on its owner, and "
                    f"{tuple(target.shape)} where a copy of the stage is built: do all members build the same model?"
                )
            bare(target).copy_(source)
    runtime.layers.began = state["began"]
    runtime.layers.restore(state["layers"])
    runtime.layers.tensors.settle()
    runtime.train_only(state["trains"])
    restore_scheduler(runtime, state["scheduler"])
    runtime.optimizer.restore(state["optimizer"])  # after the scheduler, which may change the groups
    runtime.attributes.update(state["counters"])
    # What was compared is the state before: the local runtime may have been another member's for long.
    runtime.verification = Verification()


def checksums(runtime: StageRuntime) -> list[int]:
    """CRC-32 of each parameter, buffer and tensor of the optimizer's state, in a fixed order."""
    return [content_checksum(tensor) for tensor in runtime.tensors()]


def shared_checksum(runtime: StageRuntime, values: Sequence[int]) -> int:
    """CRC-32 of what the same stage of other pipelines has equal, by what :func:`checksums` gave: all but buffers."""
    named = zip(runtime.named_tensors(), values, strict=True)
    return combined([value for (name, _), value in named if not name.startswith("buffer ")])


def combined(values: Sequence[int]) -> int:
    """CRC-32 of what :func:`checksums` gave."""
    return zlib.crc32(struct.pack(f"<{len(values)}I", *values))
