"""Starts Python processes without their imports: forked from this process, which has made them.

Executed as ``fork_server.py`` with a socket as standard input, on which :mod:`tests.support.processes` sends one
request per process. A second server, for runs of stock DeepSpeed, is forked before anything of ours is imported. What
the product starts in such a process, agents and workers, is forked as well. Each process has the command line,
environment, signals, descriptors, session and parent that ``exec`` would have given to it, as it sees them itself and
as others see them in ``/proc``. Three things differ: processes of one server share the seed of ``hash()``, what the
server has imported is imported already, and neither modules nor libraries are taken apart at the end.

A process with further threads is not forked: what it starts is executed as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

#: What training imports, ...
STOCK_MODULES = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",
    "torch.utils.data",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.pipe",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # loads torch's compiler
    "deepspeed.runtime.zero.stage_1_and_2",
)
#: ... and launchers, agents and our engine.
MODULES = (
    "bamboo_ds.cli.main",
    "bamboo_ds.comm.backend",
    "bamboo_ds.control.agent.agent",
    "bamboo_ds.control.agent.assembly",
    "bamboo_ds.control.agent.rejoin",
    "bamboo_ds.control.agent.waiting",
    "bamboo_ds.engine.pipeline_engine",
    "bamboo_ds.launch",
    "bamboo_ds.launchers.join",
    "bamboo_ds.launchers.joined",
    "bamboo_ds.supported",
    "bamboo_ds.worker.channel",
    "bamboo_ds.worker.job",
)
_AGENT, _COMMAND, _SCRIPT = "bamboo_ds.control.agent", "bamboo_ds.cli.main", "bamboo_ds.control.script"
#: Descriptors that a process is given lie above this one until they get their own numbers.
_HIGH_FD = 500
_LARGEST_REQUEST = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


# -- how a process looks from outside -------------------------------------------------------------------------
class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map`` of ``linux/prctl.h``."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_PR_SET_MM, _PR_SET_MM_MAP, _NO_FILE = 35, 14, 2**32 - 1
_PR_SET_PDEATHSIG = 1
#: What the kernel points to must stay.
_shown: list[Any] = []


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Put a command line and an environment into ``/proc`` (prctl(2), PR_SET_MM_MAP).

    Raises:
        OSError: the kernel was built without CONFIG_CHECKPOINT_RESTORE.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in arguments)
    pairs = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    buffer = ctypes.create_string_buffer(words + pairs)
    _shown.append(buffer)
    start = ctypes.addressof(buffer)
    with open("/proc/self/stat") as file:  # proc(5) counts from 1, and the first two fields are cut off here
        field = [0, 0, 0, *file.read().rpartition(")")[2].split()]
    _libc.sbrk.restype = ctypes.c_void_p
    _libc.sbrk.argtypes = [ctypes.c_ssize_t]
    layout = _MemoryMap(
        start_code=int(field[26]),
        end_code=int(field[27]),
        start_stack=int(field[28]),
        start_data=int(field[45]),
        end_data=int(field[46]),
        start_brk=int(field[47]),
        brk=_libc.sbrk(0),
        arg_start=start,
        arg_end=start + len(words),
        env_start=start + len(words),
        env_end=start + len(words) + len(pairs),
        exe_fd=_NO_FILE,
    )
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP) failed")


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def may_fork(words: Sequence[str]) -> bool:
    """Whether this process has no other threads, which its child would lack."""
    return _threads() == 1


# -- becoming another program ---------------------------------------------------------------------------------
def become(arguments: Sequence[str], environment: Mapping[str, str], keep: Collection[int] = ()) -> NoReturn:
    """Run a Python command line in this forked process, as ``execve`` would.

    Args:
        arguments: ``[python, "-u"?, SCRIPT or "-m" MODULE, ...]``.
        environment: the whole of it.
        keep: descriptors that stay open besides 0, 1 and 2.
    """
    try:
        _forget_signals()
        kept = sorted({0, 1, 2, *keep})
        for low, high in zip(kept, [*kept[1:], resource.getrlimit(resource.RLIMIT_NOFILE)[0]], strict=True):
            os.closerange(low + 1, high)
        os.environ.clear()
        os.environ.update(environment)
        show(arguments, environment)
        _forget_parent()
    except BaseException:
        traceback.print_exc()
        os._exit(127)
    arguments = list(arguments)
    program, *rest = _words(arguments)
    if program in ("bamboo", _COMMAND) and rest[:1] == ["join"]:
        arguments, environment = _as_child(arguments)
        os.environ.clear()
        os.environ.update(environment)
        show(arguments, environment)
    _end(_outcome(lambda: _execute(arguments)))


def _end(code: int) -> NoReturn:
    """What the interpreter does at its end, but for taking modules and libraries apart, which takes longest."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    _libc.fflush(None)
    os._exit(code)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as the interpreter's start does
        signal.signal(number, signal.SIG_IGN)


def _forget_parent() -> None:
    """What the processes above have put into modules."""
    import logging

    import numpy
    import torch

    if "bamboo_ds.observe.logs" in sys.modules:
        from bamboo_ds.observe import logs

        logger = logging.getLogger(logs.LOGGER)
        logger.handlers[:], logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
        logs._context = logs.LogContext()
    logging._handlerList.clear()  # type: ignore[attr-defined]  # the end of this process closes no file of theirs
    tempfile.tempdir = None
    _keep_at_exit()
    numpy.random.seed()
    torch.seed()  # as at a start: another one in every process


def _keep_at_exit() -> None:
    """The end of a process removes nothing that one above has made, such as temporary folders."""
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False


def _as_child(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """What ``bamboo join`` executes in the end; does not return if it comes to nothing.

    Its client of etcd has threads, which ``exec`` would end. So a child comes so far, and this process goes on.
    """
    reading, writing = os.pipe()
    me, pid = os.getpid(), os.fork()
    if pid == 0:
        os.close(reading)
        if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0 or os.getppid() != me:
            os._exit(127)

        def execve(path: str, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
            os.write(writing, json.dumps([list(words), dict(environment)]).encode())
            os._exit(0)

        os.execve = execve
        _end(_outcome(lambda: _execute(arguments)))
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not told:
        os._exit(status)
    words, environment = json.loads(told)
    return words, environment


def _words(arguments: Sequence[str]) -> list[str]:
    """The module, or the script's name, that a command line runs, and what it gives to it."""
    program, *rest = arguments[2:] if arguments[1] == "-u" else arguments[1:]
    return rest if program == "-m" else [os.path.basename(program), *rest]


def _execute(arguments: list[str]) -> None:
    rest = arguments[1:]
    if rest[0] == "-u":
        rest = rest[1:]
    sys.orig_argv = arguments
    sys.path[:] = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder] + _path
    ours = _words(arguments)[0] in ("bamboo", _COMMAND, _AGENT)
    subprocess.Popen = ForkingPopen if ours else _Popen  # type: ignore[misc]
    if rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = rest
    sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
    main = ModuleType("__main__")
    main.__file__ = rest[0]
    sys.modules["__main__"] = main
    with open(rest[0], "rb") as file:
        code = compile(file.read(), rest[0], "exec")
    exec(code, main.__dict__)


def _outcome(program: Callable[[], None]) -> int:
    """The exit code of a program that does not end the process itself."""
    try:
        program()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


# -- what such a process starts -------------------------------------------------------------------------------
_Popen: Any = subprocess.Popen
_arguments_of = inspect.signature(subprocess.Popen._execute_child).bind  # type: ignore[attr-defined]


def _is_ours(arguments: Sequence[str]) -> bool:
    return list(arguments[:2]) == [sys.executable, "-m"] and arguments[2] in (_AGENT, _COMMAND)


def is_script(arguments: Sequence[str]) -> bool:
    """Whether that is the command line of a worker that runs a script's file."""
    return list(arguments[:4]) == [sys.executable, "-u", "-m", _SCRIPT] and arguments[4].endswith(".py")


class ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks commands, agents and workers; executes everything else."""

    def _execute_child(self, *arguments: Any) -> None:
        given = _arguments_of(self, *arguments).arguments
        words = given["args"]
        assert not is_script(words) or threading.active_count() == 1, f"an agent has {threading.enumerate()} by now"
        if isinstance(words, str) or not (_is_ours(words) or is_script(words)) or not may_fork(words):
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        pid = os.fork()
        if pid == 0:
            try:
                for fd, mine in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"])):
                    if mine != -1:
                        os.dup2(mine, fd)
                if given["start_new_session"]:
                    os.setsid()
                if given["cwd"] is not None:
                    os.chdir(given["cwd"])
                _forget_signals()
                if given["preexec_fn"] is not None:
                    given["preexec_fn"]()
            except BaseException:
                traceback.print_exc()
                os._exit(127)
            become([os.fsdecode(word) for word in words], dict(given["env"] or os.environ), given["pass_fds"])
        self.pid, self._child_created = pid, True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


# -- the server -----------------------------------------------------------------------------------------------
def _enter_namespace(name: str) -> None:
    """``ip netns exec`` for this process, without its own view of /sys."""
    new_net = 0x40000000
    with open(f"/var/run/netns/{name}") as file:
        if _libc.setns(file.fileno(), new_net) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def _begin(request: dict[str, Any], received: list[int]) -> NoReturn:
    """The new process: take its descriptors and become its program."""
    try:
        os.setsid()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in received]
        for fd, wanted in zip(high, [0, 1, 2, *request["pass_fds"]], strict=True):
            os.dup2(fd, wanted)
        os.chdir(request["cwd"])
        if request["namespace"]:
            _enter_namespace(request["namespace"])
        for number in signal.valid_signals():  # whatever the tests were started with
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    except BaseException:
        traceback.print_exc()
        os._exit(127)
    become(request["arguments"], request["environment"], request["pass_fds"])


def serve(control: socket.socket) -> NoReturn:
    """Until the tests are gone."""
    selector = selectors.DefaultSelector()

    def fork(_: Any) -> None:
        data, received, _, _ = socket.recv_fds(control, _LARGEST_REQUEST, 64)
        if not data:
            sys.exit()
        answer = socket.socket(fileno=received.pop())
        pid = os.fork()
        if pid == 0:
            _begin(json.loads(data), received)
        for fd in received:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(answer, [str(pid).encode()], [pidfd])
        selector.register(pidfd, selectors.EVENT_READ, functools.partial(reap, pid, answer))

    def reap(pid: int, answer: socket.socket, pidfd: int) -> None:
        selector.unregister(pidfd)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(BrokenPipeError), answer:
            answer.send(str(code).encode())

    selector.register(control.fileno(), selectors.EVENT_READ, fork)
    while True:
        for key, _ in selector.select():
            key.data(key.fd)


def _import(modules: Sequence[str]) -> str:
    """Import modules; returns why processes cannot be forked then, if so."""
    gc.disable()  # it would look at all that is being imported again and again
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # in another version
            importlib.import_module(module)
    sys.modules.pop("pynvml", None)  # torch imports it where it is; a process may have a stand-in in its path
    gc.enable()
    gc.freeze()
    _keep_at_exit()  # thousands of torch's operators
    return "" if _threads() == 1 else f"the imports have started {_threads() - 1} threads"


def main() -> None:
    """Import everything, say whether processes can be forked, and serve."""
    global _path
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.pop(0)  # this file's folder
    own = os.environ.get("PYTHONPATH", "").split(":")
    _path = [folder for folder in sys.path if folder not in own]
    problem = _import(STOCK_MODULES)
    try:
        show(sys.orig_argv, os.environ)
    except OSError as error:
        problem = str(error)
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not problem and os.fork() == 0:
        control.close()
        theirs.close()
        serve(ours)
    problem = problem or _import(MODULES)
    sys.modules.pop(_COMMAND, None)  # executed, not imported
    socket.send_fds(control, [json.dumps({"problem": problem}).encode()], [theirs.fileno()])
    theirs.close()
    ours.close()
    serve(control)


_path: list[str] = []

if __name__ == "__main__":
    sys.modules["fork_server"] = sys.modules["__main__"]  # programs take the name of the main module
    main()
