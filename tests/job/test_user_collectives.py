"""What a script does with torch.distributed itself goes on when members are lost and come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import SUPPORT, Result, RunningJob, run_bamboo, run_stock, write_config

pytestmark = pytest.mark.claim("guides/elastic.md", "guides/scripts.md", "reference/limits.md")

SCRIPT = SUPPORT / "train_with_collectives.py"
RANKS = 4


# -- a job ------------------------------------------------------------------------------------------------


def said(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each process has told, by its file; a line that is being written is left out."""
    found = {}
    for file in folder.glob("said-*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        found[file.stem] = [json.loads(line) for line in lines if line.endswith("\n")]
    return found


@pytest.mark.integration
def test_losses_inside_collectives_of_the_script_and_a_joiner(tmp_path: Path) -> None:
    # The agents tell how the members were lost, however late, before the others accuse them.
    config = write_config(tmp_path, {"recovery": {"max_restarts": 0, "suspect_after_s": 30}}, 6)
    with RunningJob(tmp_path, RANKS, ["--faults"], config, SCRIPT) as job:

        def alive() -> int:
            newest = [lines[-1] for lines in said(tmp_path).values() if lines and not lines[-1]["replaying"]]
            last = max((line for line in newest), key=lambda line: line["step"], default=None)
            return len({told["rank"] for told in last["objects"]}) if last else RANKS

        job.wait_for("both faults", lambda: len(list(tmp_path.glob("fault-*"))) == 2)
        job.wait_for("two ranks alone", lambda: alive() == 2)
        job.join()
        job.wait_for("three ranks", lambda: alive() == 3, 120)
        (tmp_path / "over").touch()
        result = job.finish()
    assert result.exit_code == 0, result.output[-6000:]
    assert [(e["reason"], e["detail"]) for e in result.events("member_lost")] == [("signal", "SIGKILL")] * 2
    members = said(tmp_path)
    by_step: dict[int, list[dict[str, Any]]] = {}
    for lines in members.values():
        for line in lines:
            if not line["replaying"]:
                by_step.setdefault(line["step"], []).append(line)
    last = max(by_step)
    counts, totals = list[int](), list[list[float]]()
    assert not any(line["speaks"] for lines in members.values() for line in lines if line["replaying"])
    for step in range(last + 1):
        lines = sorted(by_step[step], key=lambda line: line["rank"])
        assert sorted(rank for line in lines for rank in line["speaks"]) == list(range(RANKS)), (step, lines)
        assert all(line["rank"] in line["speaks"] for line in lines)
        for name in ("counted", "alike", "greatest", "broadcast", "gathered", "objects", "told"):
            assert len({json.dumps(line[name]) for line in lines}) == 1, (step, name, lines)
        assert lines[0]["counted"] == [RANKS] * 3
        totals.append(lines[0]["alike"])
        assert lines[0]["greatest"] == 3
        assert len({line["own"] for line in lines if "own" in line}) == 1
        assert [o["step"] for o in lines[0]["objects"]] == [step] * RANKS
        assert {o["rank"] for o in lines[0]["objects"]} == {line["rank"] for line in lines}
        (of_rank_0,) = (line["rank"] for line in lines if 0 in line["speaks"])
        assert lines[0]["told"] == [{"rank": of_rank_0, "step": step}, "x" * step]
        counts.append(len(lines))
    assert counts[:5] == [4] * 5 and counts[5] == 3
    assert sorted(counts[6:], reverse=True)[0] == 3 and counts[-1] == 3 and 2 in counts
    check_the_lost(members)
    check_what_is_told(result, members)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    stock = run_stock(undisturbed, RANKS, ["--steps", str(last + 1)], write_config(undisturbed, None, 6), script=SCRIPT)
    assert stock.exit_code == 0, stock.output[-4000:]
    expected = {f.read_text() for f in undisturbed.glob("losses-*.json")}
    assert len(expected) == 1
    assert {f.read_text() for f in tmp_path.glob("losses-*.json")} == expected
    (stock_lines, *_) = said(undisturbed).values()
    assert totals == [line["alike"] for line in stock_lines]


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_loss_before_training_begins_again(tmp_path: Path) -> None:
    """Scripts count ranks there, and wait for files that one of them writes."""
    runs = {name: tmp_path / name for name in ("stock", "ours")}
    for folder in runs.values():
        folder.mkdir()
    command = ["--steps", "3"]
    stock = run_stock(runs["stock"], RANKS, command, write_config(runs["stock"], None, 6), SCRIPT)
    assert stock.exit_code == 0, stock.output[-4000:]
    config = write_config(runs["ours"], {}, 6)
    result = run_bamboo(runs["ours"], RANKS, [*command, "--fault-in-setup"], config, SCRIPT)
    assert result.exit_code == 0, result.output[-4000:]
    assert (runs["ours"] / "fault-2").exists()
    (event,) = result.events("restart")
    assert (event["number"], event["checkpoint"]) == (1, None)
    assert [e["step"] for e in result.events("step")] == [1, 2, 3]
    assert "sets up together before it trains" in result.output
    (expected,) = {f.read_text() for f in runs["stock"].glob("losses-*.json")}
    assert {f.read_text() for f in runs["ours"].glob("losses-*.json")} == {expected}


def check_the_lost(members: dict[str, list[dict[str, Any]]]) -> None:
    """What rank 3 saw of ranks 2 and 0, which were lost in this order."""
    (lines,) = (lines for name, lines in members.items() if name.startswith("said-3-"))
    losses = [line for line in lines if any("lost" in reason for _, reason, _, _ in line["plans"])]
    assert [line["to"] for line in losses if "to" in line] == [2, 0]
    assert {line["from"] for line in lines if "from" in line} == {0.5}
    assert [line["heard"] for line in lines] == [line["step"] for line in lines]
    assert all(line["reduced"] == line["own"] for line in lines)
    # The group of ranks 0, 2, 3: sums of rank + 1, in which ranks 0 or 3 stand for the lost ones, too; or a joiner.
    own = [line["own"] for line in lines]
    assert own[:5] == [8] * 5 and set(own[6:]) <= {6, 9, 10, 11, 12} and own[6] in (6, 9) and 12 in own
    after = next(line for line in lines if line["gathered"][0] != 0.0)
    assert after["broadcast"][0] in (after["step"], -1.0)


def check_what_is_told(result: Result, members: dict[str, list[dict[str, Any]]]) -> None:
    """Each place whose collective lacks a rank is told once, by the first member of its group, with the stand-in."""
    told = [event for event in result.events("collective_incomplete") if event["lost_ranks"] == [2]]
    places = [(e["operation"], e["place"].rpartition(" in ")[0], *e["ranks"], e["member"]) for e in told]
    assert len(set(places)) == len(places)
    assert all("train_with_collectives.py:" in place for _, place, *_ in places)
    operations = {operation for operation, *_ in places}
    assert {"allreduce", "allgather", "reduce", "send", "recv"} <= operations
    assert not {"barrier", "broadcast"} & operations, "they lack nothing: the root lives"
    assert "no process runs as ranks (2) now, and in the place of their shares are those that the" in result.output
    broadcasts = [e for e in result.events("collective_incomplete") if e["operation"] == "broadcast"]
    assert all(0 in event["lost_ranks"] for event in broadcasts) and len(broadcasts) >= 1
