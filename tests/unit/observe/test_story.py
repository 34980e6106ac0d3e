"""The story of a job: exact lines for recorded sequences of events."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli.main import cli
from bamboo_ds.config import parse_block
from bamboo_ds.control.settings import MemberOptions
from bamboo_ds.errors import ConfigError, ProtocolError
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.launchers.folders import folder_of, with_logs
from bamboo_ds.launchers.narration import Narration, banner
from bamboo_ds.observe import events
from bamboo_ds.observe.events import Event
from bamboo_ds.observe.story import Story, printed
from bamboo_ds.observe.summary import failure_of, summary
from tests.support.written import write

pytestmark = pytest.mark.claim("guides/logs.md", "reference/events.md")

M0, M1, M2, M3 = MEMBERS = ["m0-aaaaaaaa", "m1-bbbbbbbb", "m2-cccccccc", "m3-dddddddd"]
NOON = datetime(2026, 5, 4, 12, 0, 0, tzinfo=timezone.utc)


def at(when_s: float, kind: type[Any], epoch: int = 2, member: str | None = M0, /, **fields: Any) -> Event:
    event: Event = kind(job="gpt", time=NOON + timedelta(seconds=when_s), member=member, epoch=epoch, **fields)
    return event


def joined(seconds: float, *members: str, host: str = "a") -> list[Event]:
    return [at(seconds, events.MemberJoined, member_id=m, host=host, rank=int(m[1])) for m in members]


def plan(
    seconds: float,
    epoch: int,
    owners: Sequence[str],
    shadows: Sequence[str | None],
    lost: Sequence[str] = (),
    members: Sequence[str] | None = None,
    pipelines: int | None = 1,
) -> Event:
    fields = {"owners": list(owners), "shadows": list(shadows), "lost": list(lost), "pipelines": pipelines}
    living = list(members or dict.fromkeys(owners))
    return at(seconds, events.PlanWritten, epoch, **fields, members=living, reason="")


def lost(seconds: float, member: str, reason: str = "signal", detail: str = "SIGKILL") -> Event:
    return at(seconds, events.MemberLost, member_id=member, reason=reason, detail=detail, detection_seconds=0.01)


def recovered(seconds: float, epoch: int, *members: str, pause_s: float = 0.1, redone: int = 1) -> list[Event]:
    fields = {"detection_seconds": None, "plan_seconds": None, "rebuild_seconds": 0.1, "redo_seconds": 0.2}
    fields |= {"forwards_redone": redone, "backwards_redone": redone, "step": 5, "mode": "resume"}
    return [
        at(seconds, events.Recovered, epoch, m, pause_seconds=pause_s + i / 100, **fields)
        for i, m in enumerate(members)
    ]


def step(seconds: float, number: int, epoch: int = 2) -> Event:
    return at(seconds, events.Step, epoch, step=number, loss=1.0, seconds=1.2, frc_done=0, frc_total=0)


def begun() -> list[Event]:
    return [
        at(0, events.RunStarted, 0, None, members=4, command=["train.py"]),
        *joined(3, M0, M1),
        *joined(3, M2, M3, host="b"),
        plan(3, 1, MEMBERS, [], pipelines=None),
        plan(5, 2, MEMBERS, [M3, M0, M1, M2]),
        step(7, 1),
        step(8, 2),
    ]


def told(story: Story, found: Sequence[Event]) -> list[str]:
    return [printed(line, timezone.utc) for event in found for line in story.tell(event)]


def lines(*found: Event) -> list[str]:
    """What is told of ``found`` after the usual beginning."""
    story = Story()
    told(story, begun())
    return [*told(story, found), *(printed(line, timezone.utc) for line in story.end())]


def test_the_beginning() -> None:
    story = Story()
    assert told(story, begun()) == [
        "12:00:00 job gpt starts with 4 members",
        "12:00:03 all 4 members are there (hosts: a, b) and build their engines",
        "12:00:05 1 pipeline of 4 stages on 4 members; m0 owns stage 0, m1 owns stage 1, m2 owns stage 2, "
        "m3 owns stage 3; every stage has a replica",
        "12:00:07 training: step 1 took 1.2 s",
    ]


def test_many_roles_are_not_listed() -> None:
    story, many = Story(), [f"m{i}-{i}" for i in range(12)]
    found = told(story, [plan(0, 1, many, [], pipelines=None), plan(1, 2, many, [None] * 12, pipelines=2)])
    assert found[-1] == "12:00:01 2 pipelines of 6 stages on 12 members; not every stage has a replica"


def test_a_loss_is_one_line_and_another_when_all_stages_have_replicas_again() -> None:
    loss = plan(10, 3, [M0, M1, M1, M3], [M3, M0, None, None], [M2])
    takeover = at(10, events.TakeoverDone, 3, role=(0, 2), from_=M2, to=M1, seconds=0.1)
    built = at(11, events.ReplicaBuilt, 4, M0, step=3, role=(0, 2), seconds=0.5, bytes=8)
    learning = plan(10.2, 4, [M0, M1, M1, M3], [M3, M0, None, None])
    healed = plan(11.9, 5, [M0, M1, M1, M3], [M3, M0, M0, M1])
    repeated = [lost(10, M2), loss, takeover]
    assert lines(
        *[*repeated, *repeated, learning, *recovered(10.5, 3, M0, M1, M3, M1), step(11, 3, 3), built, healed, healed]
    ) == [
        "12:00:10 worker m2 on host b died (SIGKILL); stage 2 taken over by m1 in 0.12 s; 3 of 4 are left",
        "12:00:11 all stages have replicas again 1.9 s after the loss",
    ]


def test_a_loss_with_two_roles_that_two_members_take_over() -> None:
    """With two pipelines; a survivor reports nothing, so that the next step completes the line."""
    story = Story()
    owners, heirs = [M0, M1, M2, M2], [M0, M1, M0, M1]
    told(story, [*joined(1, M0, M1, M2), plan(1, 1, owners, [], pipelines=None)])
    told(story, [plan(2, 2, owners, [M2, M2, M0, M1], pipelines=2), step(3, 1)])
    found = [lost(4, M2, "exit", "13"), plan(4, 3, heirs, [None] * 4, [M2], pipelines=2)]
    assert told(story, [*found, *recovered(5, 3, M1), step(5, 2, 3)]) == []
    assert told(story, [step(6, 3, 3)]) == [
        "12:00:04 worker m2 on host a exited (code 13); stage 1 of pipeline 0 taken over by m0, "
        "stage 1 of pipeline 1 taken over by m1 in 0.10 s; 2 of 3 are left"
    ]


def test_a_loss_within_a_recovery() -> None:
    first = [lost(10, M2), plan(10, 3, [M0, M1, M1, M3], [None] * 4, [M2])]
    second = [lost(10.1, M1, "lease", "ran out"), plan(11, 4, [M0, M0, M0, M3], [None] * 4, [M1])]
    assert lines(*first, *recovered(10, 3, M0), *second, *recovered(12, 4, M0, M3)) == [
        "12:00:10 worker m2 on host b died (SIGKILL); stage 2 taken over by m1 in 0.10 s; "
        "another loss interrupts the recovery; 3 of 4 are left",
        "12:00:10 worker m1 on host a fell silent (its lease ran out); stages 1 and 2 taken over by m0 in 0.11 s; "
        "2 of 3 are left",
    ]


def test_a_loss_whose_recovery_takes_long_is_told_before() -> None:
    story = Story()
    told(story, begun())
    assert not told(story, [lost(10, M2), plan(10, 3, [M0, M1, M1, M3], [None] * 4, [M2])])
    assert not story.late(NOON + timedelta(seconds=19))
    line = "12:00:10 worker m2 on host b died (SIGKILL); stage 2 taken over by m1; 3 of 4 are left"
    late = [story.late(NOON + timedelta(seconds=s)) for s in (20, 30)]
    assert [[printed(each, timezone.utc) for each in found] for found in late] == [[line], []]
    saved = at(31, events.CheckpointSaved, 3, step=3, path="/c/3", seconds=0.4, bytes=9)
    assert told(story, [saved, *recovered(40, 3, M0, M1, M3, pause_s=25)]) == [
        "12:00:31 checkpoint of step 3 saved in 0.40 s: /c/3",
        "12:00:40 recovered from the loss of m2 in 25 s",
    ]


def test_two_at_once_are_one_line() -> None:
    both = plan(10, 3, [M0, M0, M3, M3], [None] * 4, [M1, M2])
    assert lines(lost(10, M1, "suspects", f"{M0}, {M3}"), lost(10, M2), both, *recovered(11, 3, M0, M3)) == [
        "12:00:10 worker m1 on host a is out of reach of m0, m3 and worker m2 on host b died (SIGKILL); "
        "stage 1 taken over by m0, stage 2 taken over by m3 in 0.11 s; 2 of 4 are left"
    ]


def test_a_join_and_a_leave() -> None:
    new, notice = "m4-eeeeeeee", {"kind": "preempt", "source": "aws", "detail": "spot", "leaves": True}
    found = [
        *joined(10, new, host="c"),
        plan(10, 3, MEMBERS, [M3, M0, M1, M2], members=[*MEMBERS, new]),
        *(at(11, events.NoticeReceived, 3, M3, deadline_seconds=left_s, **notice) for left_s in (120, 119)),
        plan(12, 4, [M0, M1, M2, new], [new, M0, M1, M2], members=[M0, M1, M2, new]),
        at(13, events.MemberLeft, 4, M3, member_id=M3, reason="preempt", detail="aws: spot", seconds=1.8),
    ]
    assert lines(*found) == [
        "12:00:10 m4 on host c has joined: 5 members",
        "12:00:11 m3 got a notice (preempt, aws: spot), 120 s before its end: it leaves",
        "12:00:12 stage 3 handed over from m3 to m4",
        "12:00:13 m3 on host b has left (preempt, aws: spot), 1.8 s after the notice",
    ]


def test_a_fatal_loss_and_a_restart() -> None:
    """Names begin anew with the workers; within one start a second ``m2`` is called by its whole id."""
    after = ["m0-eeeeeeee", "m2-ffffffff", "m2-00000000", "m3-11111111"]
    found = [
        lost(10, M1),
        lost(10, M2),
        plan(10, 3, [M0, M1, M1, M3], [None] * 4, [M1, M2], members=[M0, M3]),
        at(10, events.Fatal, 3, stages=[(0, 1), (0, 2)], members=[M1, M2], checkpoint="/c/step1"),
        at(20, events.Restart, 3, number=1, slots=[0, 2], checkpoint="/c/step1", step=2),
        *joined(22, *after),
        plan(22, 4, after, [], pipelines=None),
        plan(23, 5, after, [after[3], *after[:3]]),
        step(24, 2, 5),
    ]
    assert lines(*found) == [
        "12:00:10 worker m1 on host a died (SIGKILL) and worker m2 on host b died (SIGKILL); 2 of 4 are left",
        "12:00:10 fatal loss: no living member holds stages 1 and 2; newest checkpoint: /c/step1",
        "12:00:20 restart 1 on slots 0, 2, from /c/step1",
        "12:00:22 all 4 members are there (hosts: a) and build their engines",
        "12:00:23 1 pipeline of 4 stages on 4 members; m0 owns stage 0, m2 owns stage 1, m2-00000000 owns stage 2, "
        "m3 owns stage 3; every stage has a replica",
        "12:00:24 training: step 2 took 1.2 s",
    ]


def test_a_fatal_loss_before_the_engines_are_built() -> None:
    story = Story()
    told(story, begun()[:5])
    fatal = at(4, events.Fatal, 1, stages=[], members=[M1], checkpoint=None)
    assert told(story, [lost(4, M1), fatal]) == [
        "12:00:04 worker m1 on host a died (SIGKILL)",
        "12:00:04 fatal loss before the engines are built; newest checkpoint: none",
    ]


def test_a_worker_that_cannot_go_on_and_a_restart_that_fails() -> None:
    why = {"shadows": [], "lost": [], "pipelines": 1, "owners": MEMBERS}
    all_stages = [(0, stage) for stage in range(4)]
    found = [
        at(10, events.PlanWritten, 3, **why, members=MEMBERS, reason=f"{M1} cannot go on (exit: 86)"),
        at(10, events.Fatal, 3, stages=all_stages, members=[], checkpoint=None),
        at(20, events.Restart, 3, number=1, slots=[0, 1, 2, 3], checkpoint=None, step=2),
        at(30, events.PlanWritten, 4, **why, members=["m0-eeeeeeee"], reason="restart 1 failed: slot 1 did not come"),
        at(30, events.Fatal, 4, stages=all_stages, members=[], checkpoint=None),
    ]
    assert lines(*found) == [
        "12:00:10 fatal loss: m1 cannot go on (exit: 86); newest checkpoint: none",
        "12:00:20 restart 1 on slots 0, 1, 2, 3, from the beginning",
        "12:00:30 fatal loss: restart 1 failed: slot 1 did not come; newest checkpoint: none",
    ]


def test_checkpoints_checks_and_waiting() -> None:
    found = [
        at(10, events.CheckpointSaved, step=2, path="/c/2", seconds=0.4, bytes=9),
        at(11, events.CheckpointSaved, 2, M1, step=2, path="/c/2", seconds=0.6, bytes=9),
        at(11, events.CheckpointSaved, step=3, path="/c/.bamboo-own/job/3", seconds=0.4, bytes=9, own=True),
        at(11, events.CheckpointSaved, step=3, global_step=43, path="/c/43", seconds=0.4, bytes=9),
        at(12, events.CheckpointFailed, step=4, global_step=4, path="/c/4", reason="No space left on device"),
        at(12, events.CheckpointFailed, step=5, path="/c/5", reason="No space left on device", own=True),
        at(13, events.ReplicaMismatch, step=4, role=(0, 1), expected="a", found="b", tensors=[]),
        at(
            13,
            events.MemberCorrupt,
            step=4,
            member_id=M1,
            role=(0, 1),
            copy_of="replica",
            tensors=["parameter 0.weight"],
        ),
        at(14, events.ExactChecked, step=3, steps=3, stages=4, tensors=618, not_rehearsed=[]),
        at(15, events.ExactMismatch, step=2, role=(0, 1), found="replica", tensors=["counter x (3 and 2)"]),
        at(16, events.MembersAwaited, members=[M1], seconds=120),
        at(17, events.MemoryShort, 4, roles=[(0, 1), (0, 2)], members=[M1]),
        at(18, events.MemoryShort, 5, roles=[], members=[]),
        at(19, events.MemoryShort, 6, roles=[], members=[], resting=[M0, M1], under_way=[(M1, 2)]),
    ]
    assert lines(*found) == [
        "12:00:10 checkpoint of step 2 saved in 0.40 s: /c/2",
        "12:00:11 checkpoint of step 3 (43 for DeepSpeed) saved in 0.40 s: /c/43",
        "12:00:12 checkpoint of step 4 failed (No space left on device): /c/4",
        "12:00:12 own checkpoint of step 5 failed (No space left on device): /c/5",
        "12:00:13 the replica of stage 1 differs from its owner's state after step 4",
        "12:00:13 m1 has a wrong copy (replica) of stage 1: parameter 0.weight",
        "12:00:15 exactness check: the replica of stage 1 differs: counter x (3 and 2)",
        "12:00:16 all others wait for m1, for 120 s so far",
        "12:00:17 no member has room for a replica of stages 1 and 2; "
        "m1 holds more than it may (topology.memory_limit_mb)",
        "12:00:18 members have room for all that they hold, and for replicas",
        "12:00:19 optimizers on m0 and m1 are in host memory between steps for lack of room; "
        "m1 has 2 micro-batches of a role under way at most",
    ]


def losing_run() -> list[Event]:
    return [
        *begun(),
        lost(10, M2),
        plan(10, 3, [M0, M1, M1, M3], [M3, M0, None, None], [M2]),
        *recovered(10.5, 3, M0, M1, M3),
        at(11, events.CheckpointSaved, 3, step=3, path="/c/3", seconds=0.4, bytes=9),
        *joined(12, "m4-eeeeeeee"),
        step(13, 9, 3),
        at(20, events.RunFinished, 0, None, exit_code=0, run_seconds=20.1),
    ]


def test_summary() -> None:
    story = Story()
    told(story, losing_run())
    assert summary(story.job) == [
        "exit code 0 after 20 s; newest step: 9",
        "losses: 1; longest pause 0.12 s, all pauses 0.12 s; 6 passes done again",
        "joined: 1; left: 0; checkpoints: 1; restarts: 0",
    ]
    told(story, begun())
    assert summary(story.job)[0] == "not finished; newest step: 2", "a job that goes on in the same file"


def test_steps_after_a_restart_have_the_number_that_scripts_and_folders_have() -> None:
    story, first = Story(), step(7, 1)
    again = [first.model_copy(update={"global_step": 41}), step(8, 2).model_copy(update={"global_step": 42})]
    assert "12:00:07 training: step 1 (41 for DeepSpeed) took 1.2 s" in told(story, [*begun()[:-2], *again])
    assert summary(story.job)[0] == "not finished; newest step: 2 (42 for DeepSpeed)"


# -- files ---------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = write(tmp_path / "events.jsonl", losing_run())
    for arguments in ([str(path)], ["-f", str(path)], ["--job", "gpt", str(path)]):
        done = CliRunner().invoke(cli, ["events", *arguments])
        assert done.exit_code == 0, done.output
        assert done.output.count("worker m2 on host b died (SIGKILL); stage 2 taken over by m1 in 0.12 s") == 1
        assert re.search(r"restarts: 0\ngoodput: \d+% of the member-seconds\n$", done.output)
    assert CliRunner().invoke(cli, ["events", "--json", str(path)]).output == path.read_text()
    other = CliRunner().invoke(cli, ["events", "--job", "other", str(path)])
    assert other.output.startswith("not finished; newest step: none")
    path.write_text("no event\n")
    assert isinstance(CliRunner().invoke(cli, ["events", str(path)]).exception, ProtocolError)


def test_the_file_of_a_job_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("BAMBOO_LOGS", raising=False)
    monkeypatch.chdir(tmp_path)
    gpt = MemberOptions(job="gpt", command=())
    found, folder = with_logs(gpt, None, default=True), tmp_path / "bamboo-logs" / "gpt"
    assert (found.logs, found.events) == (str(folder), str(folder / "events.jsonl"))
    assert folder.stat().st_mode & 0o777 == 0o700
    other = with_logs(replace(found, events="/e"), "other")
    assert (other.logs, other.events) == (str(tmp_path / "other/gpt"), "/e")
    assert with_logs(found, None) == found
    write(folder / "events.jsonl", losing_run())
    assert "exit code 0" in CliRunner().invoke(cli, ["events", "--job", "gpt"]).output
    missing = CliRunner().invoke(cli, ["events", "--job", "gpt2"]).exception
    assert isinstance(missing, ConfigError) and "name the file" in str(missing)


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The default one is done without, one that the user has named is an error."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bamboo-logs").write_text("a file")
    none = MemberOptions(job="gpt", command=())
    assert with_logs(none, None, default=True) == none
    assert len(caplog.records) == 1 and "name a folder with --logs" in caplog.text
    with pytest.raises(ConfigError, match=r"--logs .*bamboo-logs \(BAMBOO_LOGS\) cannot be written to"):
        folder_of("gpt", str(tmp_path / "bamboo-logs"))


def test_a_narration_that_fails_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "events.jsonl", begun())
    options = MemberOptions(job="gpt", command=(), events=str(path))
    narration = Narration(options, False)
    narration.leave()  # there is no etcd
    narration.begin(["the banner"], "")
    write(path, [lost(10, M2), at(20, events.RunFinished, 0, None, exit_code=86, run_seconds=20)])
    narration.end()
    told = capfd.readouterr().err
    assert (
        told.startswith("[bamboo] the banner\n[bamboo] ")
        and "worker m2 died (SIGKILL)\n[bamboo] exit code 86 after 20 s" in told
    )
    assert "12:00:00" not in told, "what was there before is not told"
    options = MemberOptions(job="gpt", command=(), events=str(path))
    narration = Narration(options, False)
    narration.leave()  # there is no etcd
    narration.begin(["the banner"], "")
    path.unlink()
    narration.end()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_the_banner_has_no_secrets() -> None:
    urls = "http://user:secret@10.0.0.5:2379,http://10.0.0.6:2379"
    assert banner(MemberOptions(job="gpt", command=(), events="/e", logs="/l/gpt"), "4 members", urls) == [
        "job gpt: 4 members, etcd at http://10.0.0.5:2379,http://10.0.0.6:2379",
        "watch it with bamboo status --job gpt or bamboo events -f --job gpt or bamboo logs -f --job gpt",
        "events: /e",
        "logs: /l/gpt",
    ]
    everything = banner(MemberOptions(job="gpt", command=(), events="/l/gpt/e", logs="/l/gpt"), "4 members", urls)
    assert everything[2:] == ["logs: /l/gpt"]
    assert banner(MemberOptions(job="gpt", command=()), "", "")[1:] == ["watch it with bamboo status --job gpt"]
    shown = parse_block({"observe": {"http": "127.0.0.1:9400"}})
    assert banner(MemberOptions(job="gpt", command=(), settings=JobSettings(values=shown)), "", "")[-1] == (
        "page at 127.0.0.1:9400; bamboo web --job gpt tells its URL and token"
    )


# -- what has failed -----------------------------------------------------------------------------------


def failed(seconds: float, member: str, code: int, log: str | None = None) -> Event:
    how = {"reason": "exit", "detail": str(code), "exit_code": code, "error": "RuntimeError: a test says so"}
    return at(seconds, events.MemberFailed, 2, member, member_id=member, host="b", rank=int(member[1]), **how, log=log)


def finished(seconds: float, code: int) -> Event:
    return at(seconds, events.RunFinished, 0, None, exit_code=code, run_seconds=seconds)


def test_the_first_failure_is_that_of_the_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "worker-3.log"
    log.write_text("".join(f"2026-05-04 12:00:00.000 line {i}\n" for i in range(30)))
    path = write(tmp_path / "events.jsonl", [*begun(), failed(9, M2, 4), failed(9, M3, 3, str(log)), finished(10, 3)])
    done = CliRunner().invoke(cli, ["events", str(path)])
    assert "worker m3 on host b exited (code 3), RuntimeError: a test says so: the job ends\n" in done.output
    told = done.output.splitlines()
    first = next(i for i, line in enumerate(told) if line.startswith("first failure"))
    assert told[first:] == [
        f"first failure: worker {M3}, rank 3 on host b, exited (code 3): RuntimeError: a test says so",
        f"its output: {log}",
        *(f"  | line {i}" for i in range(10, 30)),
    ]


def test_the_first_failure_of_a_fatal_loss() -> None:
    story = Story()
    fatal = at(10, events.Fatal, 3, stages=[(0, 1), (0, 2)], members=[M1, M2], checkpoint=None)
    told(story, [*begun(), lost(9, M0), lost(10, M1), lost(10, M2), fatal, finished(11, 86)])
    failure = failure_of(story.job)
    assert failure is not None and failure.text == f"worker {M1}, rank 1 on host a, died (SIGKILL)"
    for code in (0, 130):
        told(story, [*begun(), lost(9, M0), finished(11, code)])
        assert failure_of(story.job) is None


def test_members_are_looked_at_while_something_takes_long() -> None:
    story = Story()
    seen = []
    new = "m4-eeeeeeee"
    for found in (
        begun()[:-2],
        begun()[-2:],
        joined(10, new),
        [plan(10, 3, MEMBERS, [M3, M0, M1, M2], members=[*MEMBERS, new])],
        [lost(11, M2), plan(11, 4, [M0, M1, M1, M3], [M3, M0, None, None], [M2], members=[M0, M1, M3, new])],
        [*recovered(12, 4, M0, M1, M3, new), plan(13, 5, [M0, M1, new, M3], [M3, M0, M1, new])],
    ):
        told(story, found)
        seen.append(story.job.unsettled)
    assert seen == [True, False, True, False, True, False]
