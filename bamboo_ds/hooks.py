"""What the import hook changes in DeepSpeed (see :mod:`bamboo_ds.autoload`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import stages
from .config import BLOCK, bamboo_config, has_block
from .errors import ConfigError, UnsupportedError
from .patching import MARK, patch


def patch_comm(module: ModuleType) -> None:
    """Wrap ``deepspeed.comm.comm.init_distributed``."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def init_distributed(*args: Any, **kwargs: Any) -> Any:
            from . import launch

            launch.before_init_distributed(kwargs.get("timeout"))
            return original(*args, **kwargs)

        return init_distributed

    patch(module, "init_distributed", wrap)


def patch_engine(module: ModuleType, before: Callable[[], None]) -> None:
    """Make ``PipelineEngine(config=...)`` build a bamboo engine where the configuration has the block.

    Args:
        module: DeepSpeed's, of its engines.
        before: called before such an engine is built.
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
        before()
        return object.__new__(built)

    base.__new__ = new
    setattr(base, MARK, True)


def _further_class(cls: type) -> type:
    """The class of an engine without a block: ``cls``, or in a job that has the block what guards its calls."""
    from .worker.further import engine_class
    from .worker.job import job_if_any

    job = job_if_any()
    if job is None:
        return cls
    from deepspeed.runtime.pipe.engine import PipelineEngine

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
            f'"{BLOCK}" does not support the pipeline engine {cls.__name__}; use a plain PipelineModule'
        )
    current_job()
    return BambooPipelineEngine
