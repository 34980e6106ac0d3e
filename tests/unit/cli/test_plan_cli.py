"""``bamboo plan``: about a job whose keys are in a real etcd, and about jobs that do not exist."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from bamboo_ds.cli.plan import plan as command
from bamboo_ds.errors import ConfigError

pytestmark = pytest.mark.claim("guides/even-shares.md", "reference/cli.md")


def bamboo_plan(*arguments: str) -> str:
    result = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def report(*arguments: str) -> dict[str, Any]:
    return json.loads(bamboo_plan(*arguments, "--json"))


def next_owners(found: dict[str, Any]) -> list[str]:
    return [role["next_owner"] for role in found["roles"]]


def next_shadows(found: dict[str, Any]) -> list[str]:
    return [role["next_shadow"] for role in found["roles"]]


# -- jobs that do not exist -----------------------------------------------------------------------------


def test_what_if() -> None:
    full = report("--stages", "4", "--pipelines", "2", "--members", "8")
    assert next_owners(full) == [f"m{slot}" for slot in range(8)] and not full["moves"]
    assert any(reason.startswith("no role changes") for reason in full["reasons"])
    few = report("--stages", "4", "--pipelines", "2", "--members", "3")
    assert set(next_owners(few)) == {"m0", "m1", "m2"} and few["next_slowest"] == 3
    one = report("--stages", "4", "--members", "1")
    assert set(next_owners(one)) == {"m0"} and set(next_shadows(one)) == {None} and not one["lost_roles"]
    hosts = report("--stages", "4", "--members", "2,host=a", "--members", "3,host=b,zone=z")
    where = {"m0": "a", "m1": "a", "m2": "b", "m3": "b", "m4": "b"}
    assert all(where[r["next_owner"]] != where[r["next_shadow"]] for r in hosts["roles"])
    lost = report("--stages", "4", "--members", "5", "--lose", "m1", "--leave", "m2", "--bytes", "9,9,7,9")
    assert lost["lost"] == ["m1"] and lost["members"] == ["m0", "m3", "m4"]
    assert {move["bytes"] for move in lost["moves"] if move["stage"] == 2} == {7}
    fatal = report("--stages", "4", "--members", "4", "--lose", "m1", "--lose", "m0")
    assert fatal["lost_roles"] == [[0, 1]]
    uneven = report("--stages", "3", "--members", "2", "--seconds", "1,2,3")
    assert uneven["next_slowest"] == 3
    sliced = report("--stages", "2", "--pipelines", "2", "--slices", "2", "--members", "8", "--lose", "m5")
    # A slice's shadow is the same slice of the stage before.
    assert [(r["pipeline"], r["stage"]) for r in sliced["roles"] if r["owner"] == "m5"] == [(1, 1)]
    assert next(r["shadow"] for r in sliced["roles"] if r["owner"] == "m5") == "m1" and not sliced["lost_roles"]


def test_what_people_see() -> None:
    text = bamboo_plan("--stages", "4", "--members", "5", "--lose", "m1", "--explain", "--bytes", "5,6,7,8")
    assert "m1 -> m4" in text and "standbys: none" in text
    assert "copy of (0,1) (6 bytes): m0 -> m4" in text
    assert "lost: m1" in text and "slowest member: 2 -> 1 stages" in text


def test_what_members_may_hold() -> None:
    """Limits, what is held of them, and what binds."""
    asked = ("--stages", "4", "--members", "4,memory=25000000", "--bytes", ",".join(["10000000"] * 4), "--lose", "m2")
    found = report(*asked)
    assert found["memory"] == [{"member": m, "limit": 25_000_000, "held": 20_000_000} for m in ("m0", "m1", "m3")]
    assert [move["bytes"] for move in found["moves"]] == [] and next_shadows(found) == ["m3", "m0", None, None]
    text = bamboo_plan(*asked, "--explain")
    assert "m0 may hold 23.8 MiB, and holds 19.1 MiB" in text
    assert "no replica of (0,2), (0,3): one takes 9.5 MiB; of members that might hold it m0 has most room, 4.8" in text
    assert report(*asked[:3], "4", *asked[4:])["memory"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "4", "--members", "4,memory=9"], "needs --bytes"),
        (["--stages", "4", "--members", "4,memory=1G"], "memory=BYTES"),
        (["--stages", "4", "--members", "4,memory=9", "--bytes", "1,2"], "one for each of 4 stages"),
        (["--stages", "4"], "needs --stages and --members"),
        (["--members", "4"], "needs --stages and --members"),
        (["--stages", "4", "--members", "four"], "write a number"),
        (["--stages", "4", "--members", "4,rack=3"], "write a number"),
        (["--stages", "4", "--members", "4", "--job", "x"], "are about a job that runs"),
        (["--stages", "4", "--members", "4", "--lose", "m9"], "no member 'm9'"),
        (["--stages", "2", "--members", "1", "--lose", "m0"], "at least one member"),
        (["--stages", "4", "--members", "4", "--seconds", "1,x"], "--seconds"),
        (["--stages", "4", "--members", "4", "--seconds", "1,2"], "one for each of 4 stages"),
        (["--stages", "4", "--members", "4", "--min-gain", "2"], "min_gain"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bamboo_plan(*arguments)


#: Why stages are computed whole, by what is said of them.
WHOLE = {"topology.blocks": (), "tensor slices": ("--slices", "2", "--blocks", "3", "--members", "2")}


def test_stages_are_divided() -> None:
    """Of a job that does not exist, where members are fewer than stages."""
    imagined = ("--stages", "8", "--members", "7", "--blocks", "3")
    found = report(*imagined)
    assert (round(found["slowest"], 3), round(found["next_slowest"], 3)) == (2, 1.333)
    assert all(0 <= part["begin"] < part["end"] <= part["blocks"] == 3 for part in found["parts"])
    reasons = {name: report("--stages", "2", "--members", "2", *more)["reasons"] for name, more in WHOLE.items()}
    assert all(any(name in line and "whole" in line for line in lines) for name, lines in reasons.items()), reasons
    told = bamboo_plan(*imagined, "--explain")
    assert "of 3 blocks)" in told and "so that the slowest member gets less to do" in told
