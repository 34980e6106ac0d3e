"""``bamboo top`` and ``bamboo jobs``: what they print of a job. Their real path is in ``test_run_cli.py``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from bamboo_ds.cli import jobs as list_jobs
from bamboo_ds.cli import top as top_command
from bamboo_ds.cli.jobs import JobReport, jobs_table, losses
from bamboo_ds.cli.main import cli
from bamboo_ds.cli.top import LiveSource
from bamboo_ds.cli.top_view import frame
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.errors import ConfigError, StoreUnavailable
from bamboo_ds.launchers import jobs
from bamboo_ds.observe.live import LiveJob
from bamboo_ds.observe.tail import EventTail
from bamboo_ds.observe.view import LiveView, Overview
from bamboo_ds.store.records import Snapshot
from tests.support.synthetic_job import SyntheticJob, four
from tests.support.written import write

pytestmark = pytest.mark.claim("guides/observing.md")


def view_of(job: SyntheticJob, asked: bool = True) -> LiveView:
    live = LiveJob(job.job)
    for event in job.events:
        live.add(event)
    return live.view(job.overview() if asked else None)


def shown(view: LiveView, width: int = 80, height: int | None = None) -> list[str]:
    """The lines of a terminal of that width."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(frame(view, (view.time or 0.0) + 2.0, width, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_frame() -> None:
    """Owners, shadows, what the shadow computes, copies in the making, loads, and the next loss."""
    lines = shown(view_of(four()))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("job gpt-demo   ▶ training   epoch 8   for ")
    assert "step 167, 2.0 s ago" in text and "losses 2" in text and "checkpoint of step 131" in text
    assert next(line for line in lines if line.startswith("m0/")).split() == ["m0/m3", "m0/(m3)", "m3/(m0)", "m3/(m0)"]
    assert "next loss: that of any member would be fatal (back to the checkpoint of step 131)" in text.replace(
        "\n", " "
    )
    assert "! m0 alone holds stage 1" in text
    assert any(line.startswith("m0 *") and line.endswith("2.00") for line in lines), "who leads, and its load"
    assert "worker m1 on host beta fell silent" in text


def test_a_whole_job_can_lose_any_one_member() -> None:
    lines = shown(view_of(SyntheticJob("whole", 2, 2).train(3)))
    assert "next loss: any one member can be lost" in lines
    assert any(line.split() == ["pipeline", "1", "m1/m3", "m3/m1"] for line in lines), lines


def test_a_stage_without_replica_that_nobody_copies_is_marked() -> None:
    lines = shown(view_of(SyntheticJob("bare", 2, 2).train(3).lose(3)))
    assert any("/- !" in line for line in lines) and not any("/(m" in line for line in lines), lines


def test_a_thousand_members_are_summed_up() -> None:
    """What differs from the others is named; the rest is counted."""
    job = SyntheticJob("big", 128, 8).train(3).lose(200).lose(777).train(2)
    lines = shown(view_of(job), height=40)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80 and len(lines) <= 40
    assert "128 pipelines of 8 stages: 1020 shadowed, 4 unshadowed" in text
    assert "stage 1 of pipeline 72: unshadowed, owner m72" in text
    assert "1022 members on 128 hosts in 4 zones" in text
    assert "stages' worth of work: 1020 with 1, 2 with 2" in text
    assert "m72 on node-009, us-east-1a: running, load 2.00" in text
    assert "next loss: that of one of 4 members would be fatal (back to the beginning)" in text


def test_status_lists_every_member_with_its_processes() -> None:
    view = view_of(SyntheticJob("big", 8, 8).train(1).lose(3))
    known = [each.model_copy(update={"pid": 100 + each.slot, "agent_pid": 900 + each.slot}) for each in view.members]
    view = view.model_copy(update={"members": tuple(known), "checkpoint_path": "/c/1"})
    out = io.StringIO()
    Console(file=out, width=160, color_system=None).print(frame(view, view.time or 0.0, 160, None, processes=True))
    words = out.getvalue().split()
    assert {str(100 + slot) for slot in range(64)} | {str(900 + slot) for slot in range(64)} <= set(words)
    assert "newest checkpoint: /c/1" in out.getvalue()


def test_without_events_and_without_a_plan() -> None:
    """Where etcd alone tells, that is said; before the engines are built there are no stages."""
    live = LiveJob("gpt-demo")
    lines = shown(live.view(four().overview()))
    assert any("no events of the job are on this host" in line for line in lines)
    assert any(line.startswith("m0/m3") for line in lines), lines
    assert "the engines are not built yet" in shown(live.view(Overview()))


def test_names_of_hosts_do_nothing_to_the_terminal() -> None:
    job = SyntheticJob("evil", 1, 2, ["\x1b]0;owned\x07", "[red]x[/nothing]"]).train(1)
    text = "\n".join(shown(view_of(job)))
    assert "\x1b" not in text and "\x07" not in text
    assert "[red]x[/nothing]" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, shown(view_of(four()), width))) <= width


def test_nothing_is_cut_of_figures_and_stages() -> None:
    """Figures take more lines; stages that do not fit beside each other are counted."""
    view = view_of(SyntheticJob("long", 1, 12).train(3))
    narrow, wide = shown(view, 60), shown(view, 160)
    assert "88% of redundant passes ahead" in " ".join(narrow) and not any("…" in line for line in narrow[:6])
    assert "1 pipeline of 12 stages: 12 shadowed" in narrow
    assert any("stage 0" in line and "stage 11" in line for line in wide)


def test_a_long_past_is_not_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    job = SyntheticJob("followed", 1, 2).train(100)
    write(path, job.events)
    limits, read = list[int](), EventTail.read
    monkeypatch.setattr("bamboo_ds.cli.top._CHUNK", 8192, raising=False)
    monkeypatch.setattr(EventTail, "read", lambda tail, limit=-1: limits.append(limit) or read(tail, limit))
    source = LiveSource("followed", str(path))
    assert source.view(Mirror(Snapshot({}, 1))).step == view_of(job).step
    assert set(limits) == {8192} and len(limits) > 2


def test_events_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    job = SyntheticJob("followed", 1, 2).train(2)
    write(path, job.events)
    source = LiveSource("followed", str(path))
    assert source.view(None).step == 2
    told = len(job.events)
    job.train(3)
    job.events = job.events[told:]
    write(path, job.events)
    assert source.view(None).step == 5
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read the events.*--events"):
        source.view(None)


@pytest.mark.parametrize(("ends", "told"), [(True, True), (False, False)])
def test_it_ends_with_the_job_or_by_ctrl_c(monkeypatch: pytest.MonkeyPatch, ends: bool, told: bool) -> None:
    def snapshots(_: jobs.JobLocation) -> Iterator[Mirror]:
        yield Mirror(Snapshot({}, 1))
        if not ends:
            raise KeyboardInterrupt

    terminal = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
    monkeypatch.setattr(top_command, "_snapshots", snapshots)
    monkeypatch.setattr(top_command, "console", lambda: terminal)
    done = CliRunner().invoke(cli, ["top", "--job", "gpt", "--store", "http://127.0.0.1:1"])
    assert done.exit_code == 0, done.output
    out = terminal.file
    assert isinstance(out, io.StringIO)
    assert "job gpt" in out.getvalue() and ("job gpt has ended" in out.getvalue()) == told


def test_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An error as of ``bamboo status``."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(cli, ["top"])
    assert isinstance(done.exception, ConfigError) and str(done.exception).startswith("no job runs here; name one")
    assert CliRunner().invoke(cli, ["jobs"]).output == "no job runs here\n"


def test_losses_of_the_newest_start(tmp_path: Path) -> None:
    """Each once, of this job only, also while a line is being written."""
    path = tmp_path / "events.jsonl"
    write(path, SyntheticJob("again", 1, 3).lose(1).events)
    write(path, SyntheticJob("again", 1, 4, seed=2).train(1).lose(0).lose(2).events)
    write(path, SyntheticJob("other", 1, 4, seed=3).lose(2).events)
    with open(path, "a") as file:
        file.write('{"event":"member_lost","job":"again"')
    assert losses(str(path), "again") == 2
    assert losses(str(tmp_path / "none"), "again") is None


def test_a_job_whose_etcd_does_not_answer_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what this host knows, and with the reason; others are listed as well."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = jobs.this_process("mute", "http://127.0.0.1:1", events=str(tmp_path / "events.jsonl"))
    write(tmp_path / "events.jsonl", SyntheticJob("mute", 1, 3).lose(1).events)
    file.write()

    def refuse(*_: object) -> None:
        raise StoreUnavailable("etcd does not answer")

    monkeypatch.setattr(list_jobs, "open_store", refuse)
    try:
        done = CliRunner().invoke(cli, ["jobs", "--json"])
    finally:
        file.remove()
    (found,) = json.loads(done.output)
    assert found["problem"] == "etcd does not answer" and found["losses"] == 1 and found["members"] is None
    began = datetime.fromisoformat(found["since"])
    assert 0 <= (datetime.now(timezone.utc) - began).total_seconds() < 86400 and found["job"] == "mute"


def test_the_table_of_jobs() -> None:
    noon = datetime(2026, 5, 4, 12, tzinfo=timezone.utc)
    rows = [
        JobReport(job="gpt", since=noon, members=4, step=12, losses=1, store="http://e:2379", events="/x/[b]y"),
        JobReport(job="mute", store="http://f:2379", problem="etcd does not answer"),
    ]
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(jobs_table(rows))
    told = [line.split() for line in out.getvalue().splitlines() if "gpt" in line]
    local = f"{noon.astimezone():%Y-%m-%d %H:%M:%S}".split()
    assert [part for part in told[0] if part != "│"] == ["gpt", *local, "4", "12", "1", "http://e:2379", "/x/[b]y"]
    assert "mute: etcd does not answer" in out.getvalue()
