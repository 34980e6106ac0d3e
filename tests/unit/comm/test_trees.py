"""What all members do together goes by a tree: all are in it, and whatever its form, all get the same bits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.comm.agreement import Agreement, _join, _sum
from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.comm.links import Links
from bamboo_ds.comm.tree import FAN_OUT, Tree
from bamboo_ds.comm.wire.payloads import Payload, read, written
from bamboo_ds.errors import NotMet
from tests.support.hubs import Hubs

pytestmark = pytest.mark.claim("design.md", "reference/events.md")


def trees(count: int, fan_out: int | None) -> dict[str, Tree]:
    names = [f"m{number}" for number in range(count)]
    return {name: Tree(names, name, fan_out) for name in names}


def combined(found: dict[str, Tree], payloads: dict[str, Payload], merge: object) -> Payload:
    """As :meth:`Agreement.gather` goes up the tree."""

    def of(name: str) -> Payload:
        children = found[name].children
        return merge([payloads[name], *map(of, children)]) if children else payloads[name]  # type: ignore[operator]

    (root,) = [name for name, tree in found.items() if tree.parent is None]
    return of(root)


def test_every_member_is_in_it_once() -> None:
    for count in range(1, 41):
        for fan_out in (None, 0, 1, 2, 3, 7, count):
            found = trees(count, fan_out)
            width = FAN_OUT if fan_out is None else max(1, fan_out)
            assert [name for name, tree in found.items() if tree.parent is None] == ["m0"]
            for name, tree in found.items():
                assert len(tree.children) <= width
                assert all(found[child].parent == name for child in tree.children)
                steps, at = 0, name
                while (parent := found[at].parent) is not None:
                    assert at in found[parent].children
                    at, steps = parent, steps + 1
                assert at == "m0" and sum(width**depth for depth in range(steps)) < count, "it is too deep"
            assert sum(len(tree.children) for tree in found.values()) == count - 1


def test_a_flat_one_has_all_below_the_first() -> None:
    found = trees(9, 9)
    assert found["m0"].children == tuple(f"m{number}" for number in range(1, 9))


@given(
    st.lists(
        st.tuples(st.integers(0, 39), st.floats(width=64, allow_nan=False, allow_infinity=False)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_tree_gives_the_same_bits(slots: list[tuple[int, float]], count: int, dtype: torch.dtype) -> None:
    """Of vectors of which one member has each element, as the commit's: others have zero there."""
    expected = torch.tensor([value for _, value in slots], dtype=torch.float64).to(dtype)
    found = []
    for fan_out in (None, 1, 2, count):
        payloads: dict[str, Payload] = {}
        for number in range(count):
            own = torch.tensor([member % count == number for member, _ in slots])
            payloads[f"m{number}"] = torch.where(own, expected, torch.zeros_like(expected))
        total = combined(trees(count, fan_out), payloads, _sum)
        assert isinstance(total, torch.Tensor)
        found.append(total.view(torch.uint8).tolist())
    assert all(each == found[0] for each in found)
    # A zero loses its sign among other zeros, if there are any.
    assert torch.equal(torch.frombuffer(bytearray(found[0]), dtype=dtype), expected)


@given(st.integers(1, 40), st.integers(1, 6))
def test_texts_of_all_arrive(count: int, fan_out: int) -> None:
    found = trees(count, fan_out)
    texts = {name: f"{name} ü" * number for number, name in enumerate(found)}
    total = combined(found, {name: written({name: text}) for name, text in texts.items()}, _join)
    assert read(total) == texts


class Together:
    """Members of one process in an epoch.

    Attributes:
        told: who has told that it waits for whom to enter.
        telling: released each time.
    """

    def __init__(self, count: int, tell_after_s: float) -> None:
        self.hubs = Hubs([f"m{number}" for number in range(count)])
        self.telling = threading.Semaphore(0)
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.links: dict[str, Links] = {}
        self.agreements: dict[str, Agreement] = {}
        members = tuple(self.hubs)
        for name in members:
            life = Lifetime(1, lambda member, reason: None, lambda host, port: None)
            links = self.links[name] = Links(life, self.hubs[name], members, name, self.hubs.places)
            awaited = partial(self._tell, name)
            self.agreements[name] = Agreement(links, members, awaited=awaited, tell_after_s=tell_after_s)

    def enter(self, name: str) -> None:
        self.links[name].enter()
        self.agreements[name].enter()

    def _tell(self, name: str, members: Sequence[str], seconds: float) -> None:
        self.told.append((name, tuple(members)))
        self.telling.release()

    def gather(self, name: str) -> Payload:
        """What all together are, for one of them."""
        number = int(name[1:])
        mine = torch.nn.functional.one_hot(torch.tensor(number), len(self.hubs)) * (number + 1)
        return self.agreements[name].gather("a test", mine, _sum)

    def await_parents(self, names: list[str]) -> None:
        """Each of ``names`` knows that its parent has entered."""
        for name in names:
            links, parent = self.links[name], self.agreements[name]._tree.parent
            with links.changed:
                assert parent is None or links.changed.wait_for(partial(links.heard.__contains__, parent), 30)


@pytest.mark.parametrize("count", [1, 2, 5, 6, 14])
def test_all_get_what_all_are_together(count: int) -> None:
    together = Together(count, 60.0)
    names = list(together.hubs)
    with ThreadPoolExecutor(count) as pool:
        for name in names:
            together.enter(name)
        for _ in range(3):
            for found in pool.map(together.gather, names):
                assert isinstance(found, torch.Tensor) and found.tolist() == list(range(1, count + 1))
    # A member is connected with its parent and its children, and with nobody else.
    for name, hub in together.hubs.items():
        tree = Tree(names, name)
        assert {member for _, member in hub._connections} == {
            each for each in (tree.parent, *tree.children) if each is not None
        }
    together.hubs.close()


def test_who_has_not_come_is_told_by_those_who_wait_for_it_alone() -> None:
    """And nobody is named that only waits, too: ``m1`` for ``m2``, by way of ``m0``, as ``m5`` knows."""
    together = Together(6, 0.3)
    names = list(together.hubs)
    here = [name for name in names if name != "m2"]
    with ThreadPoolExecutor(6) as pool:
        for name in here:
            together.enter(name)
        together.await_parents(here)
        running = [pool.submit(together.gather, name) for name in here]
        for _ in range(3):  # by then all the others have waited long enough, too
            assert together.telling.acquire(timeout=30)
        assert set(together.told) == {("m0", ("m2",))}
        together.enter("m2")
        running.append(pool.submit(together.gather, "m2"))
        for each in running:
            found = each.result(30)
            assert isinstance(found, torch.Tensor) and found.tolist() == [1, 2, 3, 4, 5, 6]
    together.hubs.close()


def test_each_hears_of_all_others_by_one_neighbour() -> None:
    for count in range(1, 41):
        for fan_out in (None, 1, 2, count):
            for name, tree in trees(count, fan_out).items():
                neighbours = [each for each in (tree.parent, *tree.children) if each is not None]
                heard = [[each, *tree.beyond(each)] for each in neighbours]
                assert sorted(sum(heard, [name])) == sorted(f"m{number}" for number in range(count))
    assert trees(14, None)["m1"].beyond("m0") == ["m2", "m3", "m4", *(f"m{number}" for number in range(9, 14))]
    assert trees(14, None)["m0"].beyond("m2") == ["m9", "m10", "m11", "m12"]


def test_a_round_that_is_not_met_names_who_is_missing() -> None:
    together = Together(3, 60.0)
    here = ["m0", "m2"]
    for name in here:
        together.enter(name)
    with pytest.raises(NotMet, match=r"in a test for m1, m2$") as error:
        together.agreements["m0"].meet("a test", b"x", list(together.hubs), timedelta(seconds=0.05))
    assert list(error.value.members) == ["m1", "m2"]
    together.hubs.close()


def test_who_waits_for_others_is_not_accused_alone() -> None:
    """``m5`` has not come: ``m1`` waits for it, as ``m0`` does without knowing."""
    together = Together(15, 60.0)
    limits = {"m0": 0.2, "m1": 0.3, "m2": 0.4}
    for name in limits:
        together.enter(name)

    def meet(name: str) -> str:
        with pytest.raises(NotMet) as error:
            together.agreements[name].meet("a test", b"x", list(together.hubs), timedelta(seconds=limits[name]))
        return str(error.value).partition(" in a test for ")[2]

    with ThreadPoolExecutor(len(limits)) as pool:
        told = dict(zip(limits, pool.map(meet, limits), strict=True))
    assert "m1 (or for m5, m6, m7, m8, for whom it may wait), m2 (or for m9" in told["m0"]
    assert told["m1"] == "m5, m6, m7, m8" and told["m2"] == "m9, m10, m11, m12"
    together.hubs.close()
