"""Hosts with names, process ids and an sshd of their own."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from ..support.etcd import wait_until
from ..support.hosts import Hosts

_SSHD = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
PermitRootLogin prohibit-password
LogLevel ERROR
"""
#: As the README has it for hosts that vanish.
_SSH = """
Host *
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  ServerAliveInterval 5
  ServerAliveCountMax 3
  LogLevel ERROR
"""
_SSHD_DIRECTORY = Path("/run/sshd")


class Machines(Hosts):
    """As :class:`Hosts`; besides, each has a host name, a space of process ids, and an sshd as its first process.

    Attributes:
        path: a folder to put in front of PATH: ``ssh`` there needs no files of the user.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._folder = Path(tempfile.mkdtemp(prefix="bamboo-real-"))
        self.path = self._folder / "bin"
        self._servers: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for server in self._servers:
            server.wait(30)
        shutil.rmtree(self._folder)

    def hostname(self, host: int) -> str:
        """The name that the host has, known to all of them."""
        return f"real{host}"

    def ssh(self, host: int, command: str) -> list[str]:
        """The command that runs a shell's ``command`` on a host."""
        return [str(self.path / "ssh"), self.address(host), command]

    def _build(self) -> None:
        super()._build()
        for name in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        (self._folder / "sshd_config").write_text(_SSHD.format(folder=self._folder))
        (self._folder / "ssh_config").write_text(_SSH.format(folder=self._folder))
        self.path.mkdir()
        script = self.path / "ssh"
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self._folder}/ssh_config "$@"\n')
        script.chmod(0o755)
        if not _SSHD_DIRECTORY.exists():
            _SSHD_DIRECTORY.mkdir(mode=0o755)
            self._undo.callback(_SSHD_DIRECTORY.rmdir)
        names = "".join(f"{self.address(each)} {self.hostname(each)}\n" for each in range(self.count))
        for host in range(self.count):
            self._give_names(host, f"127.0.0.1 localhost\n{names}")
            self._start_sshd(host)
        for host in range(self.count):
            wait_until(lambda host=host: self._answers(host), f"sshd of host {host} answers", 30.0)

    def _give_names(self, host: int, text: str) -> None:
        """``ip netns exec`` puts what is there over ``/etc``."""
        folder = Path("/etc/netns", self.name(host))
        folder.mkdir(parents=True)
        self._undo.callback(shutil.rmtree, folder)
        (folder / "hosts").write_text(text)

    def beside(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that starts a further server on a host: beside its sshd, in all of its namespaces."""
        spaces = ["--mount", "--uts", "--net", "--pid"]
        return ["nsenter", "--target", str(self._first(host)), *spaces, *command]

    def _first(self, host: int) -> int:
        """The first process of the host, as it is known outside."""
        (child,) = psutil.Process(self._servers[host].pid).children()
        return child.pid

    def _start_sshd(self, host: int) -> None:
        sshd = f"{shutil.which('sshd', path='/usr/sbin')} -D -e -f {self._folder}/sshd_config"
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words = ["sh", "-c", f"hostname {self.hostname(host)} && exec {sshd}"]
        with open(self._folder / f"sshd-{host}.log", "wb") as log:
            command = ["ip", "netns", "exec", self.name(host), *own, *words]
            self._servers.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _answers(self, host: int) -> bool:
        said = (self._folder / f"sshd-{host}.log").read_text()
        assert self._servers[host].poll() is None, f"sshd has ended: {said}"
        return subprocess.run(self.ssh(host, "true"), capture_output=True, check=False, timeout=30).returncode == 0

    def run(self, host: int, command: str) -> str:
        """What a shell's ``command`` on a host prints."""
        return subprocess.run(self.ssh(host, command), capture_output=True, text=True, check=True, timeout=60).stdout

    def vanish(self, host: int) -> None:
        """The host is gone from one instant to the next: nobody hears a good-bye of it."""
        self.cut(host)
        self.kill(host)
