"""A Slurm cluster of hosts, with a controller on this one; nothing of the system's own Slurm is used."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from ..support.etcd import wait_until
from ..support.ports import free_port
from .machines import Machines

_CONFIGURATION = """
ClusterName=real
SlurmctldHost={controller}({outside})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=30
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


class Slurm:
    """``hosts`` of ``machines`` as nodes with four processors each. Use it in a ``with`` statement.

    Attributes:
        variables: of the environment in which Slurm's commands find it.
    """

    def __init__(self, folder: Path, machines: Machines, hosts: int) -> None:
        self._folder, self._machines, self._hosts = folder, machines, hosts
        self._file = folder / "slurm.conf"
        # Names of sockets there must not be longer than 108 characters.
        self._spool = Path(tempfile.mkdtemp(prefix="bamboo-slurm-"))
        self.variables = {"SLURM_CONF": str(self._file)}
        self._servers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        machines, folder = self._machines, self._folder
        folder.mkdir(mode=0o700)
        nodes = "".join(
            f"NodeName={machines.hostname(host)} NodeAddr={machines.address(host)} CPUs=4 State=UNKNOWN\n"
            for host in range(self._hosts)
        )
        self._file.write_text(
            _CONFIGURATION.format(
                controller=socket.gethostname().partition(".")[0],
                outside=machines.outside,
                port=free_port(),
                folder=folder,
                spool=self._spool,
                nodes=nodes,
            )
        )
        # The plugin for version 2 asks systemd for everything, also where nothing is to be confined.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        try:
            files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
            self._start("munged", ["munged", "--foreground", "--force", f"--socket={folder}/munge", *files])
            wait_until((folder / "munge").exists, "munged listens", 30.0)
            self._start("slurmctld", ["slurmctld", "-D", "-f", str(self._file)])
            slurmd = shutil.which("slurmd", path="/usr/sbin")
            for host in range(self._hosts):
                name = f"slurmd-{host}"
                self._start(name, machines.beside(host, [str(slurmd), "-D", "-f", str(self._file)]))
            wait_until(self._ready, "the nodes are idle", 60.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in reversed(self._servers):
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        shutil.rmtree(self._spool)

    def _start(self, name: str, command: list[str]) -> None:
        path = f"/usr/sbin:{os.environ['PATH']}"
        with open(self._folder / f"{name}.out", "wb") as log:
            env = {**os.environ, "PATH": path}
            self._servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))

    def _ready(self) -> bool:
        for server in self._servers:
            assert server.poll() is None, f"{server.args} has ended: {self.said()}"
        states = self.call("sinfo", "--noheader", "--partition=all", "--Node", "--format=%T", check=False).split()
        return states == ["idle"] * self._hosts

    def said(self) -> str:
        """The ends of all logs."""
        files = sorted([*self._folder.glob("*.out"), *self._folder.glob("*.log")])
        return "".join(f"-- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def call(self, *command: str, check: bool = True) -> str:
        """What a command of Slurm's prints."""
        env = os.environ | self.variables
        return subprocess.run(command, env=env, capture_output=True, text=True, check=check, timeout=60).stdout

    def step(self) -> str:
        """The step that runs, as JOB.STEP."""
        (found,) = re.findall(r"^\d+\.\d+$", self.call("squeue", "--steps", "--noheader", "--format=%i"), re.MULTILINE)
        return str(found)
