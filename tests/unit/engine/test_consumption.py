"""What steps have consumed: events tell what was used, and the verification sees whatever is wrong."""

from __future__ import annotations

import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.cli.goodput import goodput
from bamboo_ds.engine.data.dataset import Dataset
from bamboo_ds.engine.stage.commit import Contribution, Form, Measured, decode, encode
from bamboo_ds.engine.stage.tracing import payload_checksum
from bamboo_ds.observe import events as ev
from bamboo_ds.observe.consumption import Consumption
from bamboo_ds.observe.event_base import Consumed
from bamboo_ds.topology import Layout, Role
from tests.support.samples import iterator

pytestmark = pytest.mark.claim(
    "concepts.md", "guides/observing.md", "reference/goodput.md", "reference/guarantees.md", "reference/settings.md"
)

TOLD: dict[str, Any] = {"job": "j", "member": "m0", "epoch": 2}
STARTED = ev.RunStarted(job="j", epoch=0, members=2, command=["x"])
RECOVERY: dict[str, Any] = {
    **dict.fromkeys(("pause_seconds", "rebuild_seconds", "redo_seconds"), 0.1),
    **dict.fromkeys(("detection_seconds", "plan_seconds")),
    **dict.fromkeys(("forwards_redone", "backwards_redone"), 0),
    "mode": "resume",
}


def consumed(step: int, /, **changes: Any) -> Consumed:
    """What a correct job over a dataset consumes, 12 samples a step."""
    told = {"step": step, "global_step": step, "checksum": f"{step:08x}", "samples": (12 * step - 12, 12 * step)}
    return Consumed(**{**told, **changes})


def step(told: Consumed, **changes: Any) -> ev.Step:
    fields = {**TOLD, "step": told.step, "loss": 1.0, "seconds": 0.5, "frc_done": 0, "frc_total": 0}
    return ev.Step(**{**fields, "consumed": told, **changes})


def recovered(before: Consumed | None, **changes: Any) -> ev.Recovered:
    return ev.Recovered(**{**TOLD, **RECOVERY, "step": 9, "consumed": before, **changes})


def found(events: Iterable[ev.Event]) -> Consumption:
    consumption = Consumption()
    assert list(consumption.watching(events)) == list(events)
    return consumption


def job(steps: int, **changes: Any) -> list[ev.Event]:
    return [step(consumed(number, **changes)) for number in range(1, steps + 1)]


# -- the verification -------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 8), st.booleans())
def test_a_correct_job_has_no_problems(data: st.DataObject, steps: int, indices: bool) -> None:
    """In any order. A step whose own event is missing is told of by survivors, the others sometimes twice."""
    events = job(steps, **({} if indices else {"samples": None}))
    again = data.draw(st.sets(st.integers(0, steps - 1)))
    lost = data.draw(st.sets(st.sampled_from(sorted(again)))) if again else set()
    survivors = [recovered(events[at].consumed, member=f"m{n}") for at in again for n in range(2)]  # type: ignore[union-attr]
    left = [event for at, event in enumerate(events) if at not in lost]
    all_of_them = [STARTED, *data.draw(st.permutations([*left, *survivors, recovered(None)]))]
    told = found(all_of_them)
    assert told.problems() == [] and told.alike() == 0
    assert told.history() == {number: events[number - 1].consumed for number in range(1, steps + 1)}  # type: ignore[union-attr]


def other(events: list[ev.Event], at: int, **changes: Any) -> ev.Event:
    return step(events[at].consumed.model_copy(update=changes))  # type: ignore[union-attr]


DEFECTS: dict[str, Callable[[list[ev.Event], int], list[ev.Event]]] = {
    "lost": lambda events, at: [*events[:at], *events[at + 1 :]],
    "without checksum": lambda events, at: [
        *events[:at],
        events[at].model_copy(update={"consumed": None}),
        *events[at + 1 :],
    ],
    "contradicted": lambda events, at: [*events, other(events, at, checksum="ffffffff")],
    "other samples": lambda events, at: [*events, other(events, at, samples=(12 * at, 12 * at + 11))],
    "samples twice": lambda events, at: [
        *events[:at],
        other(events, at, samples=(12 * at - 1, 12 * at + 12)),
        *events[at + 1 :],
    ],
    "samples left out": lambda events, at: [
        *events[:at],
        other(events, at, samples=(12 * at + 1, 12 * at + 12)),
        *events[at + 1 :],
    ],
    "global step left out": lambda events, at: [
        *events[:at],
        *(other(events, n, global_step=n + 2) for n in range(at, len(events))),
    ],
}


@given(st.data(), st.integers(3, 6), st.sampled_from(list(DEFECTS)))
def test_whatever_is_wrong_is_seen(data: st.DataObject, steps: int, defect: str) -> None:
    events = DEFECTS[defect](job(steps), data.draw(st.integers(1, steps - 2)))
    assert found(data.draw(st.permutations(events))).problems(), defect


def test_the_contents_of_a_step_that_come_again_are_counted() -> None:
    """By themselves they are no mistake: an iterator may begin again."""
    told = found([*job(3, samples=None), step(consumed(4, samples=None, checksum="00000002"))])
    assert (told.problems(), told.alike()) == ([], 1)


@given(st.integers(2, 8), st.data())
def test_a_job_that_went_back_to_a_checkpoint(steps: int, data: st.DataObject) -> None:
    """Steps that were done again replace those that they repeat; what old workers tell late does not count."""
    back = data.draw(st.integers(1, steps - 1))
    restarts = data.draw(st.booleans())
    first, late = [STARTED, *job(steps)], step(consumed(steps + 1, checksum="eeeeeeee"), epoch=7)
    begun: ev.Event = STARTED
    if restarts:
        begun = ev.Restart(job="j", epoch=7, number=1, slots=[0], checkpoint="c", step=steps)
    numbers = [number if restarts else number - back for number in range(back + 1, steps + 3)]
    again = [
        step(consumed(number, step=here, checksum=f"f{number:07x}"), epoch=9)
        for here, number in zip(numbers, range(back + 1, steps + 3), strict=True)
    ]
    told = found([*first, begun, *([late] if restarts else []), *again])
    assert told.problems() == []
    assert [len(start) for start in told.starts] == [steps, steps + 2 - back]
    assert [each.checksum[0] for each in told.history().values()] == ["0"] * back + ["f"] * (steps + 2 - back)
    gone = found([event for event in first if not isinstance(event, ev.Step) or event.step < back] + [begun, *again])
    assert gone.problems() or back == 1
    position = [step(consumed(back + 1, step=numbers[0], samples=(0, 12)), epoch=9)]
    assert "are consumed by global step" in found([*first, begun, *position]).problems()[0]


def test_the_command(tmp_path: Path) -> None:
    """It says so on stderr, ends with 1 if something is wrong, and says nothing where there are no checksums."""
    joined = ev.MemberJoined(**TOLD, member_id="m0", host="h", rank=0)

    def run(events: list[ev.Event], *options: str) -> Any:
        path = tmp_path / "events.jsonl"
        path.write_text("".join(event.to_json() + "\n" for event in (STARTED, joined, *events)))
        return CliRunner().invoke(goodput, [str(path), *options])

    done = run(job(4))
    assert (done.exit_code, done.stderr) == (0, "samples: each consumed once (4 steps)\n")
    done = run(DEFECTS["samples twice"](job(4), 2), "--json")
    assert done.exit_code == 1 and json.loads(done.stdout)["steps"] == 4
    assert done.stderr.splitlines() == [
        "step 3 begins with sample 23, expected 24",
        "samples 23 to 23 are consumed by global step 2 and again by 3",
        "samples: not each consumed once, 2 problems (4 steps)",
    ]
    done = run([event.model_copy(update={"consumed": None}) for event in job(2)])
    assert (done.exit_code, done.stderr) == (0, "")


# -- the engine's side ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "pipelines", "batch"), [(24, 2, 3), (23, 2, 3), (7, 3, 4), (2, 3, 1), (10, 1, 4)])
def test_samples_are_counted_as_the_loader_reads_them(size: int, pipelines: int, batch: int) -> None:
    data = Dataset(
        list(range(size)),
        pipelines,
        batch,
        lambda sampler: torch.utils.data.DataLoader(range(size), batch, sampler=sampler),
    )
    share, read = -(-size // pipelines), 0
    for position in range(12):
        assert data.samples_before(position) == read
        batches = [data.batch(pipeline, position).tolist() for pipeline in range(pipelines)]
        within = read // pipelines % share
        assert batches == [
            [(pipeline + pipelines * (within + n)) % size for n in range(len(batches[0]))]
            for pipeline in range(pipelines)
        ]
        read += sum(map(len, batches))


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
    agreed = decode(layout, Form(accounted=2), tuple(total.tolist()))
    assert agreed.consumed == ((1, most, 3, 4), (5, 6, 7, 8))
    assert agreed.overflow and agreed.squares == ((0.0, 0.0, 0.0, 2.0, 0.0, 0.0),)
    assert (agreed.mismatches, agreed.redundant, agreed.losses[1]) == ((Role(0, 2),), 3, (0.5,))


# -- a job ------------------------------------------------------------------------------------------------


def expected(steps: int, pipelines: int, micro_batches: int, batch: int) -> dict[int, str]:
    """Checksums of what an undisturbed run of the tests' script consumes."""
    found: dict[int, list[int]] = {number: [] for number in range(1, steps + 1)}
    for pipeline in range(pipelines):
        batches = iterator(pipeline, pipelines, batch)
        for told in found.values():
            drawn = list(itertools.islice(batches, micro_batches))
            told += [payload_checksum(each[part]) for part in (0, 1) for each in drawn]
    return {number: f"{zlib.crc32(struct.pack(f'>{len(told)}I', *told)):08x}" for number, told in found.items()}
