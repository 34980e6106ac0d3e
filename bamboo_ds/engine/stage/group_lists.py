"""Entries of learning-rate schedulers, one for each of their optimizer's groups, of which other stages have others.

Lists of numbers travel with a scheduler's state. Functions cannot, so those of a copy are compared with its owner's by
the code that they were made by and the numbers that it was given.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import lr_scheduler

from ...errors import UnsupportedError
from ...state import SCALARS, Tree
from .references import content_of

_CURE = "give deepspeed.initialize a function that makes the scheduler, lr_scheduler=lambda optimizer: ..."


def fit(scheduler: Any, own: int, others: int) -> None:
    """Gives ``scheduler``, made for ``own`` groups, a rate and a function for each of ``others``.

    Rates are those that its optimizer's groups have; torch's schedulers keep them also where they drive others in turn.

    Raises:
        UnsupportedError: these are more or fewer, and its groups have different functions.
    """
    if own == others:
        return
    for holder in _in_turn(scheduler):
        if isinstance(holder, lr_scheduler.LRScheduler):
            groups = holder.optimizer.param_groups
            rates = {"base_lrs": [g.get("initial_lr", g["lr"]) for g in groups], "_last_lr": [g["lr"] for g in groups]}
            vars(holder).update({name: value for name, value in rates.items() if name in vars(holder)})
    for holder, name, value in _functions(scheduler, own):
        if others and (not own or any(_made_by(each) != _made_by(value[0]) for each in value)):
            raise UnsupportedError(
                f"the learning-rate scheduler {type(scheduler).__name__} has a function of its own for each of the "
                f"optimizer's {own} groups ({name}), and another stage has other groups ({others}): {_CURE}"
            )
        vars(holder)[name] = [copy.deepcopy(value[0]) for _ in range(others)]


def functions_of(scheduler: Any, groups: int) -> Tree:
    """The origins of the functions that ``scheduler`` has for each of its ``groups``."""
    return [[name, [_made_by(each) for each in value]] for _, name, value in _functions(scheduler, groups)]


def compare_functions(scheduler: Any, groups: int, theirs: Tree) -> None:
    """Compares the functions of a replica's ``scheduler`` with its owner's.

    Raises:
        UnsupportedError: they are others.
    """
    mine = functions_of(scheduler, groups)
    if mine != theirs:
        names = sorted({name for name, _ in [*mine, *theirs]})
        raise UnsupportedError(
            f"the learning-rate scheduler {type(scheduler).__name__} has other functions ({', '.join(names)}) for the "
            f"groups of this stage than for those of another one, or gets others when it is made again: {_CURE} that "
            "gives each group its function by the group's settings"
        )


def _in_turn(scheduler: Any) -> Iterator[Any]:
    """``scheduler`` and those that it drives."""
    yield scheduler
    for value in list(vars(scheduler).values()):
        if isinstance(value, (list, tuple)):
            for each in value:
                if hasattr(each, "state_dict"):
                    yield from _in_turn(each)


def _functions(scheduler: Any, groups: int) -> Iterator[tuple[Any, str, Sequence[Any]]]:
    """Lists of functions for each of the groups: what has them, their name, the list."""
    for name, value in list(vars(scheduler).items()):
        if not isinstance(value, (list, tuple)):
            continue
        if any(hasattr(each, "state_dict") for each in value):  # schedulers in turn
            for each in value:
                yield from _functions(each, groups)
        elif _per_group(scheduler, name, value, groups):
            yield scheduler, name, value


def _per_group(scheduler: Any, name: str, value: Sequence[Any], groups: int) -> bool:
    if name == "lr_lambdas" and isinstance(scheduler, (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)):
        return True
    return len(value) == groups and any(map(callable, value))


def _made_by(function: Any) -> str:
    """A text that is equal for functions made by the same code from the same values, as far as these are plain."""
    if isinstance(function, functools.partial):
        return f"{_made_by(function.func)}({_values([*function.args, *sorted(function.keywords.items())])})"
    if inspect.ismethod(function):
        return _made_by(function.__func__)
    if not inspect.isfunction(function):
        return type(function).__qualname__
    given = [*(function.__defaults__ or ()), *(content_of(cell) for cell in function.__closure__ or ())]
    code = function.__code__
    return f"{function.__qualname__}:{code.co_firstlineno}:{code.co_code.hex()}:{code.co_names}({_values(given)})"


def _values(values: Any) -> str:
    return ", ".join(map(_value, values))


def _value(value: Any) -> str:
    if isinstance(value, SCALARS):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{_values(value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{_values(value)}]"
    return _made_by(value) if callable(value) else type(value).__qualname__
