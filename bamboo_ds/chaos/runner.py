"""Carries a schedule out against a running job."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import psutil

from ..control.registry.records import in_slot_order
from ..processes import reap_adopted
from .faults import GIVEN_UP, HIT_ELSEWHERE, Fault, FaultKind, FaultRecord
from .injections import Impossible, Injection, Notify, Obey, ProcessKill, Raise, Stop
from .joiners import Join, JoinCommand
from .observer import Observer
from .processes import feeders_of, here
from .situation import JobSituation
from .sparing import Aim, Choice, aim

logger = logging.getLogger("bamboo_ds.chaos")

#: Longest time between two looks at what is under way, in seconds.
_LOOK_S = 0.1
#: Seconds between two fresh looks while a fault waits for the job to heal.
_RETRY_S = 0.2
#: Seconds between two times at which what killed agents have left behind is collected.
_REAP_S = 1.0
#: Seconds that joiners get to end when the job is over.
_LINGER_S = 30.0
#: Steps that must be told of between two failures of workers by themselves: what is told is a little old.
_STEPS_BETWEEN_FAILURES = 5
#: Seconds from SIGTERM to SIGKILL for a joiner that is given up.
_GRACE_S = 5.0
#: The same for all others at the end.
_END_S = 10.0
#: Joiners on their way at the same time, of those that keep up the number of members.
_JOINING = 2
_FAILURES = (FaultKind.EXCEPTION, FaultKind.EXIT)
_CHOSEN: dict[FaultKind, type[Injection]] = {
    FaultKind.KILL: ProcessKill,
    FaultKind.KILL_AGENT: ProcessKill,
    FaultKind.HOST: ProcessKill,
    FaultKind.STOP: Stop,
    FaultKind.FREEZE: Stop,
    FaultKind.HOLD_GIL: Obey,
    FaultKind.EXCEPTION: Raise,
    FaultKind.EXIT: Obey,
}


@dataclass(frozen=True)
class Conduct:
    """The rules by which faults are carried out.

    Attributes:
        choice: whom they may hit; its ``nodes`` and ``reachable`` are the runner's.
        timeout_s: how long a fault waits until the job can bear it.
        one_at_a_time: every fault waits until all that was lost before it has been replaced.
        keep: start a joiner whenever fewer members live or are on their way; 0: never.
        ready_s: how long to wait for so many, before the first fault.
    """

    choice: Choice
    timeout_s: float = 60.0
    one_at_a_time: bool = False
    keep: int = 0
    ready_s: float = 120.0


@dataclass(frozen=True)
class JobParts:
    """The parts of a job that faults act on.

    Attributes:
        join: how to start a joiner.
        risk_s: how long after a timed fault its victim may still be lost by it.
        notice_file: as in ``bamboo.notices.file``, if the job watches one.
        etcd_pid: process id of the embedded etcd, if it is on this host.
        nodes: slot of the member that stands for a trace's node.
    """

    join: JoinCommand
    risk_s: float = 6.0
    notice_file: str | None = None
    etcd_pid: int | None = None
    nodes: Mapping[str, int] = field(default_factory=dict)


class Runner:
    """Carries faults out, one after the other. Use it once, in the main thread.

    Attributes:
        reached: faults that were carried out, or given up.
        overdue: process ids of joiners that had to be ended although the job was over.

    Args:
        view: of the job.
        faults: in order of time.
        conduct: how they are carried out.
        parts: of the job.
        ended: whether the job is over, beyond what the view tells.
        tell: called with the record of every fault as soon as that is over.
    """

    def __init__(
        self,
        view: Observer,
        faults: Sequence[Fault],
        conduct: Conduct,
        parts: JobParts,
        ended: Callable[[], bool],
        tell: Callable[[FaultRecord], None],
    ) -> None:
        self._view = view
        self._faults = faults
        self._conduct, self._parts = conduct, parts
        self._ended = ended
        self._tell = tell
        self._begin = time.monotonic()
        self._active: list[Injection] = []
        self._dead: set[str] = set()
        self._hit: set[str] = set()  # by a fault that may have cost them, or has sent them away
        self._struck: dict[int, float] = {}  # their processes by number, and when
        self._risky: dict[str, float] = {}  # members that a timed fault may have cost, until when
        self._agents: dict[str, int] = {}  # by node of a trace: its agent stays while members are renamed by a restart
        self._joins: list[Join] = []
        self._failed_at: int | None = None  # newest step told of when a worker was made to fail by itself
        self._reap_at = 0.0
        self.reached = 0
        self.overdue: list[int] = []

    # -- called by the command ----------------------------------------------------------------------------

    def run(self) -> None:
        """Carries all faults out, until the job ends; then waits for those that are under way."""
        self._begin = time.monotonic()
        if self._conduct.keep:
            self.settle(self._conduct.ready_s)
            self._begin = time.monotonic()
        self._name_nodes(self._view.look())
        for fault in self._faults:
            if not self._wait_until(self._begin + fault.at_s):
                return
            self._carry_out(fault)
            self.reached += 1
        while self._active and self._pump(_LOOK_S):
            continue

    def settle(self, timeout_s: float) -> str | None:
        """Waits until the job has replaced what it has lost; returns what is missing after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            missing = self._missing(self._view.look())
            if missing is None or time.monotonic() >= deadline or not self._pump(_LOOK_S):
                return missing

    def attend(self) -> None:
        """Keeps up the number of members until the job ends."""
        while self._pump(_LOOK_S):
            continue

    def wait_for_end(self, timeout_s: float) -> None:
        """Waits until the job is over for its launcher too, for ``timeout_s`` seconds at most."""
        deadline = time.monotonic() + timeout_s
        while not self._ended() and time.monotonic() < deadline:
            self._view.look(_LOOK_S)

    def close(self, end_joiners: Literal["all", "waiting"] = "all") -> list[int]:
        """Continues what is stopped, ends joiners; returns process ids of those that go on. Idempotent.

        The job is over if all are to end: they get a while to do so by themselves; those that did not are ``overdue``.

        Args:
            end_joiners: ``waiting``: only those that have not been admitted.
        """
        situation = self._view.look()
        for injection in self._active:
            if not injection.done(situation):
                injection.undo()
                injection.detail = injection.detail or GIVEN_UP
            self._note(injection)
        self._active.clear()
        deadline = time.monotonic() + (_LINGER_S if end_joiners == "all" else 0.0)
        for join in self._joins:
            if end_joiners == "waiting" and join.confirmed:
                continue
            # One that was still on its way does not learn of the end before it has looked for the job in vain.
            if join.confirmed and not join.ended(deadline - time.monotonic()):
                self.overdue += join.pids
            join.end(_END_S)
        return [join.process.pid for join in self._joins if join.alive and join.process is not None]

    # -- time ---------------------------------------------------------------------------------------------

    def _wait_until(self, at: float) -> bool:
        """Attends to what is under way until the monotonic time ``at``; false if the job ends before."""
        while True:
            left = at - time.monotonic()
            if not self._pump(min(_LOOK_S, max(0.0, left))):
                return False
            if left <= 0:
                return True

    def _pump(self, timeout_s: float) -> bool:
        """Looks at everything once, after at most ``timeout_s`` seconds; false if the job is over."""
        now = time.monotonic()
        due = [each.due - now for each in self._active if each.due is not None and each.due > now]
        situation = self._view.look(min([timeout_s, *due]))
        for injection in list(self._active):
            over = injection.done(situation)
            if isinstance(injection, Join) and injection.fault.target is not None and injection.member is not None:
                self._agents[injection.fault.target.name] = injection.pids[0]
            if over:
                self._active.remove(injection)
                self._note(injection)
        if self._ended() or situation.over:
            return False
        self._refill(situation)
        if now >= self._reap_at:
            self._reap_at = now + _REAP_S
            reap_adopted({join.process.pid for join in self._joins if join.alive and join.process is not None})
        return True

    # -- one fault ----------------------------------------------------------------------------------------

    def _carry_out(self, fault: Fault) -> None:
        """Finds a victim, waits until the job can bear it, injects the fault."""
        deadline = time.monotonic() + self._conduct.timeout_s
        while True:
            found, situation = self._find(fault)
            if found is not None and found.refusal is None:
                self._inject(self._make(fault, found), situation)
                return
            if time.monotonic() >= deadline or not self._pump(_RETRY_S):
                self._refuse(fault, found, situation)
                return

    def _find(self, fault: Fault) -> tuple[Aim | None, JobSituation]:
        """The victims that the fault would hit now, and the situation."""
        situation = self._view.fresh()
        known = situation or self._view.look()
        at_risk = self._at_risk(known)
        missing = self._missing(known)
        # Without etcd nobody can write a plan: what was settled still is.
        blind = situation is None and fault.kind.risky and missing
        if missing and (fault.healed or self._conduct.one_at_a_time or blind):
            return Aim((), missing), known
        if fault.kind in _FAILURES and self._failed_at is not None:
            done = (known.step or 0) - self._failed_at
            if done < _STEPS_BETWEEN_FAILURES:
                return Aim((), "another worker has just failed, and a step that fails twice ends the job"), known
        choice = replace(self._conduct.choice, reachable=here, nodes=self._nodes(known))
        return aim(fault, known, at_risk, choice), known

    def _missing(self, situation: JobSituation) -> str | None:
        lost = self._at_risk(situation)
        missing = situation.unsettled(lost)
        admitted = len(set(situation.plan.members if situation.plan else ()) - lost)
        if missing is None and admitted < self._conduct.keep:
            missing = f"{self._conduct.keep - admitted} members are on their way"
        return missing

    def _at_risk(self, situation: JobSituation) -> set[str]:
        """Members that are dead, or may be soon by what is under way."""
        now = time.monotonic()
        self._risky = {member: until for member, until in self._risky.items() if until > now}
        kinds = [(each, each.fault.kind) for each in self._active]
        risky = [each.members for each, kind in kinds if kind.risky or kind is FaultKind.NOTICE]
        return self._dead.union(self._risky, *risky)

    def _make(self, fault: Fault, found: Aim) -> Injection:
        """The injection of a fault."""
        if fault.kind is FaultKind.JOIN:
            return self._join(fault)
        if fault.kind is FaultKind.ETCD_STOP:
            return Stop(fault, (), [self._parts.etcd_pid] if self._parts.etcd_pid else [])
        if fault.kind is FaultKind.NOTICE:
            return Notify(fault, found.members, self._parts.notice_file)
        return _CHOSEN[fault.kind](fault, found.members)

    def _inject(self, injection: Injection, situation: JobSituation) -> None:
        fault = injection.fault
        injection.situation = situation
        try:
            if fault.kind is FaultKind.ETCD_STOP and self._parts.etcd_pid is None:
                raise Impossible("the job's etcd is not one that bamboo run has started on this host")
            victims = [m for m in map(situation.members.get, injection.members) if m is not None]
            feeders = feeders_of(victims, situation.members.values()) if fault.kind.risky else []
            injection.begin()
            injection.members += [record.id for record in feeders]
        except (psutil.NoSuchProcess, Impossible) as error:
            injection.detail = str(error)
            self._conclude(injection, "impossible" if isinstance(error, Impossible) else "absent")
            return
        if fault.kind.risky or fault.kind is FaultKind.NOTICE:
            self._hit.update(injection.members)
            self._struck.update(dict.fromkeys(injection.pids, time.monotonic()))
        if fault.kind in _FAILURES:
            self._failed_at = situation.step or 0
        if fault.kind.lethal:
            self._dead.update(injection.members)
        logger.info("%s %s", fault.kind.value, ", ".join(injection.members) or injection.pids)
        if injection.due is None:
            self._note(injection)
        else:
            self._active.append(injection)

    def _note(self, injection: Injection) -> None:
        """The injection is over."""
        if injection.fault.kind.risky and not injection.fault.kind.lethal:
            until = time.monotonic() + self._parts.risk_s
            self._risky.update(dict.fromkeys(injection.members, until))
        failed = False
        if isinstance(injection, Join) and not injection.confirmed:
            # It may have been hit before it was seen to be a member.
            struck = any(self._struck.get(pid, 0.0) >= injection.began for pid in injection.pids)
            failed = not (struck or injection.member in self._hit) and injection.detail != GIVEN_UP
            if failed:
                injection.end(_GRACE_S)
            elif injection.detail != GIVEN_UP:
                injection.detail = HIT_ELSEWHERE
        self._conclude(injection, "failed" if failed else "injected")

    def _conclude(self, injection: Injection, outcome: Literal["injected", "absent", "impossible", "failed"]) -> None:
        done = {
            name: getattr(injection, name) for name in ("members", "slots", "pids", "seconds", "confirmed", "detail")
        }
        when = time.time() - (time.monotonic() - injection.began)
        self._record(injection.fault, injection.situation, injection.began, outcome=outcome, time=when, **done)

    def _refuse(self, fault: Fault, found: Aim | None, situation: JobSituation) -> None:
        """The fault does not happen."""
        outcome, detail, members = "absent", "nobody is there whom it means", []
        if found is not None:
            outcome, detail, members = "spared", found.refusal or "", [record.id for record in found.members]
        self._record(fault, situation, time.monotonic(), outcome=outcome, detail=detail, members=members)

    def _record(self, fault: Fault, situation: JobSituation, began: float, **done: Any) -> None:
        self._tell(
            FaultRecord(
                number=fault.number if fault.number >= 0 else None,
                kind=fault.kind,
                target=str(fault.target) if fault.target else None,
                planned_s=fault.at_s,
                begun_s=began - self._begin,
                epoch=situation.epoch,
                step=situation.step,
                **done,
            )
        )

    # -- members ------------------------------------------------------------------------------------------

    def _name_nodes(self, situation: JobSituation) -> None:
        slots = {record.slot: record.agent_pid for record in situation.members.values()}
        self._agents = {node: slots[slot] for node, slot in self._parts.nodes.items() if slot in slots}

    def _nodes(self, situation: JobSituation) -> dict[str, str]:
        """Members that stand for nodes of a trace. At a restart some agents start several workers for a while."""
        members: dict[int, str] = {}
        for record in in_slot_order(situation.members.values()):
            members.setdefault(record.agent_pid, record.id)
        return {node: members[agent] for node, agent in self._agents.items() if agent in members}

    def _join(self, fault: Fault) -> Join:
        join = Join(fault, self._parts.join, len(self._joins))
        self._joins.append(join)
        return join

    def _coming(self, situation: JobSituation) -> int:
        """Joiners that live and are not registered yet."""
        return sum(join.alive and join.member is None and join.record(situation) is None for join in self._joins)

    def _living(self, situation: JobSituation) -> int:
        """Members that live, as far as is known."""
        return sum(m not in self._dead and m not in situation.left for m in situation.members)

    def _refill(self, situation: JobSituation) -> None:
        """Starts a joiner if there are too few members."""
        ending = any(left.outcome == "finished" for left in situation.left.values())
        if not self._conduct.keep or not situation.training or ending:
            return
        underway = sum(isinstance(injection, Join) for injection in self._active)
        if underway >= _JOINING:
            return
        if self._living(situation) + self._coming(situation) < self._conduct.keep:
            now_s = time.monotonic() - self._begin
            self._inject(self._join(Fault(-1, now_s, FaultKind.JOIN)), situation)
