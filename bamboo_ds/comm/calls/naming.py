"""The names of backends: those of the groups that scripts make, and of ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ...errors import UnsupportedError
from ..c10d import dist, registry
from ..inner import GLOO, NCCL, own_kind

#: Of our backend.
NAME = "bamboo"
#: Backends that a script may name for a group of its own: what carries the tensors of ours.
_CARRIED = {NAME, GLOO, NCCL, dist.Backend.UNDEFINED}
#: Torch's backend that does not communicate.
_NOBODY = "fake"


def naming_what_scripts_know(original: Callable[..., str]) -> Callable[..., str]:
    """``torch.distributed.get_backend`` that says of our groups what carries the tensors of this machine's devices.

    Of a group that was asked for by name it says that name. Scripts choose devices by it, and torch and scripts refuse
    names that they do not know.
    """

    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        name = original(group)
        if name != NAME:
            return name
        asked = (group or registry._get_default_group()).asked
        kind = asked if asked is not None else own_kind()
        return dist.Backend.NCCL if kind == NCCL else dist.Backend.GLOO

    return get_backend


def not_asking_for_devices(original: Callable[..., None]) -> Callable[..., None]:
    """``torch.distributed.monitored_barrier`` for groups that, as ours, have no backends of their own.

    Since 2.14 torch asks a group for the devices of its backends before it calls the group's method.
    """

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        world = registry._world
        target = world.default_pg if group is None else group
        if world.pg_map.get(target, ("",))[0] != NAME or registry.get_backend(target) != GLOO:
            original(group, timeout, wait_all_ranks)
            return
        if timeout is None:
            timeout = registry._get_default_timeout(GLOO)
        limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        target.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)

    return monitored_barrier


def making_groups_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``new_group`` give groups of ours for gloo and NCCL too, where the default group is ours.

    Such a group chooses between the two by each tensor's device, whatever it was asked for. Torch's own would not
    survive a loss, and no member that joins could build it.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group_with_tag(*args: Any, **kwargs: Any) -> Any:
        world = registry._world
        if world.default_pg is None or world.pg_map[world.default_pg][0] != NAME:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        asked = str(call.arguments.get("backend") or NAME).lower()
        if asked == _NOBODY:
            return original(*args, **kwargs)
        other = {pair.rpartition(":")[2] for pair in asked.split(",")} - _CARRIED
        if other:
            raise UnsupportedError(
                f'new_group(backend="{asked}"): a group of {", ".join(sorted(other))} would not survive a loss; name '
                "gloo or nccl in a bamboo job, or no backend"
            )
        call.arguments["backend"] = NAME
        group = original(*call.args, **call.kwargs)
        if group in world.pg_map and asked in (GLOO, NCCL):  # this rank is of the group
            group.asked = asked
        return group

    return new_group_with_tag
