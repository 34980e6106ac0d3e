"""Optimizers of replicas: made like a member's own, with the state that an owner's has."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from ...bare import all_bare, bare
from ...devices.accelerators import HOST
from ...errors import UnsupportedError
from ...state import Tree, split
from .chunks import is_like
from .portable import completed, travels

#: What every optimizer has of its own, or gets anew when it is cloned.
OWN = {"state", "param_groups", "step"}
#: What all optimizers of a process may share: compiled extensions, groups.
_SHARED = (ModuleType, dist.ProcessGroup)


class PristineOptimizer:
    """A member's own optimizer as the engine got it, mostly before its first step, to make those of replicas of.

    Works for whatever created it: DeepSpeed's configuration, an instance or a callable of the script. What its steps
    keep beside its ``state``, and cannot be sent, is of all steps until now; a copy may get a state of some steps
    before. So it begins as without steps, and the check of the first steps finds that it lacks them.
    """

    def __init__(self, original: torch.optim.Optimizer) -> None:
        self.original = original
        self._blank = type(original).__new__(type(original))
        self._known: dict[int, Any] = {id(original): self._blank}
        #: Attributes as they were, to tell those that are others by now.
        self._given = dict(vars(original))
        for name, value in self._given.items():
            if name in OWN or _is_shared(name, value):
                continue
            # What cannot be copied is refused when a copy is needed, of which it is tried then.
            with contextlib.suppress(Exception):
                self._blank.__dict__[name] = copy.deepcopy(value, self._known)

    def clone(self, module: nn.Module, groups: list[list[str]]) -> torch.optim.Optimizer:
        """Another optimizer like it, without state, over other parameters.

        Hyperparameters of the groups, and attributes that are numbers, come later, with the owner's state.

        Args:
            module: the replica's module.
            groups: names of the parameters of each group.

        Raises:
            UnsupportedError: the optimizer keeps tensors outside its ``state``, or what cannot be copied.
        """
        parameters, original = dict(module.named_parameters()), self.original
        clone = type(original).__new__(type(original))
        known: dict[int, Any] = {id(original): clone, id(self._blank): clone}
        before = vars(self._blank)
        for name, value in vars(original).items():
            if name in OWN:
                continue
            if _is_shared(name, value):
                clone.__dict__[name] = value
                continue
            begun = before[name] if name in before and self._given[name] is value else value
            clone.__dict__[name] = _copied(original, name, begun, known)
        clone.defaults = dict(original.defaults)
        clone.state = defaultdict(dict)
        groups_here = original.param_groups or [original.defaults]
        template = {k: v for k, v in groups_here[0].items() if k != "params"}
        clone.param_groups = [
            {**copy.deepcopy(template), "params": [parameters[name] for name in names]} for names in groups
        ]
        return clone


def _is_shared(name: str, value: Any) -> bool:
    """Whether all optimizers of a process have it: hooks, too, since they use the optimizer that they are passed."""
    return isinstance(value, _SHARED) or (isinstance(value, OrderedDict) and "hooks" in name)


@contextlib.contextmanager
def unstepped(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the body ``optimizer`` takes no steps.

    Those of DeepSpeed's for fp16 have it take one as they are made, for its state: three times as large as masters with
    the gradients for it, on the device. A copy gets the state of its owner, which may have to be elsewhere.
    """
    optimizer.__dict__["step"] = lambda: None
    try:
        yield
    finally:
        del optimizer.__dict__["step"]


def begin_groups(optimizer: torch.optim.Optimizer, given: list[dict[str, Any]]) -> None:
    """Sets the groups of a clone as their owner's, which are ``given``, were before the first step of a scheduler."""
    for group, settings in zip(optimizer.param_groups, given, strict=True):
        group.update({name: copy.deepcopy(value) for name, value in settings.items() if name != "params"})
        if "initial_lr" in group:
            group["lr"] = copy.deepcopy(group["initial_lr"])


def _copied(original: torch.optim.Optimizer, name: str, value: Any, known: dict[int, Any]) -> Any:
    """The attribute ``name`` of an optimizer for its clone.

    Args:
        known: copies that are there already, by the ``id`` of what they were made of.
    """
    kind = type(original).__name__
    try:
        result = copy.deepcopy(value, known)
    except Exception as error:  # whatever a script's object makes of being copied
        raise UnsupportedError(
            f"attribute {name!r} of optimizer {kind} cannot be copied ({error}), so no replica can have one: keep in "
            "it only what copy.deepcopy can copy"
        ) from error
    parameters = any(isinstance(each, nn.Parameter) for each in known.values())
    if parameters or (torch.is_tensor(value) and bare(value).numel() > 1):
        raise UnsupportedError(
            f"optimizer {kind} keeps parameters in its attribute {name!r}: its replica would diverge. Use an optimizer "
            "that keeps all of its state in `state`"
        )
    return result


def kept_by(optimizer: torch.optim.Optimizer | None, tensors: bool = True) -> Tree:
    """Counts that ``optimizer`` keeps in its attributes: numbers, arrays and text, also in lists and dictionaries.

    Args:
        tensors: with tensors of one element.
    """
    if optimizer is None:
        return {}
    known = {*OWN, "defaults"}
    return {name: value for name, value in vars(optimizer).items() if name not in known and _plain(value, tensors)}


def put_kept(optimizer: torch.optim.Optimizer, given: Tree) -> None:
    """Gives ``optimizer`` what :func:`kept_by` gave of another one; dictionaries and tuples stay of their types."""
    own = vars(optimizer)
    for name, value in given.items():
        mine = own.get(name)
        if torch.is_tensor(value):
            own[name] = bare(value).to(mine.device if torch.is_tensor(mine) else value.device, copy=True)
        else:
            own[name] = completed(value, mine)


def _plain(value: Any, tensors: bool) -> bool:
    if isinstance(value, OrderedDict):  # of hooks
        return False
    if isinstance(value, dict):
        return all(_plain(k, tensors) and _plain(v, tensors) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(_plain(each, tensors) for each in value)
    if torch.is_tensor(value):
        return tensors and bare(value).numel() == 1
    return travels(value)


@contextlib.contextmanager
def without_state_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the body a script's hooks on ``state_dict`` and its loading, which are for checkpoints, are not called."""
    own = vars(optimizer)
    kept = {name: hooks for name, hooks in own.items() if "state_dict" in name and name.endswith("_hooks")}
    own.update({name: OrderedDict() for name in kept})
    try:
        yield
    finally:
        own.update(kept)


@contextlib.contextmanager
def without_strangers(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the body there is no state of parameters that are in no group any more.

    An optimizer that makes its state at once has some of the parameters in whose place DeepSpeed has put its masters.
    """
    state = optimizer.state
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strangers = {key: state[key] for key in list(state) if torch.is_tensor(key) and id(key) not in known}
    for key in strangers:
        del state[key]
    try:
        yield
    finally:
        state.update(strangers)


def check_sendable(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Refuses state that no copy of a stage can be sent.

    Args:
        given: the optimizer's ``state_dict``.

    Raises:
        UnsupportedError: names the optimizer, and where in its state it has what.
    """
    try:
        split(given)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} keeps in its state what copies of a stage cannot be sent, so that "
            f"no loss would be survived: {error}"
        ) from None


def load_optimizer(optimizer: torch.optim.Optimizer, given: Tree, resting: bool = False) -> None:
    """Loads ``given``, the ``state_dict`` of another one, with tensors of the types that they have there.

    torch gives all of them the type of their parameter, and moves them to its device. Text and arrays of NumPy are kept
    from it: it would make one of the generator of their parts.

    Args:
        optimizer: gets it.
        given: see above.
        resting: tensors as large as their parameters stay, or come to, host memory.
    """
    state = {k: _without_iterables(v) if type(k) is int else v for k, v in given["state"].items()}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
    loaded = [(p, number, given["state"][number]) for p, number in zip(own, numbers, strict=True) if number in state]
    large: list[dict[str, torch.Tensor]] = []
    for parameter, number, values in loaded:
        here = resting and isinstance(values, dict)
        large.append({n: v.to(HOST) for n, v in values.items() if is_like(parameter, n, v)} if here else {})
        state[number] = {**state[number], **dict.fromkeys(large[-1])} if here else state[number]
    with all_bare(own):
        optimizer.load_state_dict({**given, "state": state})
    for (parameter, _, values), kept in zip(loaded, large, strict=True):
        optimizer.state[parameter] = _retyped(optimizer.state[parameter], values)
        if kept:
            optimizer.state[parameter].update(kept)


def _without_iterables(value: Any) -> Any:
    """``value`` with ``None`` in the place of text and of arrays in it."""
    if isinstance(value, dict):
        return {key: _without_iterables(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_without_iterables, value))
    return None if isinstance(value, Iterable) and not torch.is_tensor(value) else value


def _retyped(loaded: Any, given: Any) -> Any:
    """``loaded`` with the tensors of ``given`` where theirs are of another type, and with its text and arrays."""
    if loaded is None and not torch.is_tensor(given):
        return copy.copy(given)
    if torch.is_tensor(given) and torch.is_tensor(loaded):
        return loaded if loaded.dtype == given.dtype else given.to(loaded.device)
    if isinstance(given, dict) and isinstance(loaded, dict):
        return type(loaded)((k, _retyped(v, given[k])) if k in given else (k, v) for k, v in loaded.items())
    if isinstance(given, (list, tuple)) and isinstance(loaded, (list, tuple)):
        return type(loaded)(_retyped(a, b) for a, b in zip(loaded, given, strict=True))
    return loaded
