"""What survivors decide from their records."""

from __future__ import annotations

import pytest

from bamboo_ds.errors import ProtocolError
from bamboo_ds.schedule import Decision, MemberProgress, RoleProgress, decide
from bamboo_ds.topology import Layout, Role
from tests.support.planning import undivided

pytestmark = pytest.mark.claim("concepts.md")

LAYOUT = Layout(1, 2)
A, B = LAYOUT.roles
PART, WHOLE, NONE = undivided(3, 1), undivided(4, 4, reduced=True), undivided()
NAN = float("nan")


def record(
    step: int, entered: bool, *roles: tuple[Role, RoleProgress], commit: tuple[float, ...] | None = None
) -> MemberProgress:
    return MemberProgress(step, entered, dict(roles), commit)


def test_decide_resume() -> None:
    decision = decide({"a": record(0, False, (A, PART)), "b": record(0, True, (B, WHOLE))}, LAYOUT)
    assert decision == Decision(0, "resume", (), None, {A: PART, B: WHOLE})


def test_decide_commit() -> None:
    vector = (2.5, NAN)  # a loss may be NaN; equal bits are equal vectors
    records = {
        "a": record(7, True, (A, WHOLE), commit=vector),
        "b": record(7, True, (B, WHOLE), commit=(2.5, float("nan"))),
    }
    decision = decide(records, LAYOUT)
    assert (decision.step, decision.mode, decision.behind) == (7, "commit", ())
    assert decision == decide(dict(reversed(records.items())), LAYOUT)


def test_decide_behind() -> None:
    records = {
        "b": record(6, True, (B, WHOLE), commit=(1.0,)),
        "a": record(7, False, (A, PART), commit=(2.0,)),
    }
    assert decide(records, LAYOUT) == Decision(7, "resume", ("b",), (2.0,), {A: PART, B: NONE})
    records["a"] = record(7, True, (A, WHOLE), commit=(2.0,))
    assert decide(records, LAYOUT).mode == "resume"


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ({}, "no records"),
        (
            {"a": record(7, False, (A, PART), commit=(2.0,)), "b": record(6, False, (B, WHOLE))},
            "member b is in iteration 6",
        ),
        (
            {"a": record(7, False, (A, PART), commit=(2.0,)), "b": record(5, True, (B, WHOLE))},
            "member b is in iteration 5",
        ),
        ({"a": record(7, False, (A, PART)), "b": record(6, True, (B, WHOLE))}, "nobody has its commit"),
        (
            {
                "a": record(7, False, (A, PART), commit=(2.0,)),
                "b": record(7, False, (B, PART), commit=(2.5,)),
            },
            "disagree",
        ),
        ({"a": record(0, False, (A, PART))}, r"missing or unknown: \(0,1\)"),
        ({"a": record(0, False, (A, PART), (B, PART), (Role(1, 0), PART))}, r"unknown: \(1,0\)"),
        (
            {"a": record(0, False, (A, PART)), "b": record(0, False, (A, PART), (B, PART))},
            r"role \(0,0\) is claimed",
        ),
    ],
)
def test_decide_refuses(records: dict[str, MemberProgress], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decide(records, LAYOUT)
