"""Faults that a worker does to itself, since they cannot be done from outside.

Opt-in. Either run the script through this module::

    bamboo run -n 4 -m bamboo_ds.chaos.victim train.py --deepspeed_config ds_config.json

or let it (or a ``sitecustomize``) call :func:`install`, which does nothing unless ``BAMBOO_CHAOS=1`` is set. A daemon
thread then listens on an abstract Unix socket named after the process; it obeys processes of the same user only. One
JSON line asks, one or two answer: ``{"begun": true}`` before the fault, ``{"done": seconds}`` after one that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import runpy
import socket
import struct
import sys
import threading
import time
from typing import Any

ENV_CHAOS = "BAMBOO_CHAOS"
#: Exit code of a worker that was told to exit, unless another one was asked for.
EXIT_CODE = 13
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class ChaosException(RuntimeError):
    """The exception that :mod:`bamboo_ds.chaos` raises in the main thread of a worker."""


def address(pid: int) -> str:
    """The abstract socket of process ``pid``."""
    return f"\0bamboo-chaos-{pid}"


# -- in the worker --------------------------------------------------------------------------------------


def install(force: bool = False) -> bool:
    """Starts to listen if ``BAMBOO_CHAOS=1`` is set, or with ``force``; returns whether this process listens."""
    if not force and os.environ.get(ENV_CHAOS) != "1":
        return False
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(address(os.getpid()))
    except OSError as error:
        server.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return True  # it has been installed before
    server.listen()
    threading.Thread(target=_serve, args=(server,), name="bamboo-chaos", daemon=True).start()
    return True


def _serve(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        # A reader that is gone must not end this thread when the stream is closed.
        with contextlib.suppress(BrokenPipeError), connection, connection.makefile("rw") as stream:
            _, uid, _ = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if uid != os.getuid():
                continue
            try:
                _obey(json.loads(stream.readline()), stream)
            except (OSError, ValueError) as error:  # the asker is gone, or talks nonsense
                print(f"bamboo chaos: not done: {error}", file=sys.stderr)


def _obey(order: dict[str, Any], stream: Any) -> None:
    def say(**words: Any) -> None:
        stream.write(json.dumps(words) + "\n")
        stream.flush()

    what = order["do"]
    if what not in ("hold_gil", "exception", "exit"):
        raise ValueError(f"unknown order {what!r}")
    say(begun=True)
    if what == "hold_gil":
        begin = time.monotonic()
        hold_gil(float(order["seconds"]))
        say(done=time.monotonic() - begin)
    elif what == "exception":
        found = raise_in_main_thread()
        say(done=0.0 if found else None)
    else:
        os._exit(int(order.get("code", EXIT_CODE)))


def hold_gil(seconds: float) -> None:
    """Keeps Python's global lock for ``seconds``: no thread of this process runs Python code meanwhile."""
    # A PyDLL does not release the lock around its calls.
    ctypes.PyDLL(None).usleep(ctypes.c_uint32(int(seconds * 1e6)))


def raise_in_main_thread() -> bool:
    """Raises :class:`ChaosException` in the main thread as soon as that runs Python code; false if it is gone."""
    ident = threading.main_thread().ident
    assert ident is not None
    return ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(ChaosException)) == 1


def main() -> None:
    """``python -m bamboo_ds.chaos.victim SCRIPT ARGUMENTS``: run a script that takes orders."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m bamboo_ds.chaos.victim SCRIPT [ARGUMENTS]")
    install(force=True)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
