"""The ledger of consumed batches: what it says is what was used, and its verifier sees whatever is wrong."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bamboo_ds.cli.ledger import ledger as command
from bamboo_ds.engine.data.accounts import Accounts, Consumed, LedgerReport, payload_checksum
from bamboo_ds.engine.data.dataset import Dataset
from bamboo_ds.engine.stage.commit import Contribution, Form, Measured, decode, encode
from bamboo_ds.observe.audit import audit, compare
from bamboo_ds.observe.ledger import LedgerLine, LedgerWriter, read_ledger
from bamboo_ds.topology import Layout, Role, initial_plan, takeover, with_redundancy

from .support.faults import in_turn
from .support.jobs import Result, RunningJob, slow_until, write_config
from .support.train import iterator
from .test_elastic import assert_same, fault

pytestmark = pytest.mark.claim("concepts.md", "guides/ledger.md")

Reference = Callable[..., Result]
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def line(step: int, pipeline: int = 0, run: str = "r1", pipelines: int = 2, **changes: Any) -> LedgerLine:
    """What a correct job of 3 micro-batches of 2 samples writes, over a dataset of 1,000."""
    position = 3 * (step - 1)
    indices = [[(pipeline + pipelines * (2 * (position + m) + i)) for i in range(2)] for m in range(3)]
    values: dict[str, Any] = {
        "run": run,
        "step": step,
        "global_step": step,
        "pipeline": pipeline,
        "pipelines": pipelines,
        "inputs": [f"{1000 * pipeline + 10 * step + m:08x}" for m in range(3)],
        "labels": [f"{500000 + 1000 * pipeline + 10 * step + m:08x}" for m in range(3)],
        "position": position,
        "samples": 1000,
        "passes": [0, 0, 0],
        "indices": indices,
        "member": "m0",
        "epoch": 2,
        "time": START + timedelta(seconds=step),
    }
    return LedgerLine(**{**values, **changes})


def job(steps: int, pipelines: int = 2, indices: bool = True) -> list[LedgerLine]:
    bare = {} if indices else dict.fromkeys(("position", "samples", "passes", "indices"))
    return [line(t, d, pipelines=pipelines, **bare) for t in range(1, steps + 1) for d in range(pipelines)]


# -- the verifier -----------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 8), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_a_correct_ledger_has_no_problems(data: st.DataObject, steps: int, pipelines: int, indices: bool) -> None:
    """In any order, and with lines that a second member has written."""
    lines = job(steps, pipelines, indices)
    again = data.draw(st.lists(st.sampled_from(lines), max_size=4))
    copies = [each.model_copy(update={"member": "m7", "epoch": 5, "time": START}) for each in again]
    shuffled = data.draw(st.permutations(lines + copies))
    found = audit(shuffled, distinct=True, steps=steps)
    assert found.problems == []
    assert (found.micro_batches, found.repeated) == (3 * steps * pipelines, len(copies))
    assert found.samples == (6 * steps * pipelines if indices else 0)
    assert compare(found, audit(lines)) == []


def lost(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    return [*lines[:at], *lines[at + 1 :]]


def other_inputs(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    inputs = ["ffffffff", *lines[at].inputs[1:]]
    return [*lost(lines, at), lines[at].model_copy(update={"inputs": inputs})]


def contradicted(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    return [*lines, *other_inputs(lines, at)[-1:]]


def sample_twice(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    used = lines[at - 1].indices
    assert used is not None
    return [*lost(lines, at), lines[at].model_copy(update={"indices": [used[0], *lines[at].indices[1:]]})]


def skipped(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    return [*lost(lines, at), lines[at].model_copy(update={"position": lines[at].position + 1})]


def step_twice(lines: list[LedgerLine], at: int) -> list[LedgerLine]:
    """The data of a step is used again in the next one."""
    before = lines[at - 2] if at >= 2 else lines[at + 2]
    names = ("inputs", "labels", "indices")
    return [*lost(lines, at), lines[at].model_copy(update={name: getattr(before, name) for name in names})]


@given(
    st.data(),
    st.integers(2, 6),
    st.sampled_from([lost, other_inputs, contradicted, sample_twice, skipped, step_twice]),
)
@settings(deadline=None)
def test_whatever_is_wrong_is_seen(data: st.DataObject, steps: int, defect: Callable[..., list[LedgerLine]]) -> None:
    good = job(steps)
    bad = data.draw(st.permutations(defect(good, data.draw(st.integers(0, len(good) - 1)))))
    found = audit(bad, steps=steps)
    # Only the other run can tell that contents are wrong.
    assert bool(found.problems) == (defect is not other_inputs)
    assert found.problems or compare(found, audit(good))


@given(st.integers(2, 8), st.data())
@settings(deadline=None)
def test_a_job_that_went_back_to_a_checkpoint(steps: int, data: st.DataObject) -> None:
    """Steps that were done again replace those that they repeat; the last ones may be incomplete."""
    back = data.draw(st.integers(1, steps - 1))
    first = job(steps)
    cut = data.draw(st.integers(0, 1))
    counts_on = data.draw(st.sampled_from([0, back]))
    again = [
        each.model_copy(update={"run": "r2", "step": each.step - counts_on, "time": each.time + timedelta(hours=1)})
        for each in job(steps + 2)
        if each.step > back
    ]
    found = audit([*first[: len(first) - cut], *again], distinct=True, steps=steps + 2)
    assert found.problems == []
    assert found.steps == steps + steps + 2 - back
    assert found.runs == ["r1", "r2"]
    assert compare(found, audit(job(steps + 2))) == []
    gone = audit([each for each in first if each.step < back] + again)
    assert any("the one before is" in problem for problem in gone.problems) or back == 1


def test_a_pass_is_filled_up_with_its_first_samples() -> None:
    """Three pipelines over 4 samples: the sampler gives 0 and 1 once more. A third time is wrong."""
    bare = {"pipelines": 3, "samples": 4, "position": 0, "passes": [0]}

    def lines(third: int) -> list[LedgerLine]:
        shares = [[0, 3], [1, 0], [2, third]]
        short = {"inputs": ["00000000"], "labels": ["00000000"]}
        return [line(1, d, **bare, **short, indices=[share]) for d, share in enumerate(shares)]

    assert audit(lines(1)).problems == []
    assert "sample 3 of pass 0 is used by" in audit(lines(3)).problems[0]


def test_the_command(tmp_path: Path) -> None:
    """Files and folders; a last line that is cut off does not count; everything else that is no line is named."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder, lines in ((good, job(4)), (bad, other_inputs(job(4), 3))):
        for each in lines:
            LedgerWriter(str(folder), f"m{each.pipeline}").append(each)
    with open(good / "m1.jsonl", "a") as file:
        file.write('{"schema":1,"run":"r1","st')
    run = CliRunner().invoke
    done = run(command, [str(good), "--steps", "4", "--distinct", "--against", str(good / "m0.jsonl")])
    assert done.exit_code == 1 and "the other ledger: run r1, step 1: pipelines 1 are missing" in done.output
    done = run(command, [str(good), "--steps", "4", "--distinct", "--against", str(good)])
    assert done.exit_code == 0 and "each consumed exactly once, as in the other run" in done.output, done.output
    assert run(command, [str(good), "--steps", "5"]).exit_code == 1
    done = run(command, [str(bad), "--against", str(good), "--json"])
    assert done.exit_code == 1
    report = json.loads(done.output)
    assert report["steps"] == 4 and report["micro_batches"] == 24 and report["samples"] == 48
    assert report["problems"] == ["global step 2, pipeline 1: inputs of micro-batch 0: ffffffff and 000003fc"]
    with open(bad / "m1.jsonl", "a") as file:
        file.write('{"schema":1}\nnonsense\n')
    problems = read_ledger([bad])[1]
    assert [problem.split(" ")[0] for problem in problems] == [f"{bad}/m1.jsonl:5", f"{bad}/m1.jsonl:6"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run(command, [str(empty)]).exit_code != 0


def test_what_cannot_be_written_does_not_stop_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = LedgerWriter(str(tmp_path / "file"), "m0")
    writer.append(line(1))
    writer.append(line(2))
    assert caplog.text.count("missing in the ledger") == 1


# -- the engine's side ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "pipelines", "batch"), [(24, 2, 3), (23, 2, 3), (7, 3, 4), (2, 3, 1), (10, 1, 4)])
def test_indices_are_those_that_the_loader_reads(size: int, pipelines: int, batch: int) -> None:
    data = Dataset(
        list(range(size)),
        pipelines,
        batch,
        lambda sampler: torch.utils.data.DataLoader(range(size), batch, sampler=sampler),
    )
    for pipeline in range(pipelines):
        for position in range(12):
            number, indices = data.indices(pipeline, position)
            assert indices == data.batch(pipeline, position).tolist()
            assert number == position // ceil(ceil(size / pipelines) / batch)


def test_checksums_tell_contents_shapes_and_types_apart() -> None:
    x = torch.arange(6, dtype=torch.int32)
    different = [None, x, x.reshape(2, 3), x.float(), x + 1, (x, x), x.bool(), torch.tensor(3), x[:0], x.bfloat16()]
    assert len({payload_checksum(each) for each in different}) == len(different)
    assert payload_checksum((x,)) == payload_checksum(x)
    assert payload_checksum(torch.stack([x, x], 1)[:, 0]) == payload_checksum(x)


def test_the_commit_carries_checksums_exactly() -> None:
    layout, most = Layout(2, 3), 2**32 - 1
    shares = [
        Contribution({}, {}, consumed={Role(0, 0): [1, most], Role(1, 2): [7, 8]}),
        Contribution(
            {1: [0.5]},
            {Role(1, 1): Measured(True, (2.0,))},
            3,
            [Role(0, 2)],
            consumed={Role(0, 2): [3, 4], Role(1, 0): [5, 6]},
        ),
    ]
    total = sum(encode(layout, Form(accounted=2), share) for share in shares)
    found = decode(layout, Form(accounted=2), tuple(total.tolist()))
    assert found.consumed == ((1, most, 3, 4), (5, 6, 7, 8))
    assert found.overflow and found.squares == ((0.0, 0.0, 0.0, 2.0, 0.0, 0.0),)
    assert (found.mismatches, found.redundant, found.losses[1]) == ((Role(0, 2),), 3, (0.5,))


def test_a_line_that_a_lost_owner_may_have_missed_is_written_by_the_next(tmp_path: Path) -> None:
    """Also if that one has just joined; nobody writes a line twice."""
    layout = Layout(2, 2)
    before = with_redundancy(initial_plan(["a", "b", "c", "d"]), layout, True)
    members = {name: Accounts(str(tmp_path), name) for name in "abcd"}
    consumed = Consumed(step=3, global_step=13, checksums=((1, 2, 3, 4), (5, 6, 7, 8)), position=None)
    for accounts in members.values():
        accounts.begin("r1", str(tmp_path))
        accounts.commit(consumed)
    members["b"].write(before, None)
    after = takeover(before, ["a"])  # a owned the first stage of pipeline 0
    for name in "bcd":
        members[name].write(after, None)
        members[name].write(after, None)
    heir = after.owner(Role(0, 0))
    lines, problems = read_ledger([tmp_path])
    assert problems == []
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    assert {(each.pipeline, each.member): each.inputs for each in lines} == {
        (0, heir): ["00000001", "00000002"],
        (1, "b"): ["00000005", "00000006"],
    }
    newcomer = Accounts(None, "e")
    report = members["d"].report()
    assert report is not None
    newcomer.follow("r1", LedgerReport.model_validate(json.loads(json.dumps(report.model_dump()))))
    assert newcomer.on
    newcomer.write(replace(after, owners=("e",) * 4), None)
    assert len(read_ledger([tmp_path])[0]) == 4


# -- a job ------------------------------------------------------------------------------------------------


def expected(steps: int, pipelines: int, micro_batches: int, batch: int) -> Iterator[LedgerLine]:
    """What an undisturbed run of the tests' script consumes."""
    for pipeline in range(pipelines):
        batches = iterator(argparse.Namespace(model="mlp"), pipeline, pipelines, batch, None)
        for step in range(1, steps + 1):
            drawn = list(itertools.islice(batches, micro_batches))
            sums = [[f"{payload_checksum(each[part]):08x}" for each in drawn] for part in (0, 1)]
            bare = dict.fromkeys(("position", "samples", "passes", "indices"))
            yield line(step, pipeline, pipelines=pipelines, inputs=sums[0], labels=sums[1], **bare)


@pytest.mark.integration
@pytest.mark.parametrize("data", [pytest.param("iterators", marks=pytest.mark.exhaustive), "training_data"])
def test_every_batch_once_whatever_happens(tmp_path: Path, reference: Reference, data: str) -> None:
    """The owner of a first stage dies between commit and line, one joins, that of a last stage dies."""
    folder, now, go = tmp_path / "ledger", tmp_path / "now", tmp_path / "go"
    arguments = ["--training-data"] if data == "training_data" else []
    # Ranks 0..3 are (pipeline, stage) = (0,0), (1,0), (0,1), (1,1).
    faults = in_turn(fault(1, 3, ".supply.account"), fault(2, 4, "BackwardPass", 2, when=str(now)))
    config = write_config(tmp_path, {"observe": {"ledger": str(folder)}}, 4)
    script = ["--stages", "2", *arguments, *slow_until(go), "--faults", json.dumps(faults)]
    with RunningJob(tmp_path, 4, script, config) as running:
        running.wait_for("a loss", lambda: len(running.events("member_lost")) == 1)
        running.join()
        running.wait_for("the joiner owns a stage", lambda: len(set(running.plan()["owners"])) == 4)
        now.touch()
        running.wait_for("another loss", lambda: len(running.events("member_lost")) == 2)
        go.touch()
        result = running.finish()
    steps = int(result.length[1])
    assert_same(result, reference(2, 2, 4, *arguments, *result.length), faults, joined=1)
    lines, problems = read_ledger([folder])
    found = audit(lines, distinct=data == "iterators", steps=steps)
    assert problems + found.problems == []
    other = audit(expected(steps, 2, 4, 4))
    assert other.problems == []
    assert compare(found, other) == []
    assert found.samples == (steps * 2 * 4 * 4 if data == "training_data" else 0)
    # The lost owner has written nothing of its last step; its heir has.
    written = [each.step for each in lines if each.member.startswith("m1-")]
    died = max(written) + 1
    assert any(each.step == died and each.pipeline == 1 for each in lines)
    assert len({each.member for each in lines}) >= 3
