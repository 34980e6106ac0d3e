"""Several "hosts" on one machine: network namespaces, each with an address on a common bridge.

Agents run directly in them, as launchers on real hosts would start them. The etcd is outside, at the bridge's address.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from bamboo_ds.config import bamboo_config
from bamboo_ds.control.agent.command import script_command
from bamboo_ds.control.registry.keys import namespace
from bamboo_ds.control.registry.records import LeftRecord, MemberRecord
from bamboo_ds.job_settings import JobSettings, paths_by_name
from bamboo_ds.secret import JobSecret
from bamboo_ds.store.certificates import certificates_of
from bamboo_ds.store.embedded import EmbeddedEtcd

from .jobs import DEADLINE_S, TRAIN, Result, RunningJob, marked
from .patience import Patience
from .processes import Process, parent_pid, start
from .settings import agent as settings_of
from .watching import registered


def ip(*words: str) -> None:
    """Run ``ip``; raises with its message if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@functools.lru_cache(maxsize=1)
def why_not() -> str | None:
    """Why there can be no namespaces here, and what to do about it; ``None`` if there can."""
    if shutil.which("ip") is None:
        return "the command `ip` is missing: install iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root: run these tests as root, or under `sudo -E` or `unshare -rnm`"
    try:
        with Hosts(1) as hosts:
            ip("netns", "exec", hosts.name(0), "true")
    except AssertionError as error:
        return f"no network namespaces here: {error}; CAP_SYS_ADMIN is needed"
    return None


class Hosts:
    """A bridge and ``count`` namespaces with one address each. Use it in a ``with`` statement.

    Attributes:
        outside: address of the bridge, that everybody reaches.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._tag = f"bds{os.urandom(2).hex()}"
        self._net = ""
        self._undo = ExitStack()

    @property
    def outside(self) -> str:
        return f"{self._net}.254"

    def name(self, host: int) -> str:
        """The namespace of a host."""
        return f"{self._tag}-{host}"

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"{self._net}.{host + 1}"

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as guard:
            guard.callback(self._undo.close)
            self._build()
            guard.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _build(self) -> None:
        taken = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True).stdout
        nets = [f"10.77.{number}" for number in range(256)]
        self._net = random.choice([net for net in nets if f"{net}." not in taken])
        ip("link", "add", self._tag, "type", "bridge")
        self._undo.callback(ip, "link", "delete", self._tag)
        ip("address", "add", f"{self.outside}/24", "dev", self._tag)
        ip("link", "set", self._tag, "up")
        for host in range(self.count):
            name, cable = self.name(host), self._cable(host)
            ip("netns", "add", name)
            self._undo.callback(ip, "netns", "delete", name)
            self._undo.callback(self.kill, host)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", cable, "master", self._tag, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")

    def _cable(self, host: int) -> str:
        return f"{self._tag}v{host}"

    def pids(self, host: int) -> list[int]:
        """The processes on a host."""
        done = subprocess.run(["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    def kill(self, host: int) -> None:
        """SIGKILL to all processes of a host, and to what they have begun meanwhile; returns when they are gone."""
        patience = Patience(30)
        while pids := self.pids(host):
            assert not patience.over(), f"processes {pids} do not end"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, host: int) -> None:
        """Pull the cable: nothing that is sent arrives, and nobody is told so."""
        ip("link", "set", self._cable(host), "down")

    def mend(self, host: int) -> None:
        """Put the cable back."""
        ip("link", "set", self._cable(host), "up")

    def separate(self, one: int, other: int) -> None:
        """What one of two hosts sends to the other is lost; both reach everybody else."""
        for sender, receiver in ((one, other), (other, one)):
            ip("-n", self.name(sender), "route", "add", "blackhole", f"{self.address(receiver)}/32")

    def unite(self, one: int, other: int) -> None:
        """End that."""
        for sender, receiver in ((one, other), (other, one)):
            ip("-n", self.name(sender), "route", "delete", "blackhole", f"{self.address(receiver)}/32")


class HostJob(RunningJob):
    """A job whose slots are on ``hosts``. Use it in a ``with`` statement.

    Args:
        places: the host of each slot.
        settings: changes of those of agents, see :func:`~.settings.agent`.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Hosts,
        places: Sequence[int],
        arguments: list[str],
        config: Path,
        script: Path = TRAIN,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._prepare(folder, f"job-{os.urandom(4).hex()}")
        self.hosts = hosts
        self.command = [str(script), "--deepspeed_config", str(config), "--out", str(folder), *arguments]
        self.agents: list[Process] = []
        self._results: list[IO[bytes]] = []
        self._settings, self._world, self._config = dict(settings or {}), len(places), str(config)
        with ExitStack() as begun:
            begun.callback(self._temporary.close)
            self.secret = JobSecret.new()
            self.etcd = begun.enter_context(
                EmbeddedEtcd(hosts.outside, certificates=certificates_of(self.secret, namespace(self.name)))
            )
            for slot, host in enumerate(places):
                self._start_agent(slot, host, len(places), settings or {})
            self._stack = begun.pop_all()

    def _start_agent(self, slot: int, host: int, world: int, changes: Mapping[str, Any]) -> None:
        reading, writing = os.pipe()
        self._results.append(os.fdopen(reading, "rb"))
        script, *arguments = self.command
        values: dict[str, Any] = {
            "slot": slot,
            "world_size": world,
            "store": self.etcd.url,
            "secret": self.secret,
            "job": self.name,
            "address": self.hosts.address(host),
            "events": str(self.folder / "events.jsonl"),
            "parent_pid": parent_pid(),
            "result_fd": writing,
            "command": script_command(script, arguments, False),
            "host": f"h{host}",
        }
        waits = {"lease_ttl_s": 5, "heartbeat_timeout_s": 5.0, "settle_ms": 50, "max_restarts": 0}
        options = {name: value for name, value in {**waits, **changes}.items() if name in paths_by_name()}
        own = {name: value for name, value in changes.items() if name not in options}
        settings = JobSettings.resolve(bamboo_config(self._config), options)
        told = settings_of(**{**values, **own, "settings": settings})
        with open(self.folder / f"agent-{slot}.log", "wb") as log:
            process = start(
                told.agent_command,
                told.environment(self.env),
                log.fileno(),
                pass_fds=[writing],
                namespace=self.hosts.name(host),
            )
        os.close(writing)
        self.agents.append(process)

    def come(self, slot: int, host: int, rank: int) -> None:
        """Start the agent of a slot that joins, with a script that runs as ``rank``."""
        self._start_agent(slot, host, self._world, {**self._settings, "script_rank": rank})

    def members(self) -> dict[int, MemberRecord]:
        """The members that etcd knows, by the process ids of their agents."""
        return {record.agent_pid: record for record in registered(self.etcd.url, self.name, self.secret)}

    def member(self, slot: int) -> MemberRecord:
        """The member that the agent which began as ``slot`` has registered."""
        return self.members()[self.agents[slot].pid]

    def over(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def departures(self) -> list[LeftRecord | None]:
        """What each agent has said at its end, by the slot that it began as; ``None``: nothing."""
        lines = [result.readline() for result in self._results]
        return [LeftRecord.from_json(line) if line else None for line in lines]

    def finish(self, seconds: float = DEADLINE_S) -> Result:
        """Wait for the end of everything; the exit code is that of the last agent that ended otherwise than well."""
        patience = Patience(seconds)
        while not self.over():
            assert not patience.over(), f"the job hangs:\n{self.report()}"
            time.sleep(0.02)
        codes = [agent.returncode for agent in self.agents if agent.returncode not in (0, -signal.SIGKILL)]
        return Result(self.folder, codes[-1] if codes else 0, self.output())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            for process in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill() if kind else process.terminate()
            for agent in self.agents:
                agent.wait(30)
            for result in self._results:
                result.close()
        if kind is None:
            assert not marked(str(self.folder)), f"the job left processes behind: {marked(str(self.folder))}"

    def _processes(self) -> Iterator[psutil.Process]:
        for agent in self.agents:
            if agent.poll() is None:
                yield psutil.Process(agent.pid)


MakeHosts = Callable[[int], Hosts]


@pytest.fixture
def make_hosts() -> Iterator[MakeHosts]:
    """Makes so many hosts, gone after the test; skips it where there can be none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(Hosts(count))
