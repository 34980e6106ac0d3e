"""C++ extensions that torch compiles when they are first used, as DeepSpeed's Adam is on processors: for minutes.

Of the processes that load one, the first makes a lock file and compiles, the others wait until the file is gone. torch
says nothing of that, and who is killed while it compiles leaves the file, at which every later process waits for ever.
The process that has made the file keeps it open: so it can be told who builds, and whether anybody does.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from . import patching
from .variables import ENV_FD, ENV_LAUNCH
from .worker import job as jobs
from .worker.activity import FIRST_WORD_S

logger = logging.getLogger("bamboo_ds")

_WAITS = "waits for process"


def patch(module: ModuleType) -> None:
    """Wraps ``torch.utils.cpp_extension.load``."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def load(name: str, *args: Any, **kwargs: Any) -> Any:
            job = jobs.job_of_main_thread()
            if job is None and not _is_ours():
                return original(name, *args, **kwargs)
            folder = kwargs.get("build_directory") or module._get_build_directory(name, False)
            doing = functools.partial(state, name, Path(folder, "lock"))
            if job is None:
                with _told_once(doing):
                    return original(name, *args, **kwargs)
            activity = job.channel.activity
            activity.doing = doing
            try:
                with _ended_in_order():
                    return original(name, *args, **kwargs)
            finally:
                activity.doing = None

        return load

    patching.patch(module, "load", wrap)


def _is_ours() -> bool:
    """Whether this process has no job yet, and will ask for one."""
    return ENV_FD in os.environ or ENV_LAUNCH in os.environ


@contextmanager
def _told_once(doing: Callable[[], str]) -> Iterator[None]:
    """Tells once if the body takes long: of those that wait for a process that compiles, that one alone."""

    def tell() -> None:
        does = doing()
        if not does.startswith(_WAITS):
            logger.warning("for %.0f s by now this process %s", FIRST_WORD_S, does)

    timer = threading.Timer(FIRST_WORD_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def state(name: str, lock: Path) -> str:
    """The state of this process, which loads extension ``name``: its work, or what it waits for."""
    try:
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return f"loads the C++ extension {name}"
    from .processes import who_has

    holders = who_has(lock)
    if os.getpid() in holders:
        return f"compiles the C++ extension {name}, which can take minutes; in {lock.parent}"
    if holders:
        return f"{_WAITS} {holders[0]}, which compiles the C++ extension {name}; in {lock.parent}"
    return (
        f"waits for the C++ extension {name} at the lock {lock}, which is {age_s:.0f} s old and which no process has "
        "open that this user can see on this host: a build that was stopped has left it there. Unless another host "
        f"builds in this folder now, stop the job, remove the lock (rm {lock}) and start again"
    )


class _Ended(BaseException):
    """SIGTERM has come."""


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM in the body, which would leave the lock and the compilers, ends both before it ends this process."""
    if (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    from .processes import end_descendants

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it comes once from the agent, perhaps again from a launcher
        end_descendants()
        raise _Ended

    signal.signal(signal.SIGTERM, end)
    ended = False
    try:
        yield
    except _Ended:
        ended = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if ended:
        os.kill(os.getpid(), signal.SIGTERM)
