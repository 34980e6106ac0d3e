"""What learning-rate schedulers have once for each of their optimizer's groups, of which other stages have others."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import lr_scheduler

from ..errors import UnsupportedError

_PLAIN = (bool, int, float, str, type(None))
#: Settings of groups that schedulers change.
_CHANGED = {"params", "lr", "initial_lr", "min_lr", "max_lr", "base_lr", "momentum", "max_momentum", "base_momentum"}

Groups = Sequence[Mapping[str, Any]]


def fit(scheduler: Any, own: Groups, others: Groups) -> None:
    """Give ``scheduler``, made for the groups ``own``, a function for each group of ``others``.

    Lists of numbers come with the state of the scheduler that drives these.

    Raises:
        UnsupportedError: its groups have different functions, and these are other groups.
    """
    attributes = vars(scheduler)
    for name, value in list(attributes.items()):
        if not isinstance(value, (list, tuple)):
            continue
        if any(hasattr(each, "state_dict") for each in value):  # schedulers in turn
            for each in value:
                fit(each, own, others)
        elif _per_group(scheduler, name, value, len(own)) and not _same(value, own, others):
            if not own or not all(_alike(value[0], each) for each in value):
                raise UnsupportedError(
                    f"the learning-rate scheduler {type(scheduler).__name__} has a function of its own for each of the "
                    f"optimizer's {len(own)} groups ({name}), and another stage has other groups ({len(others)}): give "
                    "deepspeed.initialize a function that makes the scheduler, lr_scheduler=lambda optimizer: ..."
                )
            attributes[name] = type(value)([copy.deepcopy(value[0]) for _ in others])


def _per_group(scheduler: Any, name: str, value: Sequence[Any], groups: int) -> bool:
    """Whether ``value`` has something else than numbers for each group."""
    if name == "lr_lambdas" and isinstance(scheduler, (lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR)):
        return True
    return len(value) == groups and any(not _numbers(each) for each in value)


def _numbers(value: Any) -> bool:
    """Whether ``value`` can travel with a state."""
    if isinstance(value, Mapping):
        return all(map(_numbers, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_numbers, value))
    return isinstance(value, _PLAIN) or hasattr(value, "dtype")


def _same(value: Sequence[Any], own: Groups, others: Groups) -> bool:
    """Whether what is there for the groups ``own`` is there for ``others``."""
    return len(own) == len(others) and (
        all(_alike(value[0], each) for each in value)
        or all(_settings(mine) == _settings(other) for mine, other in zip(own, others, strict=True))
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _CHANGED and isinstance(value, _PLAIN)}


def _alike(one: Any, other: Any) -> bool:
    """Whether two functions do the same: they are the same, or were made by the same code from the same values."""
    if one is other:
        return True
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return False
    mine, theirs = ([*(f.__defaults__ or ()), *inspect.getclosurevars(f).nonlocals.items()] for f in (one, other))
    return one.__code__ is other.__code__ and len(mine) == len(theirs) and all(map(_equal, mine, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (isinstance(one, _PLAIN) and isinstance(other, _PLAIN) and one == other)
