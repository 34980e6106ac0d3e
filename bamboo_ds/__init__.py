"""bamboo_ds: preemption-resilient pipeline-parallel training, as a plugin for DeepSpeed.

Importing the package imports neither torch nor DeepSpeed; see the README for how to switch it on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .stages import Installer
from .version import __version__
from .worker.plan_changes import PlanView

__all__ = [
    "PlanView",
    "__version__",
    "evaluating_with",
    "for_each_stage",
    "init_distributed",
    "is_replaying",
    "on_plan_change",
    "on_stage_built",
    "speaks_for",
]

_Listener = TypeVar("_Listener", bound=Callable[[PlanView], object])
_Result = TypeVar("_Result")
_Installer = TypeVar("_Installer", bound=Installer)


def on_plan_change(listener: _Listener) -> _Listener:
    """Has ``listener(view)`` called after each change of the plan: a loss, a join, a departure, stages that move.

    For scripts that cache more than DeepSpeed does, such as which ranks live. It is called in the main thread of every
    member, when the new plan is in force and before the interrupted operation goes on, that is inside ``train_batch``
    or whatever else the script was in; on a member that joins also when it is admitted. It must not call collectives
    nor the engine. An exception that it raises is the script's. In a job without a ``"bamboo"`` block it is never
    called.

    Args:
        listener: gets a :class:`~bamboo_ds.worker.plan_changes.PlanView`. Several may be given, and are called in turn.

    Returns:
        ``listener``, so that this can be used as a decorator.
    """
    from .worker import plan_changes as plan_change

    return plan_change.listen(listener)


def on_stage_built(installer: _Installer) -> _Installer:
    """Has ``installer(module, stage)`` called on every copy of a stage that is built: the script's own and replicas.

    For hooks on layers and parameters, which a script would otherwise put on its own stage only. It is called when the
    layers are constructed and before DeepSpeed casts them or makes an optimizer; on the script's own stage inside
    ``deepspeed.initialize``, in a job without a ``"bamboo"`` block too. A hook must use what it is passed, or
    ``module``, and must not draw random numbers.

    Args:
        installer: gets the ``PipelineModule`` with the layers of one stage, and the number of the stage. Several may be
            given before ``deepspeed.initialize``, and are called in turn.

    Returns:
        ``installer``, so that this can be used as a decorator.

    Raises:
        ConfigError: ``deepspeed.initialize`` was called before.
    """
    from . import stages

    return stages.install_with(installer)


def is_replaying() -> bool:
    """Whether the script's calls return what the job has done before this worker joined it.

    Meanwhile ``train_batch`` returns recorded losses at once. A script may want to print or log nothing then.
    Always false in a worker that was there from the start, and in a job without a ``"bamboo"`` block.
    """
    from .worker import job

    return job.is_replaying()


def speaks_for(rank: int) -> bool:
    """Whether what ``rank`` prints, or writes for the whole job, is this process's to say now.

    True in the process that runs as ``rank``; if that is lost, in one survivor: the one that computes the lost rank's
    stage. So between two calls of the engine it is true in exactly one process, which changes with the plan only (see
    :func:`on_plan_change`), and goes back when a member joins as that rank and has caught up. In a job without a
    ``"bamboo"`` block it is true in the process of that rank.

    Args:
        rank: of the script, as ``torch.distributed.get_rank()`` tells it; negative: counted from the last, which is -1.

    Raises:
        ValueError: the job has no such rank.
    """
    from .worker import job

    return job.speaks_for(rank)


def for_each_stage(engine: Any, function: Callable[[Any], _Result]) -> list[_Result]:
    """Calls ``function(engine)`` once for each stage that this process computes now, by rank.

    For files that each rank writes of its stage, such as adapters. In ``function`` the engine is that of the stage:
    ``engine.module`` (use it, not the ``PipelineModule`` that the script has built), ``stage_id``, ``global_rank``,
    ``grid``, ``is_first_stage()`` and ``torch.distributed.get_rank()`` are those of the rank whose stage it is. After
    the loss of a rank the process that computes its stage calls ``function`` for it, also if the loss comes meanwhile;
    then it may be called twice for a stage. When it returns on all ranks, ``function`` has returned for every stage.

    Call it on all ranks. ``function`` may freeze parameters of the stage, or make them trainable, which all copies of
    the stage follow; it must not change anything else of it, nor call collectives, nor methods of the engine such
    as ``train_batch``. What it raises passes through. In a job without a ``"bamboo"`` block it is called once.

    Args:
        engine: what ``deepspeed.initialize`` has returned.
        function: gets the engine.

    Returns:
        What ``function`` has returned, in the order of the ranks; nothing in a standby, and in a worker that replays
        (:func:`is_replaying`): the job has done it before.

    Raises:
        UnsupportedError: ``function`` calls a collective, or the engine.
    """
    visit = getattr(type(engine), "for_each_stage", None)
    return [function(engine)] if visit is None else visit(engine, function)


@contextmanager
def evaluating_with(engine: Any, name: str) -> Iterator[None]:
    """In the body ``engine.eval_batch`` computes with weights that the optimizer keeps, such as averages (EMA).

    The optimizer's step keeps them in its state of each trainable parameter, so that every copy of a stage has them::

        class Averaging(torch.optim.AdamW):
            def step(self, closure=None):
                loss = super().step(closure)
                with torch.no_grad():
                    for parameter in (p for group in self.param_groups for p in group["params"]):
                        state = self.state[parameter]
                        state.setdefault("ema", parameter.detach().clone()).lerp_(parameter, 0.001)
                return loss

        with bamboo_ds.evaluating_with(engine, "ema"):
            loss = engine.eval_batch(data)

    Needs an optimizer over fp32 parameters, without ZeRO. In a job without a ``"bamboo"`` block it does the same.

    Args:
        engine: what ``deepspeed.initialize`` has returned.
        name: in the optimizer's state; tensors of the parameters' shapes.

    Raises:
        UnsupportedError: the optimizer has no such state, by the first ``eval_batch``.
    """
    using = getattr(type(engine), "evaluating_with", None)
    if using is not None:
        with using(engine, name):
            yield
        return
    from .engine.iteration.exchanged import exchange, pairs_of

    pairs = pairs_of(engine.optimizer, dict(engine.module.named_parameters()), name)
    exchange(pairs)
    try:
        yield
    finally:
        exchange(pairs)


def init_distributed(config: Any, **kwargs: Any) -> None:
    """``deepspeed.init_distributed`` for scripts that pass their DeepSpeed configuration as a dict.

    A script under ``bamboo run`` or ``bamboo launch``, or whose configuration is a file on its command line
    (``--deepspeed_config``), need not call this.

    Args:
        config: DeepSpeed's configuration, as a mapping or the path of a JSON file.
        **kwargs: passed on to ``deepspeed.init_distributed``.

    Raises:
        ConfigError: the ``"bamboo"`` block is wrong; raised before any process group exists.
    """
    from .autoload import autoload
    from .launch import before_init_distributed

    autoload()
    before_init_distributed(kwargs.get("timeout"), config)
    import deepspeed

    deepspeed.init_distributed(**kwargs)
