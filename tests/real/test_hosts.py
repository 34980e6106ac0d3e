"""Jobs over several hosts: deepspeed with a hostfile over pdsh and ssh, torchrun, and a host that vanishes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bamboo_ds.store.embedded import EmbeddedEtcd

from ..support.jobs import TRAIN, Reference, Result, bamboo_command, slow_until, write_config
from ..support.launching import LaunchedJob
from ..support.ports import free_port
from ..support.watching import PATIENCE_S, assert_exact, wait_lost, wait_steps, wait_whole
from .machines import Machines

pytestmark = pytest.mark.claim("guides/launchers.md")


#: Two pipelines of two stages; each host has the same stage of both, and shadows of the other's.
STAGES, PIPELINES, MICRO_BATCHES = 2, 2, 4
ARGUMENTS = ("--training-data",)
BLOCK = {"membership": {"lease_ttl_s": 8, "heartbeat_timeout_s": 30.0}, "redundancy": {"verify_every": 5}}


def script(folder: Path) -> list[str]:
    """The command line of the script, which goes on until the file ``go`` exists."""
    config = write_config(folder, BLOCK, MICRO_BATCHES)
    words = [str(TRAIN), "--deepspeed_config", str(config), "--out", str(folder), "--stages", str(STAGES)]
    return [*words, *ARGUMENTS, *slow_until(folder / "go")]


def secret(folder: Path) -> dict[str, str]:
    """The job's secret, for every host."""
    file = folder / "job.secret"
    file.touch(0o600)
    file.write_text(os.urandom(32).hex())
    return {"BAMBOO_SECRET_FILE": str(file)}


def lose(job: LaunchedJob, machines: Machines, host: int) -> None:
    """The host vanishes; its two members are lost by their leases, and two others have everything."""
    wait_whole(job, 4)
    wait_steps(job, 2)
    name = machines.hostname(host)
    gone = {event["member_id"] for event in job.events("member_joined") if event["host"] == name}
    assert len(gone) == 2
    machines.vanish(host)
    wait_lost(job, 2)
    lost = job.events("member_lost")
    assert {event["member_id"] for event in lost} == gone
    assert {event["reason"] for event in lost} == {"lease"}
    wait_whole(job, 2)
    wait_steps(job, 2)


@pytest.mark.tools("sshd", "pdsh")
def test_a_host_under_pdsh(tmp_path: Path, reference: Reference, machines: Machines) -> None:
    """`deepspeed --hostfile`, pdsh and ssh: one of two hosts vanishes, two members join from a third one over ssh."""
    events = str(tmp_path / "events.jsonl")
    # What deepspeed passes to other hosts: a member that joins must compute with as many threads.
    (tmp_path / ".deepspeed_env").write_text("OMP_NUM_THREADS=1\nDS_ACCELERATOR=cpu\n")
    (tmp_path / "hostfile").write_text("".join(f"{machines.address(host)} slots=2\n" for host in (0, 1)))
    with EmbeddedEtcd(machines.outside) as etcd:
        launch = [bamboo_command(), "launch", "--store", etcd.url, "--job", "pdsh", "--events", events]
        deepspeed = ["deepspeed", "--hostfile", str(tmp_path / "hostfile"), "--master_port", str(free_port())]
        words, told = script(tmp_path), secret(tmp_path)
        with LaunchedJob(tmp_path, [*launch, "--", *deepspeed, *words], words, "pdsh", machines.path, told) as job:
            lose(job, machines, 1)
            options = ["--store", etcd.url, "--job", "pdsh", "--events", events]
            command = job.shell([bamboo_command(), "join", *options, *job.command], **told)
            joiners = [job.start(machines.ssh(2, command), f"join-{number}") for number in (0, 1)]
            wait_whole(job, 4)
            wait_steps(job, 2)
            (tmp_path / "go").touch()
            result = job.finish()
            assert [joiner.wait(60) for joiner in joiners] == [0, 0], result.output[-6000:]
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(STAGES, PIPELINES, MICRO_BATCHES, *ARGUMENTS, *result.length))
    assert len(result.ranks()) == 2 and len(result.joined()) == 2


@pytest.mark.tools("sshd")
def test_a_host_under_torchrun(tmp_path: Path, reference: Reference, machines: Machines) -> None:
    """torchrun, 2 nodes x 2, static rendezvous: one node vanishes, the other one finishes."""
    rendezvous = ["--rdzv-backend", "static", "--master-addr", machines.address(0), "--master-port", str(free_port())]
    with EmbeddedEtcd(machines.outside) as etcd:
        told = secret(tmp_path)
        told |= {"BAMBOO_STORE": etcd.url, "BAMBOO_JOB": "torchrun", "BAMBOO_EVENTS": str(tmp_path / "events.jsonl")}

        def node(job: LaunchedJob, rank: int) -> list[str]:
            command = ["torchrun", "--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", "2", *rendezvous]
            return machines.ssh(rank, job.shell([*command, *job.command], **told))

        with LaunchedJob(tmp_path, lambda job: node(job, 0), script(tmp_path), "torchrun", machines.path) as job:
            job.joiners.append(job.start(node(job, 1), "node-1"))
            lose(job, machines, 1)
            (tmp_path / "go").touch()
            job.wait_for("the end", lambda: bool(job.events("run_finished")), PATIENCE_S)
            # torchrun itself waits minutes for the other node's; see the README.
            machines.kill(0)
            result = Result(tmp_path, job.events("run_finished")[0]["exit_code"], job.output())
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(STAGES, PIPELINES, MICRO_BATCHES, *ARGUMENTS, *result.length))
    assert len(result.ranks()) == 2
