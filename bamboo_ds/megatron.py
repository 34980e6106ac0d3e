"""Megatron's output, which goes on when the rank that makes it is lost (see :func:`bamboo_ds.speaks_for`).

Megatron prints on rank 0 and on the last rank, and writes to TensorBoard and W&B on the last one. Its functions that do
so, wherever a version of it defines them, ask here who speaks for that rank. In a job without a block they are as they
were, but for one look.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from . import patching
from .worker import job as jobs

logger = logging.getLogger("bamboo_ds")

Function = Callable[..., Any]

_LAST = -1
#: No rank: what a process is taken for that runs as a rank for which another one speaks.
_NONE = -1

#: Megatron evaluates at this moment.
_evaluating = False


def patch(module: ModuleType) -> None:
    """Wraps what ``module`` defines of Megatron's output."""
    for name, wrap in _WRAPPERS.items():
        if getattr(vars(module).get(name), "__module__", None) == module.__name__:
            patching.patch(module, name, functools.partial(wrap, module=module))


def patch_everywhere(names: Iterable[str]) -> None:
    """Wraps what the modules ``names`` define by now, also where other modules have imported it before."""
    wrapped: dict[int, Any] = {}
    for name in names:
        module = sys.modules.get(name)
        if module is not None:
            patch(module)
            for each in filter(patching.is_patched, map(vars(module).get, _WRAPPERS)):
                wrapped[id(getattr(each, "__wrapped__", each))] = each
    for module in list(sys.modules.values()) if wrapped else ():
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in wrapped:
                setattr(module, name, wrapped[id(value)])


def _as_speaker(rank: int) -> Callable[[Function, ModuleType], Function]:
    """A wrapper of a function that compares the process's rank with ``rank`` and makes no collective."""

    def wrap(original: Function, module: ModuleType) -> Function:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _taken_for(rank):
                return original(*args, **kwargs)

        return call

    return wrap


@contextmanager
def _taken_for(rank: int) -> Iterator[None]:
    """In the body the process has ``rank`` if it speaks for it, and else not."""
    job = jobs.job_of_main_thread()
    if job is None:
        yield
        return
    asked, speaks = job.rank_of(rank), job.speaks_for(rank)
    if speaks == (asked == job.channel.rank):
        yield
        return
    with job.session.attachment.acting_for(asked if speaks else _NONE, _no_collective):
        yield


def _no_collective(ranks: tuple[int, ...], operation: str, arguments: tuple[Any, ...]) -> None:
    raise RuntimeError(f"{operation} in a function of Megatron that is known to print only")


def _writer(setter: str, *settings: str) -> Callable[[Function, ModuleType], Function]:
    """A wrapper of a function that returns a writer, which ``setter`` opens on one rank if ``settings`` say so."""

    def wrap(original: Function, module: ModuleType) -> Function:
        tried = wrote = False

        @functools.wraps(original)
        def get() -> Any:
            nonlocal tried, wrote
            job = jobs.job_of_main_thread()
            if job is None:
                return original()
            speaks = job.speaks_for(_LAST)
            if speaks and not tried and original() is None and job.rank_of(_LAST) != job.channel.rank:
                tried = True
                _open(module, setter, settings, job.rank_of(_LAST))
            writer = original()
            if wrote and not speaks and hasattr(writer, "flush"):
                writer.flush()  # what comes next another process writes
            wrote = speaks
            return writer if speaks else None

        return get

    return wrap


def _open(module: ModuleType, setter: str, settings: tuple[str, ...], rank: int) -> None:
    """Has ``setter`` open a writer in this process as it would on ``rank``; a failure does not end the training."""
    try:
        arguments = copy.copy(module.get_args())
        if any(getattr(arguments, name, None) for name in settings):
            arguments.rank = rank
            getattr(module, setter)(arguments)
    except Exception:
        logger.exception(
            "Megatron's %s failed in the process that speaks for lost rank %d: what it would write is missing until a "
            "member joins as that rank",
            setter,
            rank,
        )


def _timers(original: Any, module: ModuleType) -> Any:
    """``Timers``, whose ``log`` prints on the last rank where no rank is given, and makes collectives before."""
    log = original.log
    if "rank" not in inspect.signature(log).parameters:
        if module.__name__ == "megatron.utils":  # GPT-NeoX's, which looks for rank 0 itself
            original.log = _as_speaker(0)(log, module)
        return original  # others print through print_rank_last

    @functools.wraps(log)
    def speak(self: Any, names: Any, rank: int | None = None, *args: Any, **kwargs: Any) -> Any:
        job = jobs.job_of_main_thread()
        if job is not None:
            rank = job.channel.rank if job.speaks_for(_LAST if rank is None else rank) else _NONE
        return log(self, names, rank, *args, **kwargs)

    original.log = speak
    return original


def _evaluate(original: Function, module: ModuleType) -> Function:
    """``evaluate`` adds losses up on the last stage only: all do it, since another process may have to tell the sum."""

    @functools.wraps(original)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        global _evaluating
        before, _evaluating = _evaluating, True
        try:
            return original(*args, **kwargs)
        finally:
            _evaluating = before

    return evaluate


def _is_last_stage(original: Function, module: ModuleType) -> Function:
    @functools.wraps(original)
    def is_pipeline_last_stage(*args: Any, **kwargs: Any) -> Any:
        job = jobs.job_of_main_thread() if _evaluating else None
        if job is not None and job.session.attachment.context != "engine":
            return True
        return original(*args, **kwargs)

    return is_pipeline_last_stage


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "print_rank_0": _as_speaker(0),
    "is_rank_0": _as_speaker(0),
    "tb_wandb_log": _as_speaker(0),
    "print_rank_last": _as_speaker(_LAST),
    "is_last_rank": _as_speaker(_LAST),
    "get_tensorboard_writer": _writer("_set_tensorboard_writer", "tensorboard_dir"),
    "get_wandb_writer": _writer("_set_wandb_writer", "wandb_project", "wandb_exp_name"),
    "Timers": _timers,
    "evaluate": _evaluate,
    "is_pipeline_last_stage": _is_last_stage,
}
