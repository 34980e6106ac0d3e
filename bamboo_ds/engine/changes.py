"""What a script changes on its engine between two operations: counters, learning rates and the like, weights.

It changes them for the role that it runs as, and every member's script does the same; so a member gives the change of
counters and learning rates to all its roles, replicas among them. Weights are its role's own: those that are changed
travel to the holders of the role's replica at the end of the next iteration, with its reduced gradients. What is set
through ``.data`` escapes this.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedError
from ..topology import Plan
from .layers import Layers, newer
from .runtime import StageRuntime
from .schedulers import put_settings, settings_of

#: What to do instead of changing weights between iterations.
CURE = (
    "do it in the `step` of an optimizer of your own or in the layers' forward passes, which all copies of a stage "
    "do as well"
)
#: What a script may set on the engine; Megatron sets the first one back where a run begins anew from a checkpoint.
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Adjustable:
    """What a script may set, of one role."""

    counters: dict[str, int]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, runtime: StageRuntime) -> Adjustable:
        """Of ``runtime``, whose attributes must be up to date."""
        counters = {name: runtime.attributes[name] for name in _COUNTERS}
        return cls(counters, settings_of(runtime.attributes["basic_optimizer"]))

    def since(self, before: Adjustable) -> Adjustable:
        """What has been set since ``before``.

        Raises:
            UnsupportedError: the optimizer has other groups.
        """
        if len(self.groups) != len(before.groups):
            raise UnsupportedError(
                "the script has changed the number of the optimizer's groups, which replicas cannot follow: give all "
                "groups to deepspeed.initialize"
            )
        return Adjustable(
            _newer(self.counters, before.counters),
            [_newer(mine, old) for mine, old in zip(self.groups, before.groups, strict=True)],
        )

    def give(self, runtime: StageRuntime) -> None:
        """Set the same on ``runtime``.

        Raises:
            UnsupportedError: the groups were set to different values, and ``runtime`` has another number of them.
        """
        runtime.attributes.update(self.counters)
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
    """Parameters, buffers and numbers of the ``layers`` of one stage, as the engine has left them to the script."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers
        named = itertools.chain(layers.parameters.items(), layers.buffers().items())
        # Tensors of inference mode have no versions, and cannot be changed outside of it.
        self._seen = [(name, tensor, tensor._version) for name, tensor in named if not tensor.is_inference()]
        self._numbers = layers.numbers()
        self._gradients = {name: _version(p.grad) for name, p in layers.parameters.items()}

    def changed(self) -> list[str]:
        """Names of those that have been changed since."""
        tensors = [name for name, tensor, version in self._seen if tensor._version != version]
        numbers = newer(self._layers.numbers(), self._numbers)
        return [*tensors, *(f"{layer}.{name}" for layer, names in numbers.items() for name in names)]

    def check_gradients(self) -> None:
        """Refuse what the script has added to gradients since, which other copies of the stage lack.

        Raises:
            UnsupportedError: names the parameters.
        """
        found = []
        for name, parameter in self._layers.parameters.items():
            gradient = parameter.grad
            if gradient is not None and _version(gradient) != self._gradients[name] and bool(gradient.any()):
                found.append(name)
        if found:
            raise UnsupportedError(
                f"the script has added to the gradients of {', '.join(found[:10])} between two calls of its engine, "
                "which copies of the stage lack: compute all of the loss in the pipeline, or set the gradients to None "
                "before train_batch"
            )


def _version(gradient: torch.Tensor | None) -> tuple[int, int] | None:
    return None if gradient is None else (id(gradient), gradient._version)


def check_local(changed: list[str], plan: Plan) -> None:
    """Every stage is to be changed by the script of the member that runs as its rank.

    Raises:
        UnsupportedError: another member has one now.
    """
    away = [str(plan.world.role(rank)) for rank, owner in enumerate(plan.owners) if plan.home(owner) != rank]
    if away:
        raise UnsupportedError(
            f"the script has changed {changed[0]} of its stage between two calls, and nobody does the same to role "
            f"{', '.join(away)}, which another member has taken over: {CURE}"
        )


def _newer(mine: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mine.items() if name not in before or before[name] != value}
