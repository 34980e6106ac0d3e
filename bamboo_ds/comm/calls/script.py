"""The collectives that a script calls itself, between the operations of its engine: logging, barriers, timers.

They are among the surviving ranks (:mod:`.participants`), and a loss does not show in them: a member that is in one
recovers as in an operation of the engine, and it goes on among those that are left. For a lost rank the owner of its
stage contributes once more what its own script passes, so that what all ranks have alike is summed up, counted and
averaged as before.

All members must come out of a collective alike. So it has two steps: the collective itself, then a meeting in which all
tell each other that they have its result. If a member has come out of the meeting, all have the result; members
still in the meeting take it. If none has, none uses a result that may be missing somewhere, and all do it again
from what they had passed. The recovery tells which it is: every member says how many collectives of each group it has
come out of, since the last operation of the engine.

Between two operations all members do the same collectives of a group in the same order, as torch.distributed asks for.
The operations themselves number those gaps, and no member is in a gap while others are beyond the operation after it.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Literal

import torch

from ...bare import bare
from ...errors import EpochChanged, ProtocolError
from ...topology import Plan
from ..c10d import dist
from ..epoch import Epoch
from ..work import NO_TIMEOUT, future_of
from .collectives import start
from .messages import Attached, Group, ScriptMessages
from .participants import Participants, surviving
from .table import Collective

#: Where the main thread is: in the engine, in the script, or in a script whose calls are replayed.
ThreadContext = Literal["engine", "script", "replay"]

#: Packages whose frames are not the script's.
_LIBRARIES = ("bamboo_ds", "torch", "deepspeed", "typing_extensions")
#: Attributes of torch's options of collectives.
_OPTIONS = ("reduceOp", "rootRank", "rootTensor", "timeout", "asyncOp")


@dataclass(frozen=True)
class Lacking:
    """A collective or message of the script in which not every rank has the share that it had when the job began.

    Attributes:
        operation: as torch's backends call it.
        ranks: of its group.
        lost: those that no process runs as.
        moved: those whose process does not compute the rank's own stage (any more): what it has of that is old.
        place: the line of the script that calls it, ``file:line in function``.
        result: what it gives in the place of the lost ranks' shares.
    """

    operation: str
    ranks: tuple[int, ...]
    lost: tuple[int, ...]
    moved: tuple[int, ...]
    place: str
    result: str


class ScriptCollectives:
    """A script's calls between operations, for one process. Of the main thread alone.

    Attributes:
        messages: its sends and receives.

    Args:
        session: this process's data plane.
        context: that of the main thread.
        recover: recovers after a loss, and calls :meth:`agree` meanwhile.
        on_lacking: told, on one member and once for each place in the script, of collectives that lack shares of ranks;
            ``None`` if none is to be told.
    """

    def __init__(
        self,
        session: Attached,
        context: Callable[[], ThreadContext],
        recover: Callable[[], None],
        on_lacking: Callable[[Lacking], None] | None = None,
    ) -> None:
        self._session = session
        self._context = context
        self._recover = recover
        self._on_lacking = on_lacking
        self._told: set[tuple[Any, ...]] = set()
        self._gap = 0
        self._done: dict[str, int] = {}  # collectives of each group that this member has come out of, in this gap
        self._begun: dict[str, int] = {}
        self._open: deque[ScriptWork] = deque()
        self._newcomers: dict[str, int] = {}  # members by the operation that each has taken part in first
        self.messages = ScriptMessages(session, lambda: self.absent, self._recover_all, self._note_message)

    @property
    def context(self) -> ThreadContext:
        """The caller's place; other threads count as the engine's."""
        return self._context() if threading.current_thread() is threading.main_thread() else "engine"

    # -- gaps and recoveries ------------------------------------------------------------------------------

    def begin_gap(self, number: int) -> None:
        """The operation before gap ``number`` is over."""
        self._gap = number
        self._newcomers = {member: step for member, step in self._newcomers.items() if step >= number}
        self._done.clear()
        self._begun.clear()
        self.messages.begin_gap(number)

    def record(self) -> dict[str, Any]:
        """Facts for the others after a loss (JSON)."""
        told = {"gap": self._gap, "done": dict(self._done), "open": len(self._open) + self.messages.open}
        told |= {"had": self.messages.had, "missed": self.messages.missed}
        return {**told, "newcomers": dict(self._newcomers)}

    def agree(self, records: Mapping[str, Mapping[str, Any]], step: int) -> None:
        """Learns what has become of the collectives that this member is in.

        Args:
            records: what every member has told; see :meth:`record`. Members that join have ``joining`` set.
            step: the operation that goes on; members that join begin with it.
        """
        for record in records.values():  # a loss may have kept this member from hearing of the last ones itself
            self._newcomers |= record["script"]["newcomers"]
        self._newcomers |= {member: step for member, record in records.items() if record["joining"]}
        best: dict[str, int] = {}
        for record in records.values():
            script = record["script"]
            if script["gap"] == self._gap and not record["joining"]:
                best = {key: max(best.get(key, 0), script["done"].get(key, 0)) for key in {*best, *script["done"]}}
        for work in self._open:
            work.decide(work.number <= best.get(work.key, 0))
        had, missed = ({m: record["script"][name] for m, record in records.items()} for name in ("had", "missed"))
        self.messages.agree(had, missed)

    def first_begun(self) -> ScriptWork | None:
        """The first collective that this member has begun and not come out of; from any thread."""
        return next(iter(tuple(self._open)), None)

    def completed(self) -> dict[str, int] | None:
        """The number of collectives of each group that it has come out of in this gap; ``None`` if it takes no part in
        them. From any thread."""
        first = dict(self._newcomers).get(self._session.member, -1)
        return None if first >= self._gap else dict(self._done)

    @property
    def absent(self) -> set[str]:
        """Members of the plan whose scripts are not in this gap: they replay it."""
        return {member for member, step in self._newcomers.items() if step >= self._gap}

    def speaker(self, rank: int) -> str | None:
        """The member that speaks for a rank of the job: that which runs as it, or stands in for it if it is lost."""
        plan = self._session.plan
        assert plan is not None, "an engine has been built"
        return surviving(plan, range(plan.world.size), self.absent).hosts[rank]

    # -- collectives ---------------------------------------------------------------------------------------

    def start(self, handle: Group, collective: Collective, arguments: tuple[Any, ...]) -> ScriptWork:
        """Begins a collective of the script."""
        number = self._begun[handle.key] = self._begun.get(handle.key, 0) + 1
        work = ScriptWork(self, handle, number, collective, arguments)
        self._open.append(work)
        try:
            work.start()
        except EpochChanged:
            pass  # it recovers where it is waited for
        except BaseException:
            self._open.remove(work)
            raise
        return work

    def complete(self, work: ScriptWork, timeout: timedelta = NO_TIMEOUT) -> None:
        """Waits until ``work`` is over, and before it those of its group that were begun earlier."""
        if work.error is not None:
            raise work.error
        while not work.over:
            first = next(each for each in self._open if each.key == work.key)
            try:
                first.advance(timeout)
            except EpochChanged:
                self._recover_all()
                continue
            except BaseException as error:  # goes on up, and comes again from every later wait for this work
                first.error, first.over = error, True
                self._open.remove(first)
                raise
            self._done[first.key] = first.number
            self._open.remove(first)

    def flush(self) -> None:
        """Completes all that the script has begun and not waited for: an operation of the engine comes."""
        while self._open:
            self.complete(self._open[0])

    def _recover_all(self) -> None:
        """Recovers, and begins again what no member has completed."""
        while True:
            self._recover()
            try:
                for work in self._open:
                    work.start()
                return
            except EpochChanged:
                continue

    def note(self, plan: Plan, handle: Group, collective: Collective, options: Any, group: Participants) -> None:
        """Tells, the first time at each place, that a collective of ``group`` lacks shares of ranks."""
        runs = list(zip(handle.ranks, group.of_rank, strict=True))
        lost = tuple(rank for rank, member in runs if member is None)
        moved = tuple(rank for rank, member in runs if member not in (None, plan.owners[rank]))
        if not (lost or moved) or self._on_lacking is None or group.members[0] != self._session.member:
            return
        result = _instead(collective, options, group)
        if result is None:
            return
        case = calling_place(), collective.name, handle.key, lost
        if case not in self._told:
            self._told.add(case)
            self._on_lacking(Lacking(collective.name, handle.ranks, lost, moved, case[0], result))

    def _note_message(self, operation: str, ranks: tuple[int, ...], lost: int, result: str) -> str:
        """Tells, the first time at each place, that a message to or from the ``lost`` rank is not exchanged."""
        place = calling_place()
        told = place, operation, ranks, lost
        if told not in self._told and self._on_lacking is not None:
            self._told.add(told)
            self._on_lacking(Lacking(operation, ranks, (lost,), (), place, result))
        return place

    @property
    def session(self) -> Attached:
        """This process's data plane."""
        return self._session


class ScriptWork(dist.Work):  # type: ignore[misc]
    """A collective of the script; see the module.

    Attributes:
        key: of the group.
        number: of the collective, among those of the group in this gap.
        over: every member has the result, or will take it; or it has failed.
        error: what it has failed by, other than a loss.
    """

    def __init__(
        self,
        script: ScriptCollectives,
        handle: Group,
        number: int,
        collective: Collective,
        arguments: tuple[Any, ...],
    ) -> None:
        super().__init__()
        self.key, self.number = handle.key, number
        self.over = False
        self.error: BaseException | None = None
        self._script, self._handle = script, handle
        self._collective, self._arguments = collective, arguments
        changed = collective.written(arguments) if collective.in_place else []
        self._passed = [(tensor, bare(tensor).clone()) for tensor in changed]
        self._epoch: Epoch | None = None
        self._work: Any = None
        self._members: tuple[str, ...] = ()
        self._computed = self._settled = False

    def start(self) -> None:
        """Begins the collective in the current epoch, if it has to be done (again).

        Raises:
            EpochChanged: the epoch is over.
        """
        if self._settled or self._epoch is not None:
            return
        epoch = self._script.session.current
        for tensor, passed in self._passed:
            bare(tensor).copy_(passed)
        self._issue(epoch)
        self._epoch = epoch

    def _issue(self, epoch: Epoch) -> None:
        handle, collective = self._handle, self._collective
        group = surviving(epoch.plan, handle.ranks, self._script.absent)
        self._members = group.members if group.members != (epoch.member,) else ()
        self._script.note(epoch.plan, handle, collective, self._arguments[-1], group)
        if self._members and collective.shape == "barrier":
            return  # the meeting is one
        arguments = (*self._arguments[:-1], _copied(self._arguments[-1]))
        key = f"script/{handle.key}"
        self._work = start(epoch, key, group, collective, arguments, handle.rank(), handle.timeout)

    def advance(self, timeout: timedelta) -> None:
        """Comes out of the collective.

        Raises:
            EpochChanged: a loss; :meth:`decide` tells what follows.
            RuntimeError: as torch raises it.
        """
        if not self._settled:
            self.start()
            assert self._epoch is not None
            if not self._computed:
                if self._work is not None:
                    self._work.wait(timeout)
                self._computed = True
            if self._members:
                key = f"script/{self.key}/{self.number}".encode()
                limit = timeout if timeout != NO_TIMEOUT else self._handle.timeout
                self._epoch.agreement.meet(self._collective.name, key, self._members, limit)
        self.over = True
        self._epoch = self._work = None
        self._passed.clear()

    def decide(self, settled: bool) -> None:
        """Goes on after a loss; ``settled``: some member has come out of the collective, so that the result counts."""
        if settled and not self._computed:
            raise ProtocolError(
                f"{self._collective.name} number {self.number} of group {self.key}: another member has come out of it, "
                "this one has no result"
            )
        self._settled = settled
        if not settled:
            self._epoch, self._work, self._computed = None, None, False

    # -- torch's interface -------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Waits until every surviving member of the group has the result.

        Raises:
            FatalLoss, Evicted, Left, Isolated: as ``train_batch``.
            RuntimeError: as torch raises it, for timeouts and misuse.
        """
        self._script.complete(self, timeout)
        return True

    synchronize = wait

    @property
    def name(self) -> str:
        """The operation's name."""
        return self._collective.name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of its group."""
        return self._handle.ranks

    def is_completed(self) -> bool:
        """Whether :meth:`wait` has nothing to wait for but the other members' word, or a recovery."""
        return self.over or self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether every surviving member of the group has the result."""
        return self.over and self.error is None

    def exception(self) -> BaseException | None:
        """The error that :meth:`wait` has raised."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The tensors that the collective has written."""
        self.wait()
        return self._collective.written(self._arguments)

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future: it waits here."""
        future = future_of(self.result())
        future.set_result(self.result())
        return future


def _instead(collective: Collective, options: Any, group: Participants) -> str | None:
    """The values in the place of the lost ranks' shares in a collective; ``None`` if it needs none of these."""
    if collective.copies or collective.reduces:
        return "in the place of their shares are those that the owners of their stages have passed"
    root = getattr(options, "rootRank", None)
    if collective.shape in ("broadcast", "scatter") and root is not None and group.of_rank[root] is None:
        return (
            "there is nothing from the rank that it comes from"
            if collective.shape == "scatter"
            else ("its result is what the owner of that rank's stage has passed")
        )
    return None


def calling_place() -> str:
    """The innermost place on this thread's stack outside of this package, torch and DeepSpeed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _copied(options: Any) -> Any:
    """A copy of torch's options: those of the caller serve for a second attempt."""
    copy = type(options)()
    for name in _OPTIONS:
        if hasattr(options, name):
            setattr(copy, name, getattr(options, name))
    return copy
