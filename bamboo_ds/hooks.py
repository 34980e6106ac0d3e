"""Changes of the import hook to DeepSpeed (see :mod:`bamboo_ds.autoload`)."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from . import stages
from .config import BLOCK, bamboo_config, has_block
from .errors import ConfigError, UnsupportedError
from .patching import MARK, MEGATRON, patch
from .variables import ENV_JOINER, ENV_RESTARTS, LOCAL_RANK_OPTIONS

logger = logging.getLogger("bamboo_ds")


def patch_comm(module: ModuleType) -> None:
    """Wraps ``deepspeed.comm.comm.init_distributed``."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def init_distributed(*args: Any, **kwargs: Any) -> Any:
            from . import launch

            launch.before_init_distributed(kwargs.get("timeout"))
            return original(*args, **kwargs)

        return init_distributed

    patch(module, "init_distributed", wrap)


def patch_engine(module: ModuleType) -> None:
    """Makes ``PipelineEngine(config=...)`` build a bamboo engine where the configuration has the block.

    Args:
        module: DeepSpeed's, of its engines.
    """
    base = module.DeepSpeedEngine
    if MARK in base.__dict__:
        return

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        settings = bamboo_config(config) if config is not None and has_block(config) else None
        model = kwargs.get("model")
        if settings is None and model is not None and hasattr(model, "stage_id"):
            stages.built(model, model.stage_id)
        if settings is None:
            return object.__new__(_further_class(cls))
        built = _engine_class(cls)
        align_local_rank(kwargs.get("args"), os.environ, sys.argv)
        warn_of_fault(metadata.version("deepspeed"), model, kwargs.get("config_class"), os.environ)
        from . import megatron

        megatron.patch_everywhere(MEGATRON)
        return object.__new__(built)

    base.__new__ = new
    setattr(base, MARK, True)


def patch_pipe(module: ModuleType) -> None:
    """Has ``PipelineModule`` say which numbers of ranks would do, in a job that has another one."""

    def wrap(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            if _job() is not None:
                from .supported import check_ranks

                given = signature.bind_partial(self, *args, **kwargs).arguments
                check_ranks(module.dist.get_world_size(), given.get("num_stages"), given.get("topology"))
            original(self, *args, **kwargs)

        return __init__

    patch(module.PipelineModule, "__init__", wrap)


def _job() -> Any:
    """This worker's job; ``None`` in other processes, and before the script has asked for its process groups."""
    jobs = sys.modules.get(f"{__package__}.worker.job")  # not there in a job without the block
    return jobs.job_if_any() if jobs is not None else None


def _further_class(cls: type) -> type:
    """The class of an engine without a block: ``cls``, or in a job that has the block what guards its calls."""
    job = _job()
    if job is None:
        return cls
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from .worker.further import engine_class

    return engine_class(job, cls, issubclass(cls, PipelineEngine))


def _engine_class(cls: type) -> type:
    """The engine class of a job with a block that would otherwise be a ``cls``."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from .engine import BambooPipelineEngine
    from .worker.job import current_job

    if issubclass(cls, BambooPipelineEngine):
        return cls
    if not issubclass(cls, PipelineEngine):
        raise ConfigError(
            f'the configuration has a "{BLOCK}" block, but the model is not a PipelineModule: bamboo_ds keeps '
            f'pipeline-parallel jobs alive. Build the model as deepspeed.pipe.PipelineModule or remove "{BLOCK}"'
        )
    if cls is not PipelineEngine:
        raise UnsupportedError(
            f'with "{BLOCK}" in the configuration deepspeed.initialize(model=…) makes the engine, of DeepSpeed\'s '
            f"PipelineEngine. The script makes a {cls.__name__} ({_place(cls)}) instead: leave that out, and do what "
            "it adds around the calls of the engine that deepspeed.initialize returns"
        )
    current_job()
    return BambooPipelineEngine


def _place(cls: type) -> str:
    """The place where a class is defined."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):  # there is no file
        return cls.__module__


def warn_of_fault(version: str, model: Any, config: Any, environ: Mapping[str, str]) -> None:
    """Says once in a job, as rank 0, what DeepSpeed itself computes wrongly in the ``version`` that is installed.

    Args:
        model: a ``PipelineModule``.
        config: DeepSpeed's own of the engine; ``None``: it is not known.
    """
    from .supported import CURE_OF_FAULTS, fault_of_deepspeed

    first = getattr(model, "global_rank", None) == 0 and not (environ.get(ENV_JOINER) or environ.get(ENV_RESTARTS))
    fault = fault_of_deepspeed(version) if first else None
    if fault is not None and getattr(config, "gradient_accumulation_steps", 1) > 1:
        logger.warning("%s; %s", fault, CURE_OF_FAULTS)


def align_local_rank(arguments: Any, environ: Mapping[str, str], argv: Sequence[str]) -> None:
    """Gives the script's ``arguments`` the local rank that DeepSpeed goes by, where the option's default stands there.

    DeepSpeed refuses another one, but its own launcher alone gives each process the option.
    """
    local = environ.get("LOCAL_RANK", "")
    given = any(each.partition("=")[0] in LOCAL_RANK_OPTIONS for each in argv)
    found = getattr(arguments, "local_rank", None)
    if given or not local.isdecimal() or type(found) is not int or found < 0 or found == int(local):
        return
    logger.warning(
        "args.local_rank is %d, the default of the script's own option, since no --local_rank is on the command line. "
        "It is set to LOCAL_RANK now; where the script needs it before deepspeed.initialize it should read LOCAL_RANK",
        found,
    )
    arguments.local_rank = int(local)
