"""What optimizers that are partitioned over the pipelines, or that look at norms and overflows, need of the others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import utils
from torch import distributed as dist

from bamboo_ds.bare import bare
from bamboo_ds.engine.context.channels import Channels, Stream, gathers
from bamboo_ds.engine.stage import sharded, shares
from bamboo_ds.engine.stage.answers import Answers
from bamboo_ds.engine.stage.commit import (
    Contribution,
    Form,
    Measured,
    clipping_factor,
    decode,
    encode,
    global_norm,
    in_ring_order,
)
from bamboo_ds.engine.stage.sharded import ZeroOptimizer
from bamboo_ds.engine.stage.shares import Shares, all_reduce, shares_of
from bamboo_ds.errors import EpochChanged, ProtocolError
from bamboo_ds.topology import Layout, Lent, Plan, Role
from bamboo_ds.topology.planner import initial_plan, takeover, with_redundancy
from tests.support.channels import Ends
from tests.support.gloo import on_threads

pytestmark = pytest.mark.claim("concepts.md", "reference/guarantees.md")

LAYOUT = Layout(2, 3)
MODEL, DATA = (1, 3, 5), (2, 3)  # pipeline 1; stage 1


class Options:
    def __init__(self, kind: Any = dist.ReduceOp.SUM) -> None:
        self.reduceOp = kind


def ask(answers: Answers, ranks: tuple[int, ...], kind: Any = dist.ReduceOp.SUM, value: float = -1.0) -> float:
    tensor = torch.tensor([value])
    answers(ranks, "allreduce", ([tensor], Options(kind)))
    return float(tensor)


def test_norms_are_sums_over_the_ranks_that_a_step_asks_for() -> None:
    """Rank 3 is role (1,1); the ranks contribute 1, 2, 4, 8, 16, 32 to the first norm."""
    norms = [[float(2**rank) for rank in range(6)], [1.0] * 6]
    over_stages = Answers(LAYOUT, 3, False, norms, sums=1)
    assert [ask(over_stages, MODEL), ask(over_stages, MODEL)] == [2 + 8 + 32, 3]
    over_pipelines_too = Answers(LAYOUT, 3, True, norms, sums=2)
    assert ask(over_pipelines_too, DATA, dist.ReduceOp.MAX, 0.0) == 1.0
    assert [ask(over_pipelines_too, DATA), ask(over_pipelines_too, MODEL)] == [4 + 8, 63]
    assert [ask(over_pipelines_too, DATA), ask(over_pipelines_too, MODEL)] == [2, 6]
    with pytest.raises(ProtocolError, match="not foreseen"):
        ask(over_pipelines_too, DATA)
    with pytest.raises(ProtocolError, match="reduces 2 numbers"):
        Answers(LAYOUT, 3, False, norms, 1)(MODEL, "allreduce", ([torch.zeros(2)], Options()))


def test_norms_of_tensor_slices() -> None:
    """Ranks are stage * 4 + copy * 2 + slice; rank 3 is slice 1 of stage 0 of copy 1."""
    layout, model, data = Layout(4, 2, slices=2), (2, 3, 6, 7), (1, 3)
    norms = [[float(2**rank) for rank in range(8)]]
    assert ask(Answers(layout, 3, False, norms, sums=1), model) == 4 + 8 + 64 + 128
    answers = Answers(layout, 3, False, norms, sums=2)
    assert [ask(answers, data), ask(answers, model)] == [2 + 8, 255]
    squares = [1.0, 2.0, 4.0, 3.0, 6.0, 0.0, 9.0, 0.0]
    assert float(global_norm(layout, squares)) == (3.0 + 4.0) / 2


@pytest.mark.parametrize("limit", [0.1, 0.3, 0.5, 1.0])
def test_gradients_are_clipped_as_by_deepspeed(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a norm that is no power of two, of which a reciprocal rounds twice."""
    one = SimpleNamespace(all_reduce=lambda *_, **__: None, get_world_size=lambda group: 1)
    monkeypatch.setattr(utils, "dist", one)
    monkeypatch.setattr(utils, "groups", SimpleNamespace(_get_data_parallel_group=lambda: None))
    for seed in range(20):
        given = torch.randn(50, generator=torch.Generator().manual_seed(seed))
        parameter = torch.nn.Parameter(torch.zeros(50))
        parameter.grad = given.clone()
        norm = utils.clip_grad_norm_([parameter], limit)
        assert given.mul(clipping_factor(norm, limit)).equal(parameter.grad)


def test_gathers_are_left_to_the_exchange_of_shards() -> None:
    output, part = torch.zeros(4), torch.ones(2)
    Answers(LAYOUT, 3, False, [], 1)(DATA, "_allgather_base", (output, part, None))
    assert output.tolist() == [0, 0, 0, 0]


def test_sums_are_those_of_a_ring() -> None:
    a, b, c = (torch.tensor(x, dtype=torch.float32) for x in (1.0, 2e-8, 5e-8))
    assert in_ring_order([a, b, c]) == a + (b + c) != (a + b) + c


def test_the_commit_carries_overflows_and_several_norms() -> None:
    form = Form(losses=1, norms=2)
    shares = [
        Contribution({0: [0.5]}, {Role(0, 0): Measured(False, (1.0, 2.0)), Role(1, 2): Measured(True, (3.0, 4.0))}),
        Contribution({1: [1.5]}, {Role(0, 2): Measured(False, (5.0, 6.0))}, 7),
    ]
    found = decode(LAYOUT, form, tuple(sum(encode(LAYOUT, form, share) for share in shares).tolist()))
    assert found.squares == ((1.0, 0.0, 0.0, 0.0, 5.0, 3.0), (2.0, 0.0, 0.0, 0.0, 6.0, 4.0))
    assert (found.losses, found.redundant, found.overflow) == (((0.5,), (1.5,)), 7, True) and found.skipped()
    assert not replace(found, overflow=False).skipped()
    assert replace(found, overflow=False, squares=((float("inf"),),)).skipped()
    with pytest.raises(ProtocolError, match="same number of parameter groups"):
        encode(LAYOUT, Form(norms=1), shares[0])


#: Of roles (0,0) (1,0) (0,1) (1,1) the owners are a, b, c, d, and the shadows c, d, a, b.
PLAN = with_redundancy(initial_plan(["a", "b", "c", "d"]), Layout(2, 2, sharded=True), True)


def shards_sent(plan: Plan) -> set[tuple[str, str, str]]:
    """What goes over channels under ``plan``: a role, its owner, and who gets its shard."""
    channels = list(Channels(plan, Ends, False))
    assert len({channel.name for _, _, channel in channels}) == len(channels)
    return {(str(role), each.source, each.destination) for stream, role, each in channels if stream is Stream.SHARD}


def test_every_holder_of_a_stage_gets_the_shards_that_it_does_not_compute() -> None:
    """Owners gather them, so that they are sent to shadows only."""
    plan = PLAN
    assert all(gathers(plan, role) for role in plan.world.roles)
    first, last = {("(0,0)", "a", "d"), ("(1,0)", "b", "c")}, {("(0,1)", "c", "b"), ("(1,1)", "d", "a")}
    assert shards_sent(plan) == first | last
    building = replace(plan, shadows=("c", None, "a", "b"), builders=((1, "d"),))
    assert shards_sent(building) == first | last, "members that build a replica get what shadows get"
    assert shards_sent(replace(plan, builders=((0, "b"),))) == first | last, "an owner that builds one has gathered it"
    divided = replace(plan, layout=replace(plan.world, blocks=(2, 2)), lent=(Lent(0, 1, "front"),))
    assert shards_sent(divided) == first | last and gathers(divided, Role(0, 0)), "owners step what they have lent"
    unsharded = Channels(replace(plan, layout=Layout(2, 2)), Ends, False)
    assert Stream.SHARD not in {stream for stream, _, _ in unsharded}


def test_shards_are_sent_to_owners_where_one_has_two_roles_of_a_stage() -> None:
    """That owns what a group would count once."""
    both = takeover(replace(PLAN, shadows=("b", "d", "a", "b")), ["a"])
    assert both.owners == ("b", "b", "c", "d")
    assert not gathers(both, Role(0, 0)) and gathers(both, Role(0, 1))
    assert {sent for sent in shards_sent(both) if sent[0] in ("(0,0)", "(1,0)")} == {("(0,0)", "b", "d")}
    three = with_redundancy(initial_plan(list("abcdef")), Layout(3, 2, sharded=True), True)
    assert three.owners == tuple("abcdef")
    some = replace(three, owners=tuple("abadef"), shadows=(None,) * 6)
    assert shards_sent(some) == {("(0,0)", "a", "b"), ("(1,0)", "b", "a"), ("(2,0)", "a", "b")}


def parts_of(rank: int, dtype: torch.dtype) -> Any:
    """The optimizer of a role on one of three pipelines, with two parameter groups, which has stepped its part."""
    optimizer: Any = object.__new__(ZeroOptimizer)
    wholes = [torch.full((3 * length,), -1.0).to(dtype) for length in (1, 300)]
    for number, whole in enumerate(wholes):
        whole.chunk(3)[rank].copy_(torch.arange(whole.numel() // 3) + 1000 * rank + number)
    wholes[0][rank] = (-0.0, torch.inf, torch.nan)[rank]
    optimizer.wrapper = SimpleNamespace(parallel_partitioned_bit16_groups=[list(whole.chunk(3)) for whole in wholes])
    layout = Layout(3, 1, sharded=True)
    optimizer._groups, optimizer._runtime = SimpleNamespace(layout=layout), SimpleNamespace(role=Role(rank, 0))
    return optimizer


def gathered(optimizer: Any, group: Any) -> list[torch.Tensor]:
    optimizer._ds = SimpleNamespace(mpu=SimpleNamespace(get_data_parallel_group=lambda: group))
    optimizer.gather()
    return [bare(torch.cat(parts)).view(torch.uint8) for parts in optimizer._partitions]


@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_owners_gather_the_shards_of_all(dtype: torch.dtype, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit; each rank is a thread. What is taken besides the parameters is bounded."""
    monkeypatch.setattr(sharded, "_PIECE", piece)

    def gather(output: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        assert output.numel() <= 3 * piece
        group._allgather_base(output, shard).wait()

    monkeypatch.setattr(sharded, "dist", SimpleNamespace(all_gather_into_tensor=gather))
    stepped = [parts_of(rank, dtype) for rank in range(3)]
    own = [[shard.clone() for shard in each.shard(rank)] for rank, each in enumerate(stepped)]
    expected = [torch.cat(shards).view(torch.uint8) for shards in zip(*own, strict=True)]
    for found in on_threads([lambda group, each=each: gathered(each, group) for each in stepped]):
        assert all(map(torch.equal, found, expected))


def test_what_an_aborted_gather_leaves_is_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first of two groups all shards have come, of the second one anything may be there."""
    begun: list[int] = []

    def gather(output: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
        output.fill_(7.0)
        begun.append(shard.numel())
        if len(begun) == 2:
            raise EpochChanged("a member is lost")

    monkeypatch.setattr(sharded, "dist", SimpleNamespace(all_gather_into_tensor=gather))
    optimizer = parts_of(1, torch.float32)
    first, second = ([part.clone() for part in parts] for parts in optimizer._partitions)
    with pytest.raises(EpochChanged):
        gathered(optimizer, None)
    assert begun == [1, 300]
    assert [part.tolist() for part in optimizer._partitions[0]] == [[7.0], first[1].tolist(), [7.0]]
    assert all(
        torch.equal(found.view(torch.uint8), part.view(torch.uint8))
        for found, part in zip(optimizer._partitions[1], second, strict=True)
    )


def test_no_other_pipeline_stands_in_for_a_shard() -> None:
    plan = with_redundancy(initial_plan(["a", "b", "c", "d"]), Layout(2, 2), True)
    assert takeover(plan, ["a", "c"]).lost_roles == ()
    sharded = replace(plan, layout=Layout(2, 2, sharded=True))
    assert takeover(sharded, ["a", "c"]).lost_roles == (0, 2)
    assert takeover(sharded, ["a", "b"]).lost_roles == ()


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("elements", [2, 272, 1500001])
def test_members_with_several_roles_add_as_gloo_does(count: int, dtype: torch.dtype, elements: int) -> None:
    """Each rank is a thread; where two are of one member, it contributes both of theirs."""
    generator = torch.Generator().manual_seed(elements)
    rows = [torch.randn(elements, generator=generator).to(dtype) for _ in range(count)]
    rows[0][0] = -0.0
    (expected, *_) = on_threads([(lambda group, row=row: summed(group, row.clone())) for row in rows])
    owners = [min(rank, count - 2) for rank in range(count)]  # the last two of one member
    own = [[rank for rank in range(count) if owners[rank] == member] for member in sorted(set(owners))]
    found = on_threads(
        [
            lambda group, mine=mine: all_reduce([rows[n] for n in mine], Shares(count, tuple(mine)), group)
            for mine in own
        ]
    )
    assert all(torch.equal(each.view(torch.uint8), expected.view(torch.uint8)) for each in found)


def test_shares_of_one_member_are_divided_before_they_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [torch.tensor([40000.0, 3e-5], dtype=torch.float16)]
    monkeypatch.setattr(sharded, "dist", SimpleNamespace(get_world_size=lambda group: 2))
    monkeypatch.setattr(shares, "dist", SimpleNamespace(all_reduce=lambda rows, group: None))
    optimizer: Any = object.__new__(ZeroOptimizer)
    optimizer._ds = SimpleNamespace(mpu=SimpleNamespace(get_data_parallel_group=lambda: None))
    optimizer.wrapper = SimpleNamespace(communication_data_type=torch.float16)
    (total,) = optimizer.average([large, [g.clone() for g in large]], Shares(2, (0, 1)))
    assert torch.equal(total, large[0] / 2 + large[0] / 2)
    assert torch.isfinite(total).all() and not torch.isfinite(large[0] + large[0]).all()
    assert large[0][0] == 40000.0, "what a role has summed stays"


def summed(group: Any, tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


def test_shares_are_needed_where_a_member_has_several_roles() -> None:
    assert shares_of(["a", "b", "c"], [1]) is None
    assert shares_of(["a", "b", "b"], [0]) == Shares(3, (0,))
    assert shares_of(["a", "b", "b"], [2, 1]) == Shares(3, (2, 1))
