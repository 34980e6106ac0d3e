"""Members whose copy of a stage is wrong: who is found, who goes, and that the others have equal state afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bamboo_ds.engine.iteration.corruption import Corruption
from bamboo_ds.engine.iteration.votes import StateCopy, judge
from bamboo_ds.engine.replicas.replica import checksums, combined, shared_checksum
from bamboo_ds.engine.stage.commit import Committed, Contribution, Form, decode, encode
from bamboo_ds.engine.stage.optimizers import PlainOptimizer
from bamboo_ds.engine.stage.runtime import StageRuntime
from bamboo_ds.engine.stage.work import Verification
from bamboo_ds.errors import EXIT_CORRUPT, CopiesDiffer, Corrupt
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, with_redundancy
from bamboo_ds.topology.planner import takeover
from bamboo_ds.worker.exit import exit_code_of

pytestmark = pytest.mark.claim("guides/exactness.md", "reference/events.md", "reference/settings.md")


def held(layout: Layout, **wrong: int) -> dict[StateCopy, int]:
    """Checksums of all copies, 7 but for ``wrong``: ``O01`` is that of the owner of stage 1 of pipeline 0."""
    found = {StateCopy(role, owned): 7 for role in layout.roles for owned in (True, False)}
    for name, value in wrong.items():
        found[StateCopy(Role(int(name[1]), int(name[2])), name[0] == "O")] = value
    return found


# -- votes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["O00", "R00", "O11", "R11"])
def test_the_odd_one_out(wrong: str) -> None:
    verdict = judge(Layout(2, 2), held(Layout(2, 2), **{wrong: 1}))
    role = Role(int(wrong[1]), int(wrong[2]))
    assert verdict.odd == (StateCopy(role, wrong[0] == "O"),) and verdict.decided == {role} and not verdict.split
    assert verdict.right == {Role(0, role.stage): 7, Role(1, role.stage): 7}


def test_two_of_three_agree() -> None:
    layout = Layout(2, 1)
    for lacking in (StateCopy(Role(1, 0), False), StateCopy(Role(1, 0), True), StateCopy(Role(0, 0), False)):
        votes = held(layout, O00=1)
        del votes[lacking]
        assert judge(layout, votes).odd == (StateCopy(Role(0, 0), True),)


def test_more_than_any_other_is_enough() -> None:
    """Two of four, of which the others differ from each other, too; and only two alike are a vote."""
    layout = Layout(2, 1)
    wrong = StateCopy(Role(0, 0), False), StateCopy(Role(1, 0), False)
    assert judge(layout, held(layout, R00=1, R10=2)).odd == wrong
    several = judge(layout, held(layout, O00=1, R00=2, O10=3, R10=4))
    assert several.split == (Role(0, 0), Role(1, 0)) and not several.odd and not several.right


def test_a_replica_that_was_copied_from_a_wrong_owner_goes_with_it() -> None:
    layout = Layout(3, 1)
    assert judge(layout, held(layout, O10=1, R10=1)).odd == (StateCopy(Role(1, 0), False), StateCopy(Role(1, 0), True))


def test_where_none_is_that_of_most() -> None:
    pair = held(Layout(2, 2), O01=1, R01=1)
    assert judge(Layout(2, 2), pair).split == (Role(0, 1), Role(1, 1)) and not judge(Layout(2, 2), pair).odd
    owners = {copy: value for copy, value in held(Layout(2, 1), O00=1).items() if copy.owned}
    assert judge(Layout(2, 1), owners).split == (Role(0, 0), Role(1, 0))


@pytest.mark.parametrize(
    "layout", [Layout(1, 2), Layout(2, 2, sharded=True), Layout(2, 2, slices=2)], ids=["alone", "zero", "slices"]
)
def test_where_owner_and_replica_are_all(layout: Layout) -> None:
    """Nobody can tell; of a shard of ZeRO neither, and other slices have other weights."""
    verdict = judge(layout, held(layout, O01=1))
    assert not verdict.odd and not verdict.split and not verdict.decided


def test_where_others_tell_nothing() -> None:
    """Owner and replica of one role are all that vote: as with one pipeline."""
    owner, replica = StateCopy(Role(0, 0), True), StateCopy(Role(0, 0), False)
    verdict = judge(Layout(2, 1), {owner: 1, replica: 2})
    assert not verdict.odd and not verdict.split and not verdict.decided


def test_slices_are_compared_with_their_own() -> None:
    layout = Layout(4, 1, slices=2)
    votes = {copy: copy.role.pipeline % 2 for copy in held(layout)} | {StateCopy(Role(3, 0), True): 5}
    assert judge(layout, votes).odd == (StateCopy(Role(3, 0), True),)


@given(st.data(), st.integers(2, 4), st.integers(1, 3))
def test_less_than_half_are_found(data: st.DataObject, pipelines: int, stages: int) -> None:
    """Whichever copies of a stage are wrong, each in its way, as long as most are right."""
    layout = Layout(pipelines, stages)
    copies = sorted(held(layout))
    wrong: set[StateCopy] = set()
    for stage in range(stages):
        here = [copy for copy in copies if copy.role.stage == stage]
        wrong |= set(data.draw(st.lists(st.sampled_from(here), max_size=pipelines - 1, unique=True)))
    votes = {copy: 100 + number if copy in wrong else copy.role.stage for number, copy in enumerate(copies)}
    verdict = judge(layout, votes)
    assert set(verdict.odd) == wrong and not verdict.split
    assert all(verdict.right[copy.role] == copy.role.stage for copy in wrong)


def test_what_a_checksum_is_of() -> None:
    """Each bit of parameters and of the optimizer's state counts; buffers are a pipeline's own."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    adam = torch.optim.Adam(module.parameters())
    module(torch.arange(6.0).view(3, 2)).square().sum().backward()
    adam.step()
    nothing: Any = None
    runtime = StageRuntime(Role(0, 0), owned=True, attributes={"module": module, "optimizer": adam})
    runtime.optimizer = PlainOptimizer(nothing, nothing, runtime)
    before = checksums(runtime)
    kinds = set()
    for number, (name, tensor) in enumerate(runtime.named_tensors()):
        bits = tensor.detach().view(-1)[-1:].view(torch.uint8)
        bits[:1].bitwise_xor_(1)
        after = checksums(runtime)
        assert [at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]] == [number], name
        own, shared = (check(after) != check(before) for check in (combined, partial(shared_checksum, runtime)))
        assert own and shared is not name.startswith("buffer "), name
        kinds.add(name.partition(" of ")[0] if name.startswith("state") else name.partition(" ")[0])
        bits[:1].bitwise_xor_(1)
    assert kinds == {"parameter", "buffer", "state exp_avg", "state exp_avg_sq", "state step"}


def test_checksums_in_the_commit() -> None:
    """Each by one member; 0 is a checksum like any other. Nothing is added where nobody compares."""
    layout, most = Layout(2, 2), 2**32 - 1
    shares = [
        Contribution({}, {}, held={(Role(0, 0), True): 0, (Role(0, 1), False): most}),
        Contribution({}, {}, held={(Role(1, 1), True): 5}),
    ]
    total: torch.Tensor = sum(encode(layout, Form(votes=True), share) for share in shares)  # type: ignore[assignment]
    agreed = decode(layout, Form(votes=True), total.tolist())
    assert agreed.held == {(Role(0, 0), True): 0, (Role(0, 1), False): most, (Role(1, 1), True): 5}
    plain = encode(layout, Form(), Contribution({}, {}))
    assert len(encode(layout, Form(votes=True), Contribution({}, {}))) == len(plain) + 2 * layout.size
    assert not decode(layout, Form(), plain.tolist()).held


def test_how_a_worker_with_wrong_state_ends() -> None:
    error = Corrupt([("owner", 1, 0)], ["parameter 0.weight"], 4)
    assert exit_code_of(error) == EXIT_CORRUPT
    for part in ("owner of stage 0 of pipeline 1", "after step 4: parameter 0.weight", "evict"):
        assert part in str(error)


PLAN = with_redundancy(initial_plan(["m0", "m1", "m2", "m3"]), Layout(2, 2), True)


def member_with(
    held_by: str, differing: Mapping[Role, list[str]], plan: Plan = PLAN
) -> tuple[Corruption, list[dict[str, Any]]]:
    """A member of two pipelines of two stages that has checksum 7 of all that it holds, and what it tells and does."""
    told: list[dict[str, Any]] = []
    runtimes = {}
    for role in (*PLAN.owned_by(held_by), *PLAN.shadowed_by(held_by)):
        runtimes[role] = StageRuntime(role, owned=PLAN.owner(role) == held_by)
        runtimes[role].verification = Verification(shared=7, valid=role not in differing)
    channel = SimpleNamespace(event=lambda kind, **fields: told.append({"kind": kind, **fields}))
    agreement = SimpleNamespace(all_reduce=lambda tensor: told.append({"kind": "all know"}))
    context: Any = SimpleNamespace(
        job=SimpleNamespace(channel=channel),
        epoch=SimpleNamespace(plan=plan, layout=plan.world, member=held_by, agreement=agreement),
        binding=SimpleNamespace(runtimes=runtimes),
        progress=SimpleNamespace(steps=4),
    )
    replication: Any = SimpleNamespace(differing=dict(differing))
    return Corruption(context, replication), told


def committed(**wrong: int) -> Committed:
    found = held(Layout(2, 2), **wrong)
    return Committed((), (), 0, (), held={(copy.role, copy.owned): value for copy, value in found.items()})


def test_a_right_replica_of_a_wrong_owner_counts_again() -> None:
    """It was doubted, and nobody may take over what is in doubt. What differs otherwise stays to be mended."""
    role = Role(0, 1)
    shadow, told = member_with("m0", {role: ["parameter 0.weight"]})
    assert shadow.settle(committed(O01=1), PLAN, False) == {role}
    assert shadow.binding.runtimes[role].verification.valid
    event, _ = told
    assert (event["member_id"], event["role"], event["copy_of"]) == ("m2", [0, 1], "owner")
    assert event["tensors"] == ["parameter 0.weight"]
    wrong, _ = member_with("m0", {role: ["parameter 0.weight"]})
    wrong.binding.runtimes[role].verification.shared = 9
    silent = committed(O01=1)
    del silent.held[role, False]
    assert wrong.settle(silent, PLAN, False) == {role}
    assert not wrong.binding.runtimes[role].verification.valid, "it has not voted, and has other state than most"
    unsure, told = member_with("m0", {role: ["buffer 0.mean"]})
    assert not unsure.settle(committed(), PLAN, False) and not told
    assert not unsure.binding.runtimes[role].verification.valid


def test_a_member_with_wrong_state_does_not_go_on() -> None:
    """Not even where its script catches the error; the shadow tells of it, and all know before it ends."""
    wrong, told = member_with("m2", {})
    wrong.refuse()
    for end in (lambda: wrong.settle(committed(O01=1), PLAN, False), wrong.refuse):
        with pytest.raises(Corrupt) as error:
            end()
    assert error.value.copies == (("owner", 0, 1),) and told == [{"kind": "all know"}]
    shadow, told = member_with("m0", {Role(0, 1): ["state exp_avg of 0.weight"]})
    with pytest.raises(Corrupt, match=r"replica of stage 1 of pipeline 0.*after step 4: state exp_avg of 0\.weight"):
        shadow.settle(committed(R01=1), PLAN, False)
    assert [event.get("member_id") for event in told] == ["m0", None]


def test_a_split_vote_ends_all() -> None:
    shadow, told = member_with("m0", {Role(0, 1): ["parameter 0.weight"]})
    with pytest.raises(CopiesDiffer, match="cannot be told which"):
        shadow.settle(committed(O01=1, R01=1), PLAN, False)
    assert not told


def test_an_heir_is_not_taken_for_who_was_wrong() -> None:
    """It learns of the commit when it has the role already: what counts is who held it then."""
    role, after = Role(0, 1), takeover(PLAN, ["m2"])
    heir, told = member_with("m0", {role: []}, after)
    assert after.owner(role) == "m0"
    assert heir.settle(committed(O01=1), PLAN, True) == {role}
    assert [event["member_id"] for event in told] == ["m2"]
