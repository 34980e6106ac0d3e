"""Members whose scripts make different calls say so, instead of waiting for each other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bamboo_ds.comm import links as module
from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.comm.links import Links
from bamboo_ds.comm.standing import END, Stand, Standings, differ
from bamboo_ds.errors import CallsDiffer
from tests.support.hubs import Hubs

pytestmark = pytest.mark.claim("guides/scripts.md")

TRAINS = Stand(0, 3, "train_batch", 3, done={})
IN_BARRIER = Stand(1, 3, "barrier", 3, "world/0.1.2", 2, (0, 1, 2), {"world/0.1.2": 1})


@pytest.mark.parametrize(
    ("other", "different"),
    [
        (Stand(1, 3, END, 3), True),
        (Stand(1, 3, "save_checkpoint", 3), True),
        (Stand(1, 3, "train_batch", 3), False),
        (Stand(1, 2, "save_checkpoint", 2), False),  # what comes after it need not be the same
        (IN_BARRIER, True),
        (replace(IN_BARRIER, ranks=(1, 2)), False),  # others come
        (replace(IN_BARRIER, number=2), False),
    ],
)
def test_which_calls_wait_for_each_other_for_ever(other: Stand, different: bool) -> None:
    assert differ(TRAINS, other) is differ(other, TRAINS) is different


def test_whoever_has_come_out_of_a_collective_or_was_not_there_goes_on() -> None:
    assert not differ(replace(TRAINS, done={"world/0.1.2": 2}), IN_BARRIER), "the other one is about to come out"
    assert not differ(replace(TRAINS, done=None), IN_BARRIER), "one that has joined takes no part"
    assert not differ(IN_BARRIER, replace(IN_BARRIER, rank=0, call="allreduce")), "torch's to find"


class Pair:
    """The links of two members, whose stands can be set."""

    def __init__(self) -> None:
        self.stands: dict[str, Stand | None] = {"a": None, "b": None}
        self.hubs = Hubs("ab")
        self.links: dict[str, Links] = {}
        for name, hub in self.hubs.items():
            life = Lifetime(1, lambda member, reason: None, lambda host, port: None)
            stand = lambda name=name: self.stands[name]  # noqa: E731
            self.links[name] = Links(life, hub, "ab", name, self.hubs.places, stand=stand)
            self.links[name].enter()

    def wait(self, name: str) -> Any:
        """Wait for something of the other member that does not come; what that raises."""
        links = self.links[name]
        with pytest.raises(CallsDiffer) as raised, links.changed:
            links.wait("receive", lambda: False, "ab")
        return str(raised.value)

    def close(self) -> None:
        for links in self.links.values():
            links.life.abort("the test is over")
        for links in self.links.values():
            links.close()
        self.hubs.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(module, "ASK_AFTER_S", 0.01)
    made = Pair()
    yield made
    made.close()


def test_one_that_waits_finds_out_about_one_that_never_asks(pair: Pair) -> None:
    """Such as one that is blocked inside gloo; and one that comes there only later."""
    pair.stands["a"] = Stand(1, 3, END, 3)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(pair.wait, "a")
        asked = threading.Event()
        services = pair.links["b"].services
        answer = services[Standings.ASK]
        services[Standings.ASK] = lambda told: (answer(told), asked.set())[0]  # type: ignore[func-returns-value]
        assert asked.wait(20) and not waits.done()
        pair.stands["b"] = TRAINS
        found = waits.result(20)
    assert found.startswith("rank 0 has called train_batch, after step 3, while the script of rank 1 has ended, after ")


def test_both_are_told_and_others_wait_on(pair: Pair) -> None:
    pair.stands.update(a=TRAINS, b=replace(IN_BARRIER, done={}))
    with ThreadPoolExecutor() as pool:
        a, b = pool.map(pair.wait, "ab")
    assert "rank 1 has called the collective barrier, after step 3, while rank 0 has called train_batch" in a
    assert "rank 0 has called train_batch, after step 3, while rank 1 has called the collective barrier" in b


def test_equal_calls_wait_as_long_as_it_takes(pair: Pair) -> None:
    pair.stands.update(a=TRAINS, b=replace(TRAINS, rank=1))
    links, asked = pair.links["a"], []
    tell = links._standings.tell
    links._standings.tell = lambda: (asked.append(1), tell())[1]  # type: ignore[method-assign]
    with links.changed:
        assert not links.wait("receive", lambda: False, ["b"], timedelta(seconds=0.1))
    assert 2 <= len(asked) <= 4, "more and more rarely"
