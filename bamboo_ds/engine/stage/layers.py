"""State that the layers of a stage keep besides their parameters, and change in their passes.

That are buffers, what ``get_extra_state`` gives, and attributes that are numbers (counters, scales) or tensors
(caches). A role's owner sends it with the reduced gradients of every iteration, since redundant passes change it on the
replica as well; of the tensors in attributes it sends those that have changed (:mod:`.attributes`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...bare import bare
from ...errors import UnsupportedError
from ...state import Tree, join, split
from .attributes import PlainTensors, holds_tensors, packed
from .rng import GENERATORS
from .tracing import checksum

logger = logging.getLogger("bamboo_ds")

#: Attributes of layers that are numbers (or ``None``, where there is no number yet), by the layers' names.
Numbers = dict[str, dict[str, Any]]

#: Bytes that layers may keep for a copy of that to be little; or this share of those of their parameters.
_LITTLE, _LITTLE_SHARE = 1 << 20, 0.05

_NUMBERS = frozenset((bool, int, float, NoneType))
#: Attributes that every layer has; whether it is in training mode is not the same on all members.
OF_ALL = frozenset(vars(nn.Module()))


@dataclass
class Changes:
    """The changes of a stage by its script between two operations.

    Attributes:
        count: of iterations, without the first one, before which it did.
        last: steps that were done when it last did; -1: it never has.
    """

    count: int = 0
    last: int = -1

    def note(self, step: int) -> None:
        """Notes a change after so many steps."""
        if step > self.last:
            self.count, self.last = self.count + (step > 0), step

    def follow(self, count: int, last: int) -> None:
        """Follows another copy of the stage, which may have been told less than this one, or more."""
        self.count, self.last = max(self.count, count), max(self.last, last)


class Layers:
    """The layers of one stage.

    Args:
        module: the stage. Its own numbers tell where it is, and belong to its layers as little as its parameters do.

    Attributes:
        generators: of random numbers, that layers keep as attributes, each with its name in the stage.
        began: numbers that every copy of the stage began with; only others have to be told.
        tensors: that layers keep as plain attributes.
        changes: of the stage by its script.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: dict[str, tuple[int, list[str]]] = {}
        self._look()
        self.generators = self._generators()
        self._late: set[str] = set()
        self._sendable: set[str] = set()  # layers whose extra state was seen
        self.parameters = dict(module.named_parameters())
        self.began = self.numbers()
        self.tensors = PlainTensors(self._named)
        self._told: set[str] = set()
        self.changes = Changes()
        self._built = {name: checksum(buffer) for name, buffer in self.buffers().items()}

    def _look(self) -> None:
        modules = list(self._module.named_modules())
        self._modules = [(f"{path}." if path else "", layer) for path, layer in modules]
        self._count = self._counted()
        self._extra = [(p, m) for p, m in modules if type(m).get_extra_state is not nn.Module.get_extra_state]
        # Looked at in every iteration: only names that may be those of numbers, again where there are more of them.
        self._attributes = {path: vars(layer) for path, layer in modules if path}

    def _counted(self) -> int:
        return sum(len(layer._modules) for _, layer in self._modules)

    def _generators(self) -> list[tuple[str, Any]]:
        return [
            (f"{path}{name}", value)
            for path, layer in self._modules
            for name, value in vars(layer).items()
            if isinstance(value, GENERATORS)
        ]

    def _follow(self) -> None:
        """Layers may make parts of their own in their first pass."""
        if self._counted() == self._count:
            return
        known = {path for path, _ in self._modules}
        self._look()
        for path, layer in self._modules:
            own = (*layer._buffers.values(), *layer._parameters.values(), *vars(layer).values())
            if path not in known and any(isinstance(each, (torch.Tensor, *GENERATORS)) for each in own):
                self._late.add(path.removesuffix("."))
        now = self.numbers()
        self.began.update({path: now[path] for path in now if path not in self.began})

    def look_again(self) -> None:
        """The script has put other modules besides the layers into the stage, into every copy of it."""
        self._names.clear()
        self._look()
        self.began.update({path: each for path, each in self.numbers().items() if path not in self.began})
        self._built.update({n: checksum(buffer) for n, buffer in self.buffers().items() if n not in self._built})

    def check(self) -> None:
        """Refuses what layers have made in a pass and other copies of the stage lack until they do that pass.

        Raises:
            UnsupportedError: names it.
        """
        self._follow()
        known = {name for name, _ in self.generators}
        made = {
            f"{path}.{name}"
            for path, (_, names) in self._names.items()
            for name in names
            if isinstance(self._attributes[path].get(name), GENERATORS)
        }
        late = sorted(self._late | (made - known))
        if late:
            raise UnsupportedError(
                f"layers have made {', '.join(late[:10])} in a pass, which other copies of the stage lack until they "
                "have done it themselves: make parts with tensors, and generators, in the layers' constructors"
            )

    def follow_parameters(self) -> None:
        """The stage has gone to another device, where its parameters may be other objects."""
        self.parameters = {n: p for n, p in self._module.named_parameters() if n in self.parameters}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers by their names in the stage."""
        self._follow()
        found = {}
        for path, layer in self._modules:
            for name, buffer in layer._buffers.items():
                if buffer is not None:
                    found[path + name] = buffer
        return found

    def parameters_now(self) -> dict[str, nn.Parameter]:
        """The parameters now; :attr:`parameters` are those of the built stage. A shared one may be here twice."""
        return {
            f"{path}{name}": parameter
            for path, layer in self._modules
            for name, parameter in layer._parameters.items()
            if parameter is not None
        }

    def extra(self) -> dict[str, Tree]:
        """Extra state (``get_extra_state``), by the layers' names.

        Raises:
            UnsupportedError: it cannot be sent, as is seen the first time.
        """
        states = {path: layer.get_extra_state() for path, layer in self._extra}
        for path, layer in self._extra:
            if path not in self._sendable:
                try:
                    split(states[path])
                except UnsupportedError as error:
                    name = f"{path} ({type(layer).__name__})" if path else "the PipelineModule"
                    raise UnsupportedError(f"in what get_extra_state of layer {name} gives, {error}") from None
                self._sendable.add(path)
        return states

    def _named(self) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
        """The attributes of all layers, and the names of those that may be numbers or tensors."""
        for path, attributes in self._attributes.items():
            count, names = self._names.get(path, (0, []))
            if count != len(attributes):
                computed = _computed(attributes)
                names = [name for name in attributes if name not in OF_ALL and name not in computed]
                self._names[path] = len(attributes), names
            yield path, attributes, names

    def numbers(self) -> Numbers:
        """Numbers that layers keep as attributes."""
        return {
            path: {n: attributes[n] for n in names if n in attributes and type(attributes[n]) in _NUMBERS}
            for path, attributes, names in self._named()
        }

    def set_numbers(self, given: Numbers) -> None:
        """Sets ``given`` numbers; all others as every copy of the stage began."""
        now = self.numbers()
        for path, attributes in self._attributes.items():
            began = self.began.get(path, {})
            if now[path] != began:
                # Where the owner has begun with None there may be a tensor by now, which comes after the numbers.
                attributes.update({name: value for name, value in began.items() if name in now[path]})
            attributes.update(given.get(path, {}))

    def set_tensors(self, given: Tree, whole: bool) -> None:
        """Sets tensors in attributes to what another copy of the stage has, all of it or what has changed there."""
        like = next(self._module.parameters(), None)
        device = torch.device("cpu") if like is None else like.device
        self.tensors.put(given, whole, self.began, device)

    def capture(self, parameters: Collection[str] = (), whole: bool = False) -> Tree:
        """The state that the layers keep now; tensors are theirs.

        Args:
            parameters: names of parameters that are to be in it, too.
            whole: also tensors in attributes that have not changed since the copies of the stage were equal.

        Raises:
            UnsupportedError: see :meth:`check`.
        """
        self.check()
        self._tell_objects()
        extra = self.extra()
        return {
            "buffers": {name: bare(buffer) for name, buffer in self.buffers().items()},
            "extra": extra,
            "extra_on": {path: [tensor.device.type for tensor in split(value)[1]] for path, value in extra.items()},
            "numbers": newer(self.numbers(), self.began),
            "tensors": packed(self.tensors.now() if whole else self.tensors.changed()),
            "whole": whole,
            "parameters": {n: bare(self.parameters[n]) for n in sorted(parameters) if n in self.parameters},
            "changes": [self.changes.count, self.changes.last],
        }

    def _tell_objects(self) -> None:
        """Tells, once each, what was a number or ``None`` and has become what no copy of the stage gets."""
        for path, began in self.began.items():
            attributes = self._attributes.get(path, {})
            for name in began:
                value = attributes.get(name)
                if type(value) in _NUMBERS or f"{path}.{name}" in self._told or holds_tensors(value):
                    continue
                self._told.add(f"{path}.{name}")
                if not isinstance(value, GENERATORS):
                    logger.warning(
                        "attribute %r of layer %r, %s at first, has become a %s, which copies of the stage do not get: "
                        "if the layer's results depend on it, keep tensors and numbers in attributes or buffers, or "
                        "give it from get_extra_state",
                        *(name, path, began[name], type(value).__qualname__),
                    )

    def kept(self) -> list[str]:
        """Names of what is not as it was built; another pipeline has seen other batches, and may have other values."""
        changed = [name for name, buffer in self.buffers().items() if self._built.get(name) != checksum(buffer)]
        numbers = newer(self.numbers(), self.began)
        extra = [f"{path}._extra_state" for path in self.extra()]
        named = (f"{path}.{name}" for found in (numbers, self.tensors.made()) for path in found for name in found[path])
        return [*changed, *named, *extra]

    def keep_little(self) -> bool:
        """Whether :meth:`undo` copies little, beside the parameters."""
        kept = sum(buffer.nbytes for buffer in self.buffers().values()) + self.tensors.nbytes()
        return kept <= max(_LITTLE, _LITTLE_SHARE * sum(parameter.nbytes for parameter in self.parameters.values()))

    def undo(self) -> Tree:
        """State with which :meth:`restore` makes the layers keep what they keep now again."""
        return copied(self.capture(whole=True))

    def restore(self, given: Tree) -> None:
        """Takes over what :meth:`capture` gave of another copy of the stage."""
        set_buffers(self._module, given["buffers"])
        self.set_numbers(given["numbers"])
        self.set_tensors(given["tensors"], given["whole"])
        for path, layer in self._extra:
            text, tensors = split(given["extra"][path])
            places = zip(tensors, given["extra_on"][path], strict=True)
            layer.set_extra_state(join(text, [bare(tensor).to(place) for tensor, place in places]))
        with torch.no_grad():
            for name, value in given["parameters"].items():
                bare(self.parameters[name]).copy_(value)
        self.changes.follow(*given["changes"])


def _computed(attributes: Mapping[str, Any]) -> set[str]:
    """Names of attributes that torch computes before each pass from parameters (``weight_norm``, ``prune``)."""
    hooks = attributes.get("_forward_pre_hooks") or {}
    ours = [hook for hook in hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return {str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", "")) for hook in ours}


def merged(mine: Tree, theirs: Tree, names: Collection[str]) -> Tree:
    """State as :meth:`Layers.capture` gave it here, but that of layers called ``names`` as it gave it elsewhere."""

    def of(name: str, whole: bool) -> Tree:
        return theirs if (name if whole else name.rpartition(".")[0]) in names else mine

    result = dict(mine)
    for kind, whole in (("buffers", False), ("extra", True), ("extra_on", True), ("numbers", True), ("tensors", True)):
        either = {**mine[kind], **theirs[kind]}
        result[kind] = {name: of(name, whole)[kind][name] for name in either if name in of(name, whole)[kind]}
    return result


def newer(now: Numbers, before: Numbers) -> Numbers:
    """Entries of ``now`` that are not the same in ``before``."""
    found = {}
    for path, values in now.items():
        old = before.get(path, {})
        if values != old:
            # Equal is what is the same: no number is equal to itself if it is none.
            found[path] = {n: v for n, v in values.items() if n not in old or (v is not old[n] and v != old[n])}
    return found


def copied(tree: Tree) -> Tree:
    """A copy of ``tree`` with tensors of its own."""
    text, tensors = split(tree)
    return join(text, [bare(tensor).clone() for tensor in tensors])


def set_buffers(module: nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Gives ``module`` the values of another one's buffers.

    Layers may make buffers when they first need them, or others (a larger cache of rotary embeddings): what is not here
    or has another shape or type is made.
    """
    if not given:
        return
    own = dict(module.named_buffers(remove_duplicate=False))  # what layers share has a name in each
    with torch.no_grad():
        for name, value in given.items():
            buffer = own.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
                target = _without_repeats(bare(buffer))
                target.copy_(value[tuple(map(slice, target.shape))])
                continue
            path, _, attribute = name.rpartition(".")
            holder = module.get_submodule(path)
            like = next(iter(module.parameters()), value) if buffer is None else buffer
            made = value.to(like.device, copy=True)
            if attribute in holder._buffers:
                holder._buffers[attribute] = made
            else:
                holder.register_buffer(attribute, made, persistent=False)


def _without_repeats(plain: torch.Tensor) -> torch.Tensor:
    """A view of a bare tensor with one of the elements that ``expand`` has made of each."""
    for dim, (size, stride) in enumerate(zip(plain.shape, plain.stride(), strict=True)):
        if stride == 0 and size > 1:
            plain = plain.narrow(dim, 0, 1)
    return plain
