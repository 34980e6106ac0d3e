"""Replacements of DeepSpeed's pipelines by a script: honoured where they mean the same for every copy of a stage.

========================================  ==========================================================================
what the engine has from DeepSpeed as is  DeepSpeed looks it up as ever: replacements take effect (``_broadcast_model``)
:data:`CLIPPING`                          called for each copy of a stage; what it sums up is answered from the commit
:data:`WRAPPED`, a wrapper of DeepSpeed's  called in every pass, in the place of DeepSpeed's handler
schedules                                 compared: they may change when micro-batches are loaded
everything else here                      refused: the engine does it in a way of its own
========================================  ==========================================================================
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from ...config import BLOCK
from ...errors import UnsupportedError
from ..stage.references import content_of, leads_to

#: What scripts call of the engine, and the engine here does in its own way. They may wrap the bound methods.
CALLED = ("train_batch", "eval_batch", "save_checkpoint", "load_checkpoint")
#: DeepSpeed's handlers of instructions. DeepSpeed takes them from its map, the engine here some of them by their names.
HANDLERS: Mapping[type, str] = {
    schedule.LoadMicroBatch: "_exec_load_micro_batch",
    schedule.ForwardPass: "_exec_forward_pass",
    schedule.BackwardPass: "_exec_backward_pass",
    schedule.SendActivation: "_exec_send_activations",
    schedule.RecvActivation: "_exec_recv_activations",
    schedule.SendGrad: "_exec_send_grads",
    schedule.RecvGrad: "_exec_recv_grads",
    schedule.ReduceTiedGrads: "_exec_reduce_tied_grads",
    schedule.ReduceGrads: "_exec_reduce_grads",
    schedule.OptimizerStep: "_exec_optimizer_step",
}
#: Of DeepSpeed's engine, where the engine here does something else, with what only they call.
ENGINE = (
    *HANDLERS.values(),
    *("_exec_schedule", "_aggregate_total_loss", "_next_batch", "_take_model_step"),
    *("_bf16_reduce_grads", "allreduce_gradients", "_send_tensor_meta", "_recv_tensor_meta", "_allocate_zeros"),
    *("_allocate_buffer", "_allocate_or_extend_buffers", "_bcast_pipe_scalar", "_loss_stage_global_rank"),
)
#: What clips gradients in fp32: the engine's method, and the function that it calls.
CLIPPING = ("clip_fp32_gradients", "clip_grad_norm_")
#: Instructions whose handlers compute. A script may put a function around DeepSpeed's into the map.
WRAPPED = (schedule.LoadMicroBatch, schedule.ForwardPass, schedule.BackwardPass)
#: What to do instead of a replacement that is refused, where that is more than to leave it out.
CURES: Mapping[Any, str] = {
    schedule.ReduceGrads: "Optimizer steps inside of backward passes (gradient release) are for jobs without the "
    "block: weights may not change before all stages have done their passes, since a takeover does some of these "
    "again. Step at the end, and leave the replacement out",
    schedule.OptimizerStep: "Put what is to be done with each step into the `step` of an optimizer of your own, which "
    "all copies of a stage call",
}
#: Of ``PipelineModule``.
MODULE = ("get_tied_weights_and_groups", "allreduce_tied_weight_gradients", "_index_tied_modules")
#: Of ``deepspeed.runtime.pipe.p2p``.
P2P = ("send", "recv", "wait", "send_obj", "recv_obj")
#: Of the engine: what makes schedules, of which the instructions are compared.
SCHEDULES = ("_train_schedule", "_inference_schedule")

_NOTHING = object()
#: Where code lies that is no script's.
_LIBRARIES = tuple(
    str(Path(folder).resolve()) + os.sep
    for folder in (
        *(Path(str(module.__file__)).parent for module in (deepspeed, torch)),
        *(Path(__file__).parents[2], Path(sysconfig.get_path("stdlib"))),
    )
)


@dataclass(frozen=True)
class Replaceable:
    """A place where DeepSpeed's own code stands.

    Attributes:
        mapping: a class's, a module's or the instructions'.
        key: the name, or the instruction.
        own: the name of what DeepSpeed has there.
        what: the place, for people.
        value: what is there.
    """

    mapping: Mapping[Any, Any]
    key: Any
    own: str
    what: str
    value: Any

    @property
    def now(self) -> Any:
        """The value that is there now."""
        return self.mapping.get(self.key, _NOTHING)


def _of_class(kind: type, names: tuple[str, ...]) -> Iterator[Replaceable]:
    """Places of methods, also where a class in front has none so far."""
    for name in names:
        if hasattr(kind, name):
            for base in kind.__mro__:
                yield Replaceable(vars(base), name, name, f"{base.__name__}.{name}", vars(base).get(name, _NOTHING))
                if name in vars(base):
                    break


def _of_module(module: ModuleType, names: tuple[str, ...]) -> Iterator[Replaceable]:
    for name in names:
        if hasattr(module, name):
            yield Replaceable(vars(module), name, name, f"{module.__name__}.{name}", vars(module)[name])


def engine_places() -> list[Replaceable]:
    """The places where a replacement is refused."""
    known: Any = PipelineEngine._INSTRUCTION_MAP
    entries = (
        Replaceable(known, kind, own, f"PipelineEngine._INSTRUCTION_MAP[{kind.__name__}]", known.get(kind, _NOTHING))
        for kind, own in HANDLERS.items()
    )
    return [
        *entries,
        *_of_class(PipelineEngine, (*CALLED, *ENGINE, "clip_fp32_gradients")),
        *_of_class(PipelineModule, MODULE),
        *_of_module(engine_module, ("clip_grad_norm_",)),
        *_of_module(p2p, P2P),
    ]


def schedule_places() -> list[Replaceable]:
    """The places where replacements are compared with what they replace."""
    kinds = (schedule.PipeSchedule, schedule.TrainSchedule, schedule.InferenceSchedule)
    methods = (place for kind in kinds for place in _of_class(kind, _methods(kind)))
    return [*methods, *_of_class(PipelineEngine, SCHEDULES), *_of_module(schedule, ("TrainSchedule",))]


def _methods(kind: type) -> tuple[str, ...]:
    own = {name for base in kind.__mro__ for name, value in vars(base).items() if inspect.isfunction(value)}
    return tuple(sorted(own | {"steps", "num_pipe_buffers"}))


class Replacements:
    """Looks for them, once at all code and then at what has changed.

    Args:
        kind: the engine's class.

    Raises:
        UnsupportedError: the script has replaced something already; names it, and the code in its place.
    """

    def __init__(self, kind: type) -> None:
        self._places, self._schedules = engine_places(), schedule_places()
        own = vars(kind)
        self._places += [Replaceable(own, n, n, f"{kind.__name__}.{n}", own.get(n, _NOTHING)) for n in ENGINE]
        self._map = PipelineEngine._INSTRUCTION_MAP
        for place in self._places:
            if is_foreign(place.value, place.own) and not _honoured(place):
                raise _refusal(place.what, place.value, cure=CURES.get(place.key, ""))
        self._clipping = [place for place in self._places if place.key in CLIPPING]
        self._rescheduled = [place for place in self._schedules if is_foreign(place.value, place.own)]
        self._compared: set[Any] = set()

    def check(self, engine: Any) -> None:
        """Refuses what the script has replaced, on classes, in modules or on its ``engine``.

        Raises:
            UnsupportedError: names it, and the code in its place.
        """
        clips = engine.gradient_clipping() > 0 and not (
            engine.fp16_enabled() or engine.bfloat16_enabled() or engine.zero_optimization()
        )
        for place in self._places:
            if place.now is not place.value and not _honoured(place):
                raise _refusal(place.what, place.now, cure=CURES.get(place.key, ""))
        if engine._INSTRUCTION_MAP is not self._map:
            raise _refusal("_INSTRUCTION_MAP of the engine", engine._INSTRUCTION_MAP)
        own = vars(engine)
        for name in (*ENGINE, *(CLIPPING if clips else ())):
            if name in own:
                raise _refusal(f"{name} of the engine", own[name])
        here = [(f"{name} of the engine", own[name]) for name in SCHEDULES if name in own]
        here += [(p.what, p.now) for p in self._schedules if p.mapping.get(p.key, _NOTHING) is not p.value]
        if here or self._rescheduled:
            self._compare(engine, [*here, *((place.what, place.now) for place in self._rescheduled)])

    @property
    def clipping(self) -> bool:
        """Whether gradients are clipped in fp32 by the script's code."""
        return any(is_foreign(place.now, place.own) for place in self._clipping)

    def _compare(self, engine: Any, replaced: list[tuple[str, Any]]) -> None:
        """Compares the instructions of schedules for which the script has ``replaced`` something with DeepSpeed's."""
        sizes = {"micro_batches": engine.micro_batches, "stages": engine.num_stages, "stage_id": engine.stage_id}
        key = (*(id(value) for _, value in replaced), *sizes.values())
        if key in self._compared:
            return
        own = _as_installed()
        for actual, expected in (
            (engine._train_schedule(), own.TrainSchedule(**sizes)),
            (engine._inference_schedule(engine.micro_batches), own.InferenceSchedule(**sizes)),
        ):
            if _instructions(actual) != _instructions(expected):
                what, value = replaced[0]
                raise _refusal(what, value, f": stage {engine.stage_id} has other instructions")
        self._compared.add(key)


def _honoured(place: Replaceable) -> bool:
    """Whether what is in ``place`` now is called, in the place of DeepSpeed's own, for every copy of a stage."""
    wraps = place.key in WRAPPED and leads_to(place.now, vars(PipelineEngine)[place.own])
    return wraps or place.key in CLIPPING


def _as_installed() -> Any:
    """DeepSpeed's module of schedules as no script has changed it."""
    spec = importlib.util.spec_from_file_location(f"{schedule.__name__}_as_installed", str(schedule.__file__))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _instructions(steps: Any) -> tuple[list[Any], list[Any]]:
    """The instructions of a schedule, in order; loads of micro-batches apart, since their time makes no difference."""
    flat = [(type(each).__name__, each.kwargs) for commands in steps.steps() for each in commands]
    loads = [each for each in flat if each[0] == schedule.LoadMicroBatch.__name__]
    return loads, [each for each in flat if each[0] != schedule.LoadMicroBatch.__name__]


def is_foreign(value: Any, own: str) -> bool:
    """Whether ``value`` is not what DeepSpeed calls ``own``: code of a script's, or something else of DeepSpeed's."""
    if value is _NOTHING:
        return False
    named = getattr(value, "__name__", None) == own or "<locals>" in getattr(value, "__qualname__", "")
    return not named or _foreign_code(value) is not None


def _foreign_code(value: Any) -> Any:
    """The part of ``value``, which may be wrapped, whose code is a script's; ``None`` if there is none."""
    if inspect.isclass(value):
        return None if value.__module__.partition(".")[0] == "deepspeed" else value
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    code = getattr(value, "__code__", None)
    if code is None or not str(Path(code.co_filename).resolve()).startswith(_LIBRARIES):
        return value
    inner = [content_of(cell) for cell in value.__closure__ or ()]
    inner = [each for each in inner if inspect.isfunction(each) and each is not value]
    return next(filter(None, map(_foreign_code, inner)), None)


def _refusal(what: str, value: Any, then: str = "", cure: str = "") -> UnsupportedError:
    function = _foreign_code(value) or value
    function = getattr(function, "func", function)  # a partial
    code = getattr(function, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return UnsupportedError(
        f"the script has replaced {what} of DeepSpeed by {name}{place}{then}. It would have no effect, since "
        f'with "{BLOCK}" the engine does this in its own way, for all copies of a stage. '
        + (cure or "Leave the replacement out, or wrap the methods of the engine that the script itself calls")
    )
