"""The life of a member, walked as a table."""

from __future__ import annotations

from typing import get_args

import pytest

from bamboo_ds.control.agent.states import AFTER, OUTCOMES, TRANSITIONS, Event, Exit, State, after, first
from bamboo_ds.control.registry.records import LeftRecord

WITHOUT_WORKER = {State.WAITING, State.REJOINING, State.PLACED, State.ENDED}
#: What a worker's end is weighed in: the others are of the coordinator alone.
WITH_WORKER = {*State} - WITHOUT_WORKER - {State.LOOKING, State.UNSURE}
FIRST = {State.LOOKING, *(first(waits, joins) for waits in (True, False) for joins in (True, False))}


def reached(*states: State, without: frozenset[Event] = frozenset()) -> set[State]:
    """What can follow ``states`` while their worker lives, by all events but those ``without``."""
    found, new = set(states), set(states)
    while new:
        new = {after(state, event) for state in new for event in {*Event} - without} - found
        found |= new
    return found


def test_every_state_is_reached_and_every_event_does_something() -> None:
    ends = {AFTER.get(outcome, State.ENDED) for outcome in OUTCOMES.values()}
    assert reached(*FIRST, *ends) == {*State}
    assert {event for _, event in TRANSITIONS} == {*Event}
    assert all(after(state, event) is not state for state, event in TRANSITIONS), "a dot says that"


def test_every_end_of_a_worker_has_an_outcome() -> None:
    assert OUTCOMES.keys() == {(state, end) for state in WITH_WORKER for end in Exit}
    assert set(OUTCOMES.values()) <= {*get_args(LeftRecord.model_fields["outcome"].annotation)}
    assert AFTER.keys() <= set(OUTCOMES.values())


@pytest.mark.parametrize("state", [State.FREE, State.EVICTED, State.ADRIFT, State.FATAL, State.STOPPED, State.BROKEN])
def test_there_is_no_way_back_into_the_job_with_the_same_worker(state: State) -> None:
    without = frozenset({Event.TOLD})  # one that is told to end goes by its exit code again
    assert reached(state, without=without).isdisjoint({State.JOINING, State.STARTING, State.RUNNING, State.LEAVING})
    assert reached(state).isdisjoint({State.JOINING, State.STARTING, State.RUNNING})


def test_only_a_member_that_was_superseded_comes_back_from_its_end() -> None:
    assert {event for event in Event if after(State.ENDED, event) is not State.ENDED} == {Event.SUPERSEDED}


@pytest.mark.parametrize("event", [Event.NOTICE, Event.TOLD])
def test_one_that_is_to_go_does_not_look_for_a_place(event: Event) -> None:
    assert {after(state, event) for state in WITHOUT_WORKER} == {State.ENDED}


def test_a_plan_without_a_member_ends_its_part_whatever_it_was_told_before() -> None:
    assert {after(state, Event.OUT) for state in (State.JOINING, State.UNSURE, State.STARTING, State.RUNNING)} == {
        State.EVICTED
    }
    free = [state for state in WITH_WORKER if after(state, Event.SPARED) is State.FREE]
    assert {OUTCOMES[State.FREE, end] for end in (Exit.LEFT, Exit.EVICTED, Exit.FAILED, Exit.ASKED)} == {"left"}
    assert {*free} == {State.STARTING, State.RUNNING, State.LEAVING, State.FREE, State.FATAL}


def test_a_member_that_a_job_goes_on_without_does_not_finish_it() -> None:
    """Whatever else it learns: its worker is told to stop, and an exit code of 0 is no sign of success."""
    for state in reached(State.EVICTED, without=frozenset({Event.WITHDRAWN})):
        assert OUTCOMES[state, Exit.ASKED] in ("evicted", "fatal", "stopped", "failed")
    assert after(State.EVICTED, Event.DOOMED) is after(State.FATAL, Event.OUT) is State.ADRIFT
    assert AFTER[OUTCOMES[State.ADRIFT, Exit.ASKED]] is State.WAITING


def test_the_end_of_the_job_outweighs_all_but_a_failure_of_the_control_plane() -> None:
    for state in WITH_WORKER - {State.BROKEN}:
        assert after(state, Event.STOP) is State.STOPPED and after(state, Event.ERROR) is State.BROKEN
    assert {OUTCOMES[State.STOPPED, end] for end in {*Exit} - {Exit.HUNG}} == {"stopped"}
    assert after(State.BROKEN, Event.STOP) is State.BROKEN


def test_a_worker_that_hung_is_lost_whatever_it_was_told() -> None:
    assert {OUTCOMES[state, Exit.HUNG] for state in WITH_WORKER} == {"lost"}
