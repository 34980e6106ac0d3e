"""The end of a worker's script: its exit code, and what its agent and its peers are told."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..devices.errors import is_device_error
from ..errors import (
    EXIT_CORRUPT,
    EXIT_DEVICE,
    EXIT_EVICTED,
    EXIT_FATAL_LOSS,
    EXIT_LEFT,
    AbortFailed,
    Corrupt,
    EpochChanged,
    Evicted,
    FatalLoss,
    FurtherEngineLost,
    Isolated,
)
from ..processes import is_ending

if TYPE_CHECKING:
    from ..comm.session import Session
    from .channel import WorkerChannel

#: Seconds that a worker whose script has failed gives its threads to end: the others wait for its end.
_FAILED_CLOSE_S = 0.2
_DEVICE_FAILED = (
    "the device of this worker has failed: the worker stops, and others take over its stages. Look at the device and "
    "its driver's log (dmesg, nvidia-smi -q)"
)


class ScriptExit:
    """Sees each end of the script: its last line, ``sys.exit``, an exception.

    Args:
        channel, session: of the job; closed at the end.
        at_finish: called at a clean exit, while all peers are still there.
        at_end: called at any exit that runs Python's exit handlers, after ``at_finish``.

    Attributes:
        left: the member has left the job, so nothing that its script does now is a failure.
    """

    def __init__(
        self,
        channel: WorkerChannel,
        session: Session,
        at_finish: Callable[[], None],
        at_end: Callable[[], None],
    ) -> None:
        self._channel, self._session = channel, session
        self._at_finish, self._at_end = at_finish, at_end
        self._exit_code: int | None = None
        self.left = False
        self._process = os.getpid()
        self._hook_before = sys.excepthook

    def watch(self) -> None:
        """Learns whether the script ends well: only then its peers may be waited for."""
        previous_exit = sys.exit

        def leave(status: Any = None) -> Any:
            if threading.current_thread() is threading.main_thread():  # else it ends that thread alone
                self._exit_code = 0 if status is None else status if isinstance(status, int) else 1
            previous_exit(status)

        self._hook_before, sys.excepthook = sys.excepthook, self._note_exception
        sys.exit = leave
        # What `exit(1)` calls, which the interpreter has for its prompt and scripts use all the same.
        for name in ("exit", "quit"):
            if hasattr(builtins, name):
                setattr(builtins, name, leave)
        atexit.register(self._finish)

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Takes the hook for exceptions away in the body: torch puts its own around the one that it finds."""
        sys.excepthook = self._hook_before
        try:
            yield
        finally:
            self._hook_before, sys.excepthook = sys.excepthook, self._note_exception

    def note(self, error: BaseException) -> None:
        """Notes what has come out of the script."""
        if os.getpid() != self._process:
            return
        if not isinstance(error, SystemExit):
            self._exit_code = 1  # the script may have replaced the hook that says the rest
            return
        self._exit_code = status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status:
            failed = not self.left and exit_code_of(error) is None
            self._channel.exit_notice(f"exit code {status}", failed=failed, code=status & 0xFF)

    def _note_exception(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Handles an exception that ends the script."""
        if os.getpid() != self._process:
            # A process of a DataLoader, say: it does not speak for the worker, nor has it failed when that ends.
            if not is_ending(self._process):
                self._hook_before(kind, value, trace)
            return
        self._exit_code = 1
        code = exit_code_of(value)
        if self.left:
            # Whatever the script made of the exception: nothing has failed.
            code = EXIT_LEFT
            sys.stderr.write(f"bamboo_ds: {value}\n")
        else:
            self._hook_before(kind, value, trace)
        if code == EXIT_DEVICE and not self.left:
            sys.stderr.write(f"bamboo_ds: {_DEVICE_FAILED}\n")
        self._channel.exit_notice(f"{kind.__name__}: {value}", failed=code is None)
        if code is not None:
            self._channel.close()
            sys.stdout.flush()
            sys.stderr.flush()
            # Python has no other way to give an uncaught exception an exit code.
            os._exit(code)

    def _finish(self) -> None:
        if os.getpid() != self._process:
            return
        try:
            if not self._exit_code and not self.left:
                self._at_finish()
        except BaseException as error:  # which Python would print, and exit with 0
            sys.excepthook(type(error), error, error.__traceback__)
            self._channel.close()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        finally:
            self._at_end()
            # Nobody takes over from a worker that is ending.
            if self._exit_code:
                self._session.close(_FAILED_CLOSE_S)
            else:
                self._session.close()
                if not self.left:
                    self._channel.exit_notice("the script has ended", done=True)
            self._channel.close()


def exit_code_of(error: BaseException | None) -> int | None:
    """The exit code of a worker that ``error`` ends, if it comes from the loss of a member, its place or its device."""
    while error is not None:
        if isinstance(error, (Evicted, Isolated, AbortFailed)):
            return EXIT_EVICTED
        # A loss that has hit what cannot be repeated, too: building the engine, loading, the script's sends.
        if isinstance(error, (FatalLoss, FurtherEngineLost, EpochChanged)):
            return EXIT_FATAL_LOSS
        if isinstance(error, Corrupt):
            return EXIT_CORRUPT
        if is_device_error(error):
            return EXIT_DEVICE
        error = error.__cause__ or error.__context__
    return None
