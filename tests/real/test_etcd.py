"""A job on a cluster of three etcds of Debian's, with TLS, client certificates and passwords."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from bamboo_ds.store.supervisor import die_with_parent
from tests.process.test_store_security import certificates

from ..support.etcd import wait_until
from ..support.jobs import TRAIN, Reference, bamboo_command, slow_until, write_config
from ..support.launching import LaunchedJob
from ..support.ports import free_port
from ..support.watching import assert_exact, wait_lost, wait_steps, wait_whole
from .conftest import TOOLS

pytestmark = pytest.mark.claim("reference/cli.md")


STAGES, MICRO_BATCHES = 3, 4
ARGUMENTS = ("--training-data",)


def _end_with_us() -> None:
    die_with_parent(signal.SIGKILL)


class Cluster:
    """Three nodes; ``root`` and ``user`` have the password ``secret``, the latter for what begins with ``prefix``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = [free_port() for _ in range(3)]
        self._peers = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
        self._nodes: list[subprocess.Popen[bytes]] = []
        self.urls = [f"https://127.0.0.1:{port}" for port in self._ports]

    def __enter__(self) -> Cluster:
        self._folder.mkdir()
        certificates(self._folder)
        etcd = TOOLS["etcd"].path()
        for number, (url, peer) in enumerate(zip(self.urls, self._peers, strict=True)):
            command = [
                *(str(etcd), "--name", f"n{number}", "--data-dir", f"{self._folder}/data-{number}"),
                *("--listen-client-urls", url, "--advertise-client-urls", url),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                *("--initial-cluster", ",".join(f"n{i}={each}" for i, each in enumerate(self._peers))),
                *("--initial-cluster-token", str(self._folder), "--bcrypt-cost", "4", "--client-cert-auth"),
                *(f"--cert-file={self._folder}/server.pem", f"--key-file={self._folder}/server.key"),
                f"--trusted-ca-file={self._folder}/ca.pem",
            ]
            with open(self._folder / f"etcd-{number}.log", "wb") as log:
                self._nodes.append(subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_end_with_us))
        wait_until(lambda: self._ctl("endpoint", "health", check=False).returncode == 0, "the cluster serves", 60.0)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.kill()
            node.wait()

    def _ctl(self, *words: str, check: bool = True, user: str = "") -> subprocess.CompletedProcess[str]:
        files = [f"--{name}={self._folder}/{file}" for name, file in self._files("cacert", "cert", "key").items()]
        living = [url for url, node in zip(self.urls, self._nodes, strict=True) if node.poll() is None]
        command = [str(TOOLS["etcdctl"].path()), f"--endpoints={','.join(living)}", *files, *words]
        env = {**os.environ, "ETCDCTL_API": "3"} | ({"ETCDCTL_USER": user} if user else {})
        return subprocess.run(command, env=env, capture_output=True, text=True, check=check, timeout=30)

    @staticmethod
    def _files(*names: str) -> dict[str, str]:
        return dict(zip(names, ("ca.pem", "client.pem", "client.key"), strict=True))

    def protect(self, prefix: str) -> None:
        """Ask for passwords from now on."""
        for words in (
            ("user", "add", "root:secret"),
            ("user", "grant-role", "root", "root"),
            ("role", "add", "job"),
            ("role", "grant-permission", "job", "readwrite", "--prefix=true", prefix),
            ("user", "add", "user:secret"),
            ("user", "grant-role", "user", "job"),
            ("auth", "enable"),
        ):
            self._ctl(*words)
        assert self._ctl("get", prefix, check=False).returncode != 0, "no password is needed"

    def variables(self) -> dict[str, str]:
        """What a job needs to use it."""
        files = self._files("BAMBOO_STORE_CA", "BAMBOO_STORE_CERT", "BAMBOO_STORE_KEY")
        told = {name: str(self._folder / file) for name, file in files.items()}
        return told | {"BAMBOO_STORE_USER": "user", "BAMBOO_STORE_PASSWORD": "secret"}

    def leader(self) -> int:
        """The number of the node that leads."""
        found = json.loads(self._ctl("endpoint", "status", "--write-out=json", user="root:secret").stdout)
        for node in found:
            if node["Status"]["leader"] == node["Status"]["header"]["member_id"]:
                return self.urls.index(node["Endpoint"])
        raise AssertionError(f"nobody leads: {found}")

    def kill(self, number: int) -> None:
        """SIGKILL to a node."""
        self._nodes[number].kill()
        self._nodes[number].wait()


@pytest.mark.tools("etcd", "etcdctl", "openssl")
def test_a_protected_cluster_loses_its_leader(tmp_path: Path, reference: Reference) -> None:
    """Three etcds, TLS, client certificates, password: a worker, then the leading etcd, then a worker is killed."""
    go = tmp_path / "go"
    config = write_config(tmp_path, {"redundancy": {"verify_every": 5}}, MICRO_BATCHES)
    words = [str(TRAIN), "--deepspeed_config", str(config), "--out", str(tmp_path), "--stages", str(STAGES)]
    with Cluster(tmp_path / "etcd") as etcd:
        etcd.protect("/bamboo/safe/")
        run = [bamboo_command(), "run", "-n", str(STAGES), "--store", ",".join(etcd.urls), "--job", "safe"]
        run += ["--events", str(tmp_path / "events.jsonl")]
        script = [*words, *ARGUMENTS, *slow_until(go)]
        with LaunchedJob(tmp_path, [*run, *script], script, "safe", variables=etcd.variables()) as job:
            wait_whole(job, 3)
            wait_steps(job, 2)
            job.strike(job.workers()[1])
            wait_lost(job, 1)
            wait_whole(job, 2)
            before = etcd.leader()
            etcd.kill(before)
            wait_steps(job, 2)
            job.strike(job.workers()[2])
            wait_lost(job, 2)
            assert etcd.leader() != before
            wait_steps(job, 2)
            go.touch()
            result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert "secret" not in result.output
    assert [event["reason"] for event in result.events("member_lost")] == ["signal"] * 2
    assert_exact(result, reference(STAGES, 1, MICRO_BATCHES, *ARGUMENTS, *result.length))
    assert set(result.ranks()) == {0}
