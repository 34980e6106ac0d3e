"""When the end of a job is the end for a member that waits to take part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bamboo_ds.control.agent.membership import Membership, over_for
from bamboo_ds.control.agent.states import State
from bamboo_ds.control.leader.restarts import unstarted_plan
from bamboo_ds.control.registry.records import LeftRecord, MemberRecord, Record, StopRecord, WorkerState
from bamboo_ds.control.registry.vacancies import choose_script_rank, is_over
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.topology.planner import initial_plan, takeover, with_redundancy
from tests.support.records import left, member, mirror

pytestmark = pytest.mark.claim("guides/clusters.md", "guides/elastic.md")

PLAN = with_redundancy(initial_plan(["a", "b"]), Layout(1, 2), True)
#: It lists two joiners, whom nobody follows any more: the job ends.
NEXT = replace(PLAN, epoch=3, members=("a", "b", "j", "k"), script_ranks=(0, 1, 0, 1), when="boundary")


def there(name: str) -> MemberRecord:
    return member(name, joiner=name in "jk")


def gone(name: str, outcome: str = "finished") -> LeftRecord:
    return left(name, outcome=outcome)


def entered(name: str) -> WorkerState:
    return WorkerState(id=name, epoch=2)


@pytest.mark.parametrize("plan", [PLAN, NEXT], ids=["not admitted", "admitted"])
def test_over_when_all_that_took_part_are_gone(plan: Plan) -> None:
    known = [entered("a"), entered("b"), there("j"), there("k")]
    assert not over_for("j", mirror(*known, there("a"), there("b")), plan)
    assert not over_for("j", mirror(*known, there("a"), gone("b")), plan)
    assert over_for("j", mirror(*known, gone("a"), gone("b")), plan)
    assert over_for("j", mirror(*known, gone("a", "lost"), gone("b")), plan)


def test_not_over_while_there_is_something_to_take_over() -> None:
    known = [entered("a"), entered("b"), there("j")]
    assert not over_for("j", mirror(*known, gone("a", "lost"), gone("b", "lost")), NEXT)


def test_one_that_takes_part_ends_by_itself() -> None:
    known = [entered("a"), entered("b"), entered("j"), there("j"), gone("a"), gone("b")]
    assert not over_for("j", mirror(*known), NEXT)


def test_newcomers_come_to_the_ends_of_pipelines_first() -> None:
    """A pipeline without anybody who draws its batches waits; more than a few are not needed."""
    plan = with_redundancy(initial_plan([f"m{i}" for i in range(8)]), Layout(2, 4), True)
    script_ranks = list(range(8))
    for expected in (0, 1, 6, 7, 2, 3):  # the ends of pipeline 0 are 0 and 6, those of pipeline 1 are 1 and 7
        assert choose_script_rank(plan, script_ranks) == expected
        script_ranks.append(expected)
    assert choose_script_rank(plan, [1, 2, 3, 4, 5, 7]) == 0
    assert choose_script_rank(plan, [1, 7, 0, 2, 2, 3, 3, 4, 4, 5, 5]) == 6
    assert choose_script_rank(plan, [1, 7, 0, 0, 6, 2, 3, 4, 5]) == 1


def test_a_job_that_has_lost_all_members_is_not_over() -> None:
    """Members that come then start it again."""

    def over(*records: Record | Plan) -> bool:
        return is_over(mirror(*records))

    assert over(PLAN, gone("a"), gone("b"))
    assert not over(PLAN, gone("a"), there("b"))
    fatal = takeover(PLAN, {"a", "b"})
    assert fatal.lost_roles and not fatal.members
    assert not over(fatal, gone("a", "lost"))
    assert not over(unstarted_plan(2, None), there("w"))
    assert over(fatal, StopRecord(code=3, reason="the script failed", by="a"))


@pytest.mark.parametrize("plan", [PLAN, takeover(PLAN, {"a", "b"})], ids=["before", "after"])
def test_a_job_of_which_some_member_has_finished_is_over_when_the_others_are_gone(plan: Plan) -> None:
    """Also where one vanishes before it has said how it ended: at the end of the last step all had done it."""
    found = mirror(plan, gone("a"), entered("a"), entered("b"), there("j"))
    assert is_over(found) and over_for("j", found, plan)


def test_where_a_member_stands() -> None:
    """Plans decide; notice makes a member needed until it has left; what was missed is asked for."""

    def stands(*members: str, epoch: int) -> State:
        assert found.note_plan(replace(PLAN, epoch=epoch, members=members))
        return found.state

    def begin(name: str, **fields: object) -> Membership:
        found = Membership(there(name).model_copy(update=fields), after_epoch=1)
        assert found.state is State.LOOKING and found.takes_part == (name == "a" and not fields)
        found.note_found()
        return found

    found = begin("a")
    assert stands("a", "b", epoch=2) is State.RUNNING and not found.note_plan(PLAN)
    assert stands("b", epoch=9) is State.EVICTED and found.is_out(replace(PLAN, epoch=9, members=("b",)))
    found = begin("a")
    found.note_leaving()
    assert stands("b", epoch=2) is State.LEAVING and found.record.state == "leaving"
    assert not found.may_register(replace(PLAN, epoch=2, members=("b",)), False)
    found = begin("a", state="waiting")
    assert stands("b", epoch=2) is State.WAITING and not found.takes_part
    found = begin("j")
    assert stands("a", epoch=5) is State.JOINING and stands("a", epoch=6) is State.JOINING
    newer = replace(PLAN, epoch=7)
    assert found.may_register(replace(PLAN, epoch=6), False) and not found.may_register(replace(PLAN, epoch=6), True)
    assert not found.may_register(newer, False), "it may be admitted by that"
    assert stands("a", epoch=8) is State.UNSURE and not found.may_register(replace(PLAN, epoch=8), False)
    found.note_seen(lost=False)
    assert found.state is State.JOINING and stands("a", epoch=10) is State.UNSURE
    found.note_seen(lost=True)
    assert found.state is State.EVICTED and stands("j", epoch=11) is State.EVICTED
    found = begin("j")
    found.note_leaving()
    assert found.state is State.JOINING and stands("j", epoch=2) is State.LEAVING
