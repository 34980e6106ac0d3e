"""Changes of a script on its engine between two operations: counters, learning rates and the like, weights.

It changes them for the role that it runs as, and every member's script does the same; so a member gives the change of
counters and learning rates to all its roles, replicas among them. Weights are its role's own: those that are changed
travel to the holders of the role's replica at the end of the next iteration, with its reduced gradients. What is set
by methods of ``.data`` escapes this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...bare import bare
from ...errors import UnsupportedError
from ...state import Tree
from ...topology import Plan, Role
from ..stage.layers import Changes, Layers, newer
from ..stage.runtime import StageRuntime
from ..stage.schedulers import Pristine, load_scheduler, put_settings, settings_of
from ..stage.tracing import bits
from .assigned import (
    COUNTERS,
    Values,
    give_attributes,
    newly_assigned,
    replaces_scheduler,
    values_of,
    without_scheduler_and_module,
)

#: What to do instead of changing weights between iterations.
CURE = "do it in the `step` of an optimizer of your own, which all copies of a stage do as well"


@dataclass(frozen=True)
class Adjustable:
    """The settings that a script may change, of one role.

    Attributes:
        runtime: that role's.
        counters: of the engine.
        groups: settings of the optimizer's groups.
        values: attributes.
        position: the state of the scheduler, as text and checksums.
    """

    runtime: StageRuntime
    counters: dict[str, int]
    groups: list[dict[str, Any]]
    values: Values
    position: Any

    @classmethod
    def of(cls, runtime: StageRuntime) -> Adjustable:
        """The settings of ``runtime``, whose attributes must be up to date."""
        own = runtime.attributes
        scheduler, groups = own.get("lr_scheduler"), settings_of(own["basic_optimizer"], nested=True)
        position = None if scheduler is None else bits(scheduler.state_dict())
        return cls(runtime, {name: own[name] for name in COUNTERS}, groups, values_of(runtime), position)

    def as_if(self, before: Values) -> Adjustable:
        """The same, with the scheduler and the module's attributes that there were ``before``, to compare with."""
        return replace(self, values=without_scheduler_and_module(self.values, before))

    def since(self, before: Adjustable, shared: tuple[Any, ...] = ()) -> Adjusted:
        """The settings that have changed since ``before``.

        Args:
            before: of the same role.
            shared: what copies of a scheduler may refer to, as it does.

        Raises:
            UnsupportedError: the optimizer has other groups, or an attribute is one that copies cannot follow.
        """
        if len(self.groups) != len(before.groups):
            raise UnsupportedError(
                "the script has changed the number of the optimizer's groups, which replicas cannot follow: give all "
                "groups to deepspeed.initialize"
            )
        values, own = newly_assigned(self.values, before.values), self.runtime.attributes
        scheduler, replacement, state = own.get("lr_scheduler"), None, None
        if replaces_scheduler(values):
            optimizers = own["basic_optimizer"], own.get("optimizer")
            pristine = None if scheduler is None else Pristine(scheduler, *optimizers, shared)
            replacement = Replacement(self.runtime.pristine, pristine)
        elif scheduler is not None and self.position != before.position:
            state = copy.deepcopy(scheduler.state_dict())
        return Adjusted(
            _newer(self.counters, before.counters),
            [_newer(mine, old) for mine, old in zip(self.groups, before.groups, strict=True)],
            before.groups,
            values,
            own.get("module"),
            replacement,
            state,
        )


@dataclass(frozen=True)
class Replacement:
    """Another scheduler.

    Attributes:
        before: what the one before was made of, if a script has brought it.
        pristine: what the new one was made of; ``None`` without a new one.
    """

    before: Pristine | None
    pristine: Pristine | None


@dataclass(frozen=True)
class Adjusted:
    """The settings that a script has changed between two calls.

    Attributes:
        counters: of the engine.
        groups: settings of the optimizer's groups.
        before: all settings of the groups before.
        values: attributes; the engine's counters are none of them.
        source: the module that they were assigned to.
        replacement: another scheduler, if it was replaced.
        state: of the scheduler, where the script has moved it.
    """

    counters: dict[str, int]
    groups: list[dict[str, Any]]
    before: list[dict[str, Any]]
    values: Values
    source: Any
    replacement: Replacement | None
    state: Tree | None

    def __bool__(self) -> bool:
        return any((self.counters, *self.groups, self.values, self.state is not None))

    def give(self, runtime: StageRuntime) -> None:
        """Sets the same on ``runtime``.

        Raises:
            UnsupportedError: the groups were set to different values, and ``runtime`` has another number of them.
        """
        own = runtime.attributes
        own.update(self.counters)
        self._give_groups(runtime)
        give_attributes(self.values, self.source, runtime)
        if self.replacement is not None:
            made = runtime.pristine = self.replacement.pristine
            own["lr_scheduler"] = None if made is None else made.clone(own["basic_optimizer"], own.get("optimizer"))
        elif self.state is not None:
            load_scheduler(runtime, self.state)

    def check(self, runtime: StageRuntime) -> None:
        """A script sets what its own stage's groups need; another stage's groups may have needed something else.

        Raises:
            UnsupportedError: the groups of ``runtime`` had other values before.
        """
        names = {name for group in self.groups for name in group if any(name in old for old in self.before)}
        if self.replacement is not None or self.state is not None:  # learning rates of later steps depend on them
            names.add("lr")
        theirs = settings_of(runtime.attributes["basic_optimizer"], nested=True)
        for name in sorted(names):
            if not _alike([old.get(name) for old in self.before], [group.get(name) for group in theirs]):
                raise UnsupportedError(
                    f"the script has set {name!r} of the optimizer's groups, or their scheduler, after "
                    f"deepspeed.initialize, and the groups of role {runtime.role} had another {name!r} than those of "
                    "this member's own stage: begin with the same on all stages, or give a scheduler to "
                    "deepspeed.initialize"
                )

    def _give_groups(self, runtime: StageRuntime) -> None:
        if not any(self.groups):
            return
        groups, given = runtime.attributes["basic_optimizer"].param_groups, self.groups
        if len(groups) != len(given):
            if any(each != given[0] for each in given):
                raise UnsupportedError(
                    f"the script has set the optimizer's {len(given)} groups to different values, and the groups of "
                    f"role {runtime.role} are {len(groups)}: set all groups alike, or let a scheduler do it that is "
                    "given to deepspeed.initialize"
                )
            given = given[:1] * len(groups)
        for group, settings in zip(groups, given, strict=True):
            put_settings(group, settings)


class Weights:
    """The state that the ``layers`` of one stage keep, as the engine has left it to the script."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        self._parameters = {name: (p, _count(p)) for name, p in layers.parameters.items()}
        self._buffers = {name: (buffer, _count(buffer)) for name, buffer in layers.buffers().items()}
        self._numbers = layers.numbers()
        self._tensors = layers.tensors.marks()
        self._extra = {path: bits(state) for path, state in layers.extra().items()}
        self._gradients = {name: _version(p.grad) for name, p in layers.parameters.items()}

    def changed(self, new: Collection[str] = ()) -> list[str]:
        """Names of those that have been changed since, or are others now; without those of the ``new`` parts."""
        tensors = [name for name, (tensor, count) in self._parameters.items() if _count(tensor) != count]
        buffers = self._layers.buffers()
        for name in {**self._buffers, **buffers}:
            tensor, count = self._buffers.get(name, (None, None))
            if tensor is None or buffers.get(name) is not tensor or _count(tensor) != count:
                tensors.append(name)
        attributes = newer(self._layers.numbers(), self._numbers), self._layers.tensors.since(self._tensors)
        extra = [path for path, state in self._layers.extra().items() if bits(state) != self._extra.get(path)]
        pairs = [
            *((name, name) for name in tensors),
            *((layer, f"{layer}.{name}") for each in attributes for layer, names in each.items() for name in names),
            *((path, f"the extra state of {path}") for path in extra),
        ]
        return [name for path, name in pairs if path.partition(".")[0] not in new]

    def check_parameters(self) -> None:
        """Refuses parameters in the place of those that the optimizer has.

        Raises:
            UnsupportedError: names them.
        """
        now, known = self._layers.parameters_now(), {id(p) for p, _ in self._parameters.values()}
        replaced = [name for name, (parameter, _) in self._parameters.items() if now.get(name) is not parameter]
        replaced += [name for name, parameter in now.items() if id(parameter) not in known and name not in replaced]
        if replaced:
            raise UnsupportedError(
                f"the script has put other parameters in the place of {', '.join(replaced[:10])} since "
                "deepspeed.initialize, which neither the optimizer nor copies of the stage have: copy their values "
                "(under torch.no_grad: parameter.copy_(values))"
            )

    def check_gradients(self) -> None:
        """Refuses what the script has added to gradients since, which other copies of the stage lack.

        Raises:
            UnsupportedError: names the parameters.
        """
        written = []
        for name, parameter in self._layers.parameters.items():
            gradient = parameter.grad
            if gradient is not None and _version(gradient) != self._gradients[name] and bool(gradient.any()):
                written.append(name)
        if written:
            raise UnsupportedError(
                f"the script has added to the gradients of {', '.join(written[:10])} between two calls of its engine, "
                "which copies of the stage lack: compute all of the loss in the pipeline, or set the gradients to None "
                "before train_batch"
            )


@contextmanager
def unchanged(what: str, layers: Layers, told: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """The body, ``what`` of the script, must leave the parameters of ``layers`` as they are: copies of the stage do not
    follow.

    Args:
        what: what the error names.
        layers: of the stage.
        told: of a parameter, what is compared: :func:`content_checksum`, or :func:`count_of`, which costs nothing.

    Raises:
        UnsupportedError: it has changed some; names them.
    """
    before = {name: told(parameter) for name, parameter in layers.parameters_now().items()}
    yield
    changed = [name for name, parameter in layers.parameters_now().items() if told(parameter) != before.get(name)]
    if changed:
        raise UnsupportedError(
            f"{what} changes {', '.join(changed[:10])}, which copies of the stage do not follow: change a copy "
            "(parameter.detach().clone()), or copy back the very values"
        )


def count_of(tensor: torch.Tensor) -> tuple[int, tuple[int, int]]:
    """A value that differs once ``tensor`` has been changed or replaced, other than by a method of its ``.data``."""
    return id(tensor), _count(tensor)


def _count(tensor: torch.Tensor) -> tuple[int, int]:
    """The count of changes, and the place of the elements, which is another one in another ``.data``.

    Tensors of inference mode do not count changes, and cannot be changed outside of it.
    """
    plain = bare(tensor)
    place = plain.data_ptr() if plain.layout is torch.strided else 0
    return 0 if plain.is_inference() else tensor._version, place


def _version(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def away_from(plan: Plan, own: Role, known: Mapping[Role, Changes], before: int) -> list[Role]:
    """Roles that their scripts would change now, as this member's script has changed ``own``, if they were not lost.

    Args:
        own: the role of this member's stage.
        known: changes of roles when the plan began; those of a role that another member has are none since.
        before: iterations before which the script has changed its stage earlier, when the others did not.
    """
    quiet = {role for role, changes in known.items() if before and not changes.count and role != own}
    return [role for role in without_process(plan) if role not in quiet]


def without_process(plan: Plan) -> list[Role]:
    """Roles of ranks that no process runs as which computes the rank's own stage."""
    return [role for role in plan.world.roles if plan.script_rank(plan.owner(role)) != plan.world.rank(role)]


def _newer(mine: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mine.items() if name not in before or before[name] != value}


def _alike(mine: list[Any], theirs: list[Any]) -> bool:
    """Whether groups of two stages have the same values; where their numbers differ: one value for all."""
    if len(mine) == len(theirs):
        return mine == theirs
    return all(each == mine[0] for each in (*mine, *theirs)) if mine else True
