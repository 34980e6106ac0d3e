"""The environment of torch's NCCL groups, so that a process outlives a loss.

By default torch takes a failed collective for the end of the process. Here an epoch ends instead: its communicators are
aborted, and the process goes on with others. Names and meanings are those of torch 2.6 to 2.15, which looks at them
when a group is made.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from ..version import torch_version


@dataclass(frozen=True)
class Setting:
    """One variable.

    Attributes:
        name, value: of the variable, where the user has set none.
        why: what it is for.
        old: further names, which torch prefers.
        vital: with another value than this survivors end after a loss, or hang.
        since: of torch, from which on it is set; before it has to have torch's own value, ``0``.
    """

    name: str
    value: str
    why: str
    old: tuple[str, ...] = ()
    vital: bool = True
    since: tuple[int, int] = (0, 0)


SETTINGS = (
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "torch's watchdog leaves a failed collective to the end of the epoch, and does not end the process",
        old=("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "no request for a dump, after which every process that sees it ends itself",
    ),
    Setting(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "0",
        "the watchdog does not sleep four times this long over a failed collective, during which none can be begun",
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "a watchdog that hangs in an abort does not end the process; the agent looks after that",
    ),
    Setting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "an error of the device reaches the thread that computes, and does not end the process in the watchdog",
    ),
    Setting(
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "1",
        "the making of a communicator, and its abort, can be given up; with torch 2.10 and newer, since before "
        "(pytorch/pytorch#153960) jobs hang at random with it",
        since=(2, 10),
    ),
    Setting(
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
        "120",
        "seconds after which torch gives up a communicator that is not there, instead of half an hour",
        vital=False,
    ),
    Setting(
        "NCCL_RUNTIME_CONNECT",
        "0",
        "NCCL connects ranks for all of its algorithms when a communicator is made: else a collective in the middle of "
        "an iteration may have to, which blocks its caller, and no abort wakes that",
        vital=False,
    ),
)

_YES, _NO = ("1", "y", "yes", "t", "true"), ("0", "n", "no", "f", "false")
#: Further variables, values with which survivors end after a loss or hang, and how.
_HARMFUL = (
    ("TORCH_NCCL_DESYNC_DEBUG", _YES, "torch ends a process in which a collective has failed"),
    ("NCCL_DESYNC_DEBUG", _YES, "torch ends a process in which a collective has failed"),
    ("TORCH_DISTRIBUTED_DEBUG", ("detail",), "torch ends a process in which a collective has failed"),
    ("TORCH_NCCL_BLOCKING_WAIT", _YES, "each wait blocks the process, and a loss is seen when its time is over"),
    ("NCCL_BLOCKING_WAIT", _YES, "each wait blocks the process, and a loss is seen when its time is over"),
    ("TORCH_NCCL_PROPAGATE_ERROR", _YES, "a failed collective of one member ends those of all others"),
    ("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", _YES, "torch writes a dump in every abort"),
    ("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", _YES, "torch ends a process in which a collective has taken too long"),
)


def prepare(environ: MutableMapping[str, str]) -> list[str]:
    """Sets in ``environ`` what the user has not, before the first group is made.

    Returns:
        What of the user's own would end survivors of a loss, in words; it stays as it is.
    """
    found = []
    for setting in SETTINGS:
        if setting.since <= torch_version():
            environ.setdefault(setting.name, setting.value)
            wanted = setting.value
        else:
            wanted = "0"
        for name in (setting.name, *setting.old):
            if name in environ and setting.vital and _plain(environ[name]) != wanted:
                found.append(f"{name}={environ[name]}: with {wanted} {setting.why}")
    for name, values, harm in _HARMFUL:
        if environ.get(name, "").lower() in values:
            found.append(f"{name}={environ[name]}: {harm}")
    return found


def _plain(value: str) -> str:
    """``0`` or ``1`` for the words that torch takes for them."""
    return "1" if value.lower() in _YES else "0" if value.lower() in _NO else value
