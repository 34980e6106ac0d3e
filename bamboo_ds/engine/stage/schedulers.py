"""Learning-rate schedulers of roles: DeepSpeed's, torch's, and objects of the script's own such as Megatron's.

Megatron's ``OptimizerParamScheduler`` counts samples: its ``step`` takes how many, and its ``load_state_dict`` adds the
count that it loads to its own and changes the optimizer's groups. So a scheduler is made as it was before its first
step before a state is loaded into it, and the optimizer's own state comes after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...bare import bare
from ...errors import UnsupportedError
from ...state import Tree
from .group_lists import compare_functions, fit, functions_of
from .portable import completed, portable, same

logger = logging.getLogger(__name__)


def take_step(scheduler: Any, samples: int) -> None:
    """Takes a step as DeepSpeed's engine does.

    Args:
        samples: of the iteration, for schedulers that count them.
    """
    try:
        scheduler.step()
    except TypeError:
        scheduler.step(samples)


class Scheduled(Protocol):
    """The runtime that a scheduler belongs to; see :class:`~.runtime.StageRuntime`."""

    attributes: dict[str, Any]
    pristine: Pristine | None


class Pristine:
    """A script's scheduler as it was when the engine got it, mostly before its first step, to make others of.

    Args:
        optimizer: the one that it drives.
        wrapper: DeepSpeed's optimizer around that one, which the scheduler may have been given instead.
        shared: what every copy may refer to, as it does.
        given: what the script has given to ``deepspeed.initialize``: the scheduler, or a function that makes one.

    Raises:
        UnsupportedError: it cannot be copied.
    """

    def __init__(
        self, scheduler: Any, optimizer: Any, wrapper: Any = None, shared: tuple[Any, ...] = (), given: Any = None
    ) -> None:
        self._shared = {id(each): each for each in shared}
        self._original = self._made_for(scheduler, optimizer, wrapper)
        if not all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict", "load_state_dict")):
            raise UnsupportedError(
                f"the learning-rate scheduler {type(scheduler).__name__} lacks step, state_dict or load_state_dict, so "
                "no replica can have its state: define them"
            )
        self._make: Any = given if given is not scheduler and callable(given) else None
        #: Of schedulers that it has made.
        self._made: list[tuple[weakref.ref[Any], _Original]] = []

    def _made_for(self, scheduler: Any, optimizer: Any, wrapper: Any) -> _Original:
        """A copy of ``scheduler`` as it is now, with what it drives.

        Raises:
            UnsupportedError: it cannot be copied.
        """
        try:
            known = {**self._shared, **{id(each): each for each in (optimizer, wrapper) if each is not None}}
            return _Original(copy.deepcopy(scheduler, known), optimizer, wrapper)
        except Exception as error:  # whatever a script's object makes of being copied
            raise UnsupportedError(
                f"the learning-rate scheduler {type(scheduler).__name__} cannot be copied ({error}), so no replica can "
                "have one: keep in it only what copy.deepcopy can copy"
            ) from error

    def clone(self, optimizer: torch.optim.Optimizer, wrapper: Any = None) -> Any:
        """Another scheduler, which drives ``optimizer``, whose groups are set as before a first step.

        Raises:
            UnsupportedError: none can be made for these groups.
        """
        if self._make is not None:
            scheduler = self._make(optimizer)
            self._made = [each for each in self._made if each[0]() is not None]
            self._made.append((weakref.ref(scheduler), self._made_for(scheduler, optimizer, wrapper)))
            return scheduler
        original = self._original
        scheduler = copy.deepcopy(original.scheduler, {**self._shared, **original.driving(optimizer, wrapper)})
        fit(scheduler, len(original.optimizer.param_groups), len(optimizer.param_groups))
        if hasattr(getattr(original.optimizer, "step", None), "_wrapped_by_lr_sched"):
            # torch's schedulers mark the step of their optimizer and warn about one without the mark.
            step = optimizer.step

            @functools.wraps(step)
            def marked(*args: Any, **kwargs: Any) -> Any:
                optimizer._opt_called = True  # type: ignore[attr-defined]
                return step(*args, **kwargs)

            marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            optimizer.step = marked  # type: ignore[method-assign]
        return scheduler

    def renew(self, scheduler: Any, optimizer: torch.optim.Optimizer, wrapper: Any = None) -> None:
        """Makes ``scheduler``, which drives ``optimizer``, as it was when the engine got it; a script may hold it."""
        original = next((each for known, each in self._made if known() is scheduler), self._original)
        known = {**self._shared, **original.driving(optimizer, wrapper), id(original.scheduler): scheduler}
        attributes = copy.deepcopy(vars(original.scheduler), known)
        vars(scheduler).clear()
        vars(scheduler).update(attributes)
        fit(scheduler, len(original.optimizer.param_groups), len(optimizer.param_groups))


@dataclass(frozen=True)
class _Original:
    """A copy of a scheduler, and the optimizers that the copy refers to."""

    scheduler: Any
    optimizer: Any
    wrapper: Any

    def driving(self, optimizer: Any, wrapper: Any) -> dict[int, Any]:
        """Referents of a copy that drives ``optimizer``, by the ``id`` of its own."""
        around = {} if self.wrapper is None else {id(self.wrapper): wrapper}
        return {**around, id(self.optimizer): optimizer}


def settings_of(optimizer: torch.optim.Optimizer | None, nested: bool = False) -> list[dict[str, Any]]:
    """Learning rate and the like of each of the optimizer's groups; none without an optimizer.

    Args:
        nested: with lists and dictionaries of such.
    """
    kinds = (tuple, list, dict) if nested else (tuple,)
    # Some optimizers count their own steps in the groups.
    return [
        {
            name: _setting(value)
            for name, value in group.items()
            if name not in ("params", "step") and _plain(_setting(value), kinds)
        }
        for group in (optimizer.param_groups if optimizer is not None else ())
    ]


def put_settings(group: dict[str, Any], settings: dict[str, Any]) -> None:
    """Sets what :func:`settings_of` gave of another group; tensors stay the ones that they are."""
    for name, value in settings.items():
        own = group.get(name)
        if torch.is_tensor(own) and isinstance(value, Scalar):
            own.fill_(value.value)
        else:
            group[name] = _unset(value)


@dataclass(frozen=True)
class Scalar:
    """A setting that is a tensor of one element, such as the learning rate of an optimizer in a CUDA graph."""

    value: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _setting(value: Any) -> Any:
    """``value`` as it is now."""
    if torch.is_tensor(value) and bare(value).numel() == 1:
        return Scalar(bare(value).item(), tuple(value.shape), value.dtype, value.device)
    return _parts_by(_setting, value)


def _unset(value: Any) -> Any:
    """The value of a setting."""
    if isinstance(value, Scalar):
        return torch.full(value.shape, value.value, dtype=value.dtype, device=value.device)
    return _parts_by(_unset, value)


def _parts_by(made: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with what is ``made`` of each of its parts, if it has parts."""
    if type(value) is dict:
        return {name: made(part) for name, part in value.items()}
    return type(value)(map(made, value)) if type(value) in (tuple, list) else value


def bases_of(scheduler: Any) -> Tree:
    """Numbers that a scheduler was made with or keeps, by attribute."""
    return {name: value for name, value in vars(scheduler).items() if _numbers(value)}


@dataclass(frozen=True, eq=False)
class SchedulerPosition:
    """The state of a scheduler, and what its optimizer's groups are set to.

    A step may depend on more than that: a scheduler may ask what the script has counted so far, or the script may set
    the groups itself. So a step that is taken late is given the position of another role that has taken it in time.
    """

    state: Tree | None
    groups: list[dict[str, Any]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchedulerPosition) and self.groups == other.groups and same(self.state, other.state)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, runtime: Scheduled) -> SchedulerPosition:
        """The position of ``runtime``, whose attributes must be up to date."""
        scheduler = runtime.attributes["lr_scheduler"]
        state = copy.deepcopy(portable(scheduler.state_dict())) if scheduler is not None else None
        return cls(state, settings_of(runtime.attributes["basic_optimizer"]))

    def assure(self, runtime: Scheduled) -> None:
        """Does as :meth:`restore`, where ``runtime`` is not there already."""
        if SchedulerPosition.of(runtime) != self:
            self.restore(runtime)

    def restore(self, runtime: Scheduled) -> None:
        """Restores this position into ``runtime``, whose optimizer has as many groups."""
        optimizer = runtime.attributes["basic_optimizer"]
        load_scheduler(runtime, self.state)
        for group, given in zip(optimizer.param_groups, self.groups, strict=True):
            put_settings(group, given)


def capture_scheduler(runtime: Scheduled) -> Tree:
    """The state that a copy of the scheduler of ``runtime`` must have, or ``None`` without one."""
    scheduler, optimizer = (runtime.attributes[name] for name in ("lr_scheduler", "basic_optimizer"))
    if scheduler is None:
        return None
    functions = functions_of(scheduler, len(optimizer.param_groups))
    return {"state": portable(scheduler.state_dict()), "bases": bases_of(scheduler), "functions": functions}


def restore_scheduler(runtime: Scheduled, given: Tree) -> None:
    """Gives the scheduler of ``runtime`` what :func:`capture_scheduler` gave of its owner's.

    Raises:
        UnsupportedError: it is another one.
    """
    scheduler, optimizer = (runtime.attributes[name] for name in ("lr_scheduler", "basic_optimizer"))
    if scheduler is None:
        return
    compare_functions(scheduler, len(optimizer.param_groups), given["functions"])

    def put_bases() -> None:
        own = vars(scheduler)
        own.update({name: value for name, value in given["bases"].items() if name in own})

    if runtime.pristine is None:  # DeepSpeed's begin with the learning rate that they find, and keep it for themselves
        put_bases()
    load_scheduler(runtime, given["state"])
    if runtime.pristine is not None:  # some have lists with a number for each group, which their state leaves out
        put_bases()


def load_scheduler(runtime: Scheduled, state: Any) -> None:
    """Gives the scheduler of ``runtime``, if it has one, the ``state`` of another one."""
    scheduler, optimizer = (runtime.attributes[name] for name in ("lr_scheduler", "basic_optimizer"))
    if scheduler is None:
        return
    if runtime.pristine is not None:
        runtime.pristine.renew(scheduler, optimizer, runtime.attributes.get("optimizer"))
    with _quietly():
        scheduler.load_state_dict(completed(state, scheduler.state_dict()))
    if runtime.pristine is not None:
        # What its loading takes from elsewhere, Megatron's count of tokens from the script's arguments.
        own = vars(scheduler)
        own.update({name: value for name, value in state.items() if name in own and _plain(value)})


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Logs what a scheduler prints while a state is loaded into it: the script has not asked for that.

    After an error it is printed, since it may explain the error.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    except BaseException:
        sys.stdout.write(printed.getvalue())
        raise
    if printed.getvalue():
        logger.debug("a scheduler that got another one's state said: %s", printed.getvalue().rstrip())


def _numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_numbers, value))
    return isinstance(value, (int, float)) or (torch.is_tensor(value) and bare(value).numel() == 1)


def _plain(value: Any, kinds: tuple[type, ...] = (tuple,)) -> bool:
    if isinstance(value, dict):
        return dict in kinds and all(_plain(part, kinds) for part in (*value, *value.values()))
    if isinstance(value, (tuple, list)):
        return isinstance(value, kinds) and all(_plain(part, kinds) for part in value)
    return value is None or isinstance(value, (bool, int, float, str, Scalar))
