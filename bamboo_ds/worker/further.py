"""Engines without the block in a job with it: a reference, reward or evaluation model that DeepSpeed runs as ever.

Its ranks are the processes that have built it, and nobody stands in for one of them. While a call of such an engine is
under way its groups are those of these processes alone, and a loss is an error; after a loss a call that needs the lost
rank is one, too. A worker that joins has not been there when the engine was built: it can compute with its own part,
but not with other ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import EpochChanged, FurtherEngineLost, PeerLost, UnsupportedError
from .job import Job

logger = logging.getLogger("bamboo_ds")

#: Attribute of such an engine: its process by rank.
_FOUNDERS = "_bamboo_founders"


def engine_class(job: Job, cls: type, pipeline: bool) -> type:
    """A subclass of ``cls`` whose calls are errors where they would need a rank that is lost.

    Args:
        cls: a class of DeepSpeed's engines, or of a script's.
        pipeline: its engines compute with all ranks.

    Raises:
        UnsupportedError: this worker joins a job that runs, and engines of the class compute with all ranks.
    """
    if job.channel.joiner and pipeline:
        raise UnsupportedError(
            'this script builds a pipeline engine without a "bamboo" block: a worker that joins cannot compute what it '
            "has computed before, nor take part in it. Start the job again with all workers instead"
        )
    return _class_of(job, cls, pipeline)


@functools.cache
def _class_of(job: Job, cls: type, pipeline: bool) -> type:
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] != "torch" and base is not object:
            calls = {name: value for name, value in vars(base).items() if inspect.isfunction(value)}
            body |= {name: _call(job, value, pipeline) for name, value in calls.items() if not name.startswith("_")}
    body["__init__"] = _construction(job, cls, pipeline)
    return type(cls)(cls.__name__, (cls,), body)


def _construction(job: Job, cls: type, pipeline: bool) -> Callable[..., None]:
    @functools.wraps(cls.__init__)  # type: ignore[misc]
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        plan = job.session.plan
        if job.channel.joiner or plan is None:
            logger.warning(
                "%s: this worker joins, so an engine without the block gets no parameters from other ranks: they are "
                "those that the script gives it here",
                cls.__name__,
            )
            self.__dict__[_FOUNDERS] = {}
            cls.__init__(self, *args, **kwargs)  # type: ignore[misc]
            return
        founders = self.__dict__[_FOUNDERS] = dict(
            zip(reversed(plan.script_ranks), reversed(plan.members), strict=True)
        )
        _run(job, founders, pipeline, "__init__", lambda: cls.__init__(self, *args, **kwargs))  # type: ignore[misc]

    return construct


def _call(job: Job, function: Callable[..., Any], pipeline: bool) -> Callable[..., Any]:
    computes = pipeline and function.__name__ in ("train_batch", "eval_batch")

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if job.session.attachment.founders is not None:
            return function(self, *args, **kwargs)
        return _run(job, self.__dict__[_FOUNDERS], computes, function.__name__, lambda: function(self, *args, **kwargs))

    return call


def _run(job: Job, founders: Mapping[int, str], by_all: bool, name: str, body: Callable[[], Any]) -> Any:
    """``body``, which only the processes of ``founders`` take part in.

    Raises:
        FurtherEngineLost: a rank that it needs is lost, or there was a loss meanwhile.
    """
    what = f"{name}()"
    missing = _missing(job, founders)
    if by_all and missing:
        raise FurtherEngineLost(what, _gone(missing), missing)
    on_use = job.channel.need_every_rank if by_all or name != "__init__" else lambda: None
    try:
        with job.session.attachment.among_founders(founders, on_use):
            return body()
    except EpochChanged as error:
        lost = error.member if isinstance(error, PeerLost) else None
        missing = _missing(job, founders) or [rank for rank, member in founders.items() if member == lost]
        found = _gone(missing) if missing else f"a member was lost while it computed ({error})"
        raise FurtherEngineLost(what, found, missing) from error


def _missing(job: Job, founders: Mapping[int, str]) -> list[int]:
    """Ranks whose process is not that which has built the engine, by the newest plan."""
    plan = job.channel.newest_plan or job.session.plan
    members = () if plan is None else plan.members
    return [rank for rank in range(job.channel.world_size) if founders.get(rank) not in members]


def _gone(ranks: list[int]) -> str:
    return f"the processes that were ranks {', '.join(map(str, ranks))} when it was built are gone"
