"""Who is not of the job tries what could do harm to it, while it loses a stage: nothing comes of it."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.comm.places import Place
from bamboo_ds.control.registry.access import open_store
from bamboo_ds.control.registry.keys import Keys, namespace
from bamboo_ds.control.registry.records import MemberRecord, ProgressRecord, RestartRecord
from bamboo_ds.engine.context.history import History
from bamboo_ds.secret import JobSecret
from bamboo_ds.store.embedded import EmbeddedEtcd
from bamboo_ds.store.records import Snapshot
from bamboo_ds.topology import Plan
from tests.support.etcd import EtcdServer, wait_until
from tests.support.hosts import HostJob, MakeHosts
from tests.support.jobs import Reference, RunningJob, processes_of, slow_until, write_config
from tests.support.strangers import NOBODY, Attack, ports
from tests.support.watching import assert_exact, registered, wait_lost, wait_whole

pytestmark = [
    pytest.mark.claim("guides/security.md"),
    pytest.mark.integration,
    pytest.mark.skipif(
        os.geteuid() != 0, reason="only root can become another user of this host, to attack from there"
    ),
]

#: Of what a stranger wants to have loaded.
EVIL = "/tmp/of-the-stranger"
#: What is tried at ports and files, and at etcd.
DEEDS = {
    "be silent",
    "download state",
    "end the epoch",
    "fill the memory",
    "read a file",
    "say an old hello",
    "send nested JSON",
    "take a member's place",
}
TOWARDS_ETCD = {"list all keys", "write to etcd"}


def known(job: RunningJob, snapshot: Snapshot, files: list[str], etcd: str) -> dict[str, Any]:
    """What somebody knows of a job who has seen everything that is in etcd, up to what strangers have put there."""
    entries = {key: kv for key, kv in snapshot.entries.items() if kv.sealed}
    members = [MemberRecord.from_json(kv.value) for key, kv in entries.items() if key.startswith(Keys.MEMBERS)]
    plan = job.plan()
    false = Plan(plan["epoch"] + 1, ("x",) * len(plan["owners"]), ("x",), script_ranks=(0,))
    restart = RestartRecord(generation=9, after_epoch=plan["epoch"], ranks={0: (0, 1, 2, 3)}, checkpoint=EVIL)
    records = {
        Keys.PLAN: false.to_json(),
        Keys.RESTART: restart.to_json(),
        Keys.progress("m0-x"): ProgressRecord(id="m0-x", step=10**6, checkpoint=EVIL).to_json(),
        Keys.STOP: '{"code": 3, "reason": "I say so", "by": ""}',
    }
    return {
        "files": [*files, *(f"/proc/{member.pid}/environ" for member in members)] if files else [],
        "ports": ports(members),
        "members": [member.id for member in members],
        "epoch": plan["epoch"],
        "tokens": {member.id: Place.parse(member.place).token for member in members},
        "servers": [(*member.place.split(" "), member.id) for member in members],
        "key": History.key(0),
        "etcd": [etcd],
        "records": {f"{namespace(job.name)}{key}": value for key, value in records.items()},
    }


@pytest.mark.exhaustive
def test_another_user_of_the_host(tmp_path: Path, reference: Reference) -> None:
    """The job's etcd serves everybody, which is the worst that a user can do: what is written there is not followed."""
    config = write_config(tmp_path, {"redundancy": {"verify_every": 5}})
    command = ["--stages", "4", *slow_until(tmp_path / "go", pace_s=0.3)]
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServer(tmp_path))
        with RunningJob(tmp_path, 4, command, config, options=["--store", etcd.url]) as job:
            wait_whole(job, 4)
            (secret,) = (tmp_path / "tmp").glob("bamboo-*/*.secret")
            own = JobSecret(secret.read_text().strip())
            files = [str(secret), str(secret.with_suffix(".json"))]
            with open_store(etcd.url, job.name, 10.0) as store:
                in_etcd = [entry.value for entry in store.get_prefix("").entries.values()]

                def targets() -> dict[str, Any]:
                    return known(job, store.get_prefix(""), files, etcd.url)

                with Attack(tmp_path, targets, uid=NOBODY) as attack:
                    job.wait_for("every attempt was made", lambda: attack.made() >= DEEDS | TOWARDS_ETCD)
                    owner = job.plan()["owners"][1]
                    (victim,) = [each for each in registered(etcd.url, job.name, own) if each.id == owner]
                    os.kill(victim.pid, signal.SIGKILL)
                    wait_lost(job, 1)
                    wait_whole(job, 3)
                    before = attack.refused(TOWARDS_ETCD)

                    def again() -> bool:
                        return (attack.refused(TOWARDS_ETCD) - before).keys() >= DEEDS - {"be silent"}

                    job.wait_for("every attempt was made again", again)
                    commands = [process.cmdline() for process in processes_of(str(tmp_path))]
                    (tmp_path / "go").touch()
                    result = job.finish()
    attack.refused(TOWARDS_ETCD)  # or something came of an attempt
    assert result.exit_code == 0, result.output[-6000:]
    assert_exact(result, reference(4, 1, 6, *result.length))
    assert len(result.events("member_lost")) == 1 and not result.events("restart") and not result.events("fatal")
    for key in (Keys.PLAN, Keys.RESTART, Keys.STOP, Keys.progress("m0-x")):
        assert f"{key} in etcd is not from a process that knows the job's secret" in result.output
    assert len(commands) > 6
    told = f"{commands} {in_etcd} {result.output} {result.events('plan')} {(tmp_path / 'events.jsonl').read_text()}"
    assert own.text not in told, "the secret is where others can read it"


@pytest.mark.exhaustive
def test_another_host(tmp_path: Path, reference: Reference, make_hosts: MakeHosts) -> None:
    """Every member is a host of its own; the etcd is the job's, which wants certificates."""
    hosts = make_hosts(4)
    config = write_config(tmp_path, {"redundancy": {"verify_every": 5}})
    command = ["--stages", "3", *slow_until(tmp_path / "go", pace_s=0.3)]
    elsewhere = ["ip", "netns", "exec", hosts.name(3)]
    with HostJob(tmp_path, hosts, [0, 1, 2], command, config, settings={"lease_ttl_s": 20.0}) as job:
        wait_whole(job, 3)
        with open_store(job.etcd.url, job.name, 10.0, job.secret) as store:

            def targets() -> dict[str, Any]:
                return known(job, store.get_prefix(""), [], job.etcd.url)

            deeds = DEEDS - {"read a file"}
            with Attack(tmp_path, targets, elsewhere) as attack:
                job.wait_for("every attempt was made", lambda: attack.made() >= deeds | TOWARDS_ETCD)
                os.kill(job.member(1).pid, signal.SIGKILL)
                wait_lost(job, 1)
                wait_whole(job, 2)
                before = attack.refused()

                def again() -> bool:
                    return (attack.refused() - before).keys() >= (deeds | TOWARDS_ETCD) - {"be silent"}

                job.wait_for("every attempt was made again", again)
                (tmp_path / "go").touch()
                result = job.finish()
    attack.refused()
    assert_exact(result, reference(3, 1, 6, *result.length))
    assert len(result.events("member_lost")) == 1 and not result.events("restart")
    assert "is not from a process that knows" not in result.output  # it has written nothing


def test_the_etcd_of_a_job_on_one_host_is_out_of_reach(tmp_path: Path) -> None:
    """For another user it has no port, and its socket is in a folder that is closed to him."""
    with EmbeddedEtcd(None) as etcd:
        targets = {"files": [], "ports": [], "members": [], "epoch": 1, "servers": [], "key": "", "etcd": [etcd.url]}
        targets["records"] = {"/bamboo/j/plan": "{}"}
        with Attack(tmp_path, lambda: targets, uid=NOBODY) as attack:
            wait_until(lambda: attack.refused().keys() >= TOWARDS_ETCD, "every attempt was made")
        with open_store(etcd.url, "j", 10.0) as store:
            assert not store.get_prefix("").entries
