"""What a script changes on its engine between two operations: counters, and learning rates and the like.

It changes them for the role that it runs as, and every member's script does the same; so a member gives the change to
all its roles, replicas among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError
from .runtime import StageRuntime
from .schedulers import put_settings, settings_of

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


def _newer(mine: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mine.items() if name not in before or before[name] != value}
