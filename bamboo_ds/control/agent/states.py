"""The life of a member: one table of states and events. Pure.

It is walked from two sides, each on a thread of its own: by the :class:`~.membership.Membership` of the coordinator,
which sees plans first and no worker, and by the agent's :class:`~.slot.Slot`, which sees all. A dot means that the
state stays. States of the second table have no worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum


class State(Enum):
    """The states of a member."""

    LOOKING = "looking"  #: for the job's plan: etcd has not answered yet
    JOINING = "joining"  #: no plan has listed it, and no member counts with it
    UNSURE = "unsure"  #: the same, but it has missed plans, which may have listed and lost it
    STARTING = "starting"  #: no plan has listed it, and the job counts with it
    RUNNING = "running"
    LEAVING = "leaving"  #: on notice, or told to end: needed until it is gone
    FREE = "free"  #: to go: no member needs it
    FATAL = "fatal"  #: some role's state is lost: the job is about to start again
    EVICTED = "evicted"  #: the job goes on without it: it writes nothing but its end
    ADRIFT = "adrift"  #: evicted from a job that is about to start again
    STOPPED = "stopped"  #: the job is ended
    BROKEN = "broken"  #: the control plane has failed
    WAITING = "waiting"  #: for the job's start, without a worker; :mod:`.waiting`
    REJOINING = "rejoining"  #: looking for a way back into the job; :mod:`.rejoin`
    PLACED = "placed"  #: there is a place: it goes on as a new process image; :mod:`.reexec`
    ENDED = "ended"


class Event(Enum):
    """The events of a member."""

    LISTED = "listed"  #: a plan lists it
    MISSED = "missed"  #: plans have passed that it has not seen
    ABSENT = "absent"  #: they have not listed it
    OUT = "out"  #: a plan goes on without it
    SPARED = "spared"  #: the same, after its notice; or it has drawn batches for others, who do without
    DOOMED = "doomed"  #: a plan has lost some role's state
    NOTICE = "notice"  #: it is to leave
    WITHDRAWN = "withdrawn"  #: the same, before others count with it
    TOLD = "told"  #: its agent is to end
    STOP = "stop"  #: the job is to end
    ERROR = "error"  #: the control plane fails
    BEGUN = "begun"  #: the job has started without it
    PLACE = "place"  #: there is a place for it
    SUPERSEDED = "superseded"  #: the job had gone on without it before its worker failed
    OVER = "over"  #: there is nothing to go on with


class Exit(Enum):
    """The ways in which a worker ends."""

    DONE = "done"  #: with exit code 0, unasked
    LEFT = "left"  #: it has handed over what it had, on notice
    EVICTED = "evicted"  #: it has seen that the job goes on without it
    FATAL = "fatal"  #: it has seen a fatal loss
    FAILED = "failed"  #: with any other exit code
    ASKED = "asked"  #: by SIGTERM; or by any exit after it was told to end
    KILLED = "killed"  #: by any other signal
    HUNG = "hung"  #: killed by its agent, since it hung


_WITH_WORKER = """
          joining unsure  starting running leaving free    fatal   evicted adrift  stopped broken
listed    running running running  .       .       .       .       .       .       .       .
missed    unsure  .       .        .       .       .       .       .       .       .       .
absent    .       joining .        .       .       .       .       .       .       .       .
out       evicted evicted evicted  evicted evicted .       adrift  .       .       .       .
spared    .       .       free     free    free    .       free    .       .       .       .
doomed    fatal   .       fatal    fatal   fatal   .       .       adrift  .       .       .
notice    .       .       leaving  leaving .       .       .       .       .       .       .
withdrawn free    .       .        .       .       .       free    free    free    .       .
told      .       .       leaving  leaving .       .       leaving .       evicted .       .
stop      stopped .       stopped  stopped stopped stopped stopped stopped stopped .       .
error     broken  .       broken   broken  broken  broken  broken  broken  broken  broken  .
"""
_WITHOUT_WORKER = """
           waiting   rejoining placed ended
notice     ended     ended     ended  .
withdrawn  ended     ended     ended  .
told       ended     ended     ended  .
stop       ended     .         .      .
error      ended     .         .      .
begun      rejoining .         .      .
place      placed    placed    .      .
superseded .         .         .      rejoining
over       ended     ended     ended  .
"""
#: The outcome of a member (see :class:`~..registry.records.LeftRecord`) by how its worker ends.
_OUTCOMES = """
         done     left    evicted fatal   failed  asked   killed  hung
joining  finished left    evicted fatal   failed  lost    lost    lost
starting finished left    evicted fatal   failed  lost    lost    lost
running  finished left    evicted fatal   failed  lost    lost    lost
leaving  finished left    evicted fatal   failed  lost    lost    lost
free     finished left    left    left    left    left    lost    lost
fatal    finished left    fatal   fatal   fatal   fatal   fatal   lost
evicted  evicted  left    evicted evicted evicted evicted evicted lost
adrift   fatal    left    fatal   fatal   fatal   fatal   fatal   lost
stopped  stopped  stopped stopped stopped stopped stopped stopped lost
broken   failed   failed  failed  failed  failed  failed  failed  lost
"""


def _cells(table: str) -> Iterator[tuple[str, str, str]]:
    """Row, column and text of each cell."""
    head, *lines = (line.split() for line in table.strip().splitlines())
    return ((line[0], name, cell) for line in lines for name, cell in zip(head, line[1:], strict=True))


TRANSITIONS: Mapping[tuple[State, Event], State] = {
    (State(state), Event(event)): State(follows)
    for event, state, follows in (*_cells(_WITH_WORKER), *_cells(_WITHOUT_WORKER))
    if follows != "."
}
OUTCOMES: Mapping[tuple[State, Exit], str] = {
    (State(state), Exit(end)): outcome for state, end, outcome in _cells(_OUTCOMES)
}
#: What follows the end of a worker for a member that may come back; all others have ended.
AFTER: Mapping[str, State] = {"fatal": State.WAITING, "evicted": State.REJOINING}


def first(waits: bool, joins: bool) -> State:
    """The state of a member that starts: it waits for the job's start, or joins a running job, or is one of its own."""
    if waits:
        return State.WAITING
    return State.JOINING if joins else State.STARTING


def after(state: State, event: Event) -> State:
    """The state that follows ``event`` in ``state``."""
    return TRANSITIONS.get((state, event), state)
