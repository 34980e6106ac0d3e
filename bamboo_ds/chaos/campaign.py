"""A campaign of faults from command line to verdict: finds the job's parts, runs the faults, verifies, reports."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from rich.console import Console

from ..control.registry.records import JobRecord, MemberRecord
from ..errors import ConfigError, LaunchError
from ..launchers.jobs import JobLocation
from ..observe.events import read_events
from ..processes import adopt_orphans, end_descendants
from ..variables import ENV_STORE
from . import report
from .faults import WEIGHTS, Fault, FaultKind, FaultRecord
from .joiners import JoinCommand
from .observer import Observer
from .processes import agent_of, dead, listener
from .runner import Conduct, JobParts, Runner
from .schedule import Change, by_trace, initial_nodes
from .situation import JobSituation
from .verify import Verdict, verify

logger = logging.getLogger("bamboo_ds.chaos")

#: Seconds that a job gets to heal after the last fault where its end is not waited for.
_HEAL_S = 120.0
#: Seconds that the launcher gets to end after the workers.
_END_S = 120.0
_LOOK_S = 0.2
#: Columns of a table that goes into a file.
_WIDTH = 150


@dataclass(frozen=True)
class CampaignOptions:
    """The request to ``bamboo chaos``, as its options give it.

    Attributes:
        complete: whether every fault must have been reached before the job ends.
        title: says where the faults come from.
    """

    location: JobLocation
    out: Path
    conduct: Conduct
    events: str | None = None
    wait: bool = True
    compress: float = 1.0
    limit: int | None = None
    complete: bool = True
    title: str = ""


def run(options: CampaignOptions, faults: Sequence[Fault] = (), changes: Sequence[Change] = ()) -> int:
    """Carries out ``faults``, or those of a trace's ``changes``; returns the command's exit code.

    Raises:
        ConfigError: there is no such job, or something of it is missing.
        LaunchError: the job was not ready in time.
        StoreError: etcd cannot be reached.
    """
    console = Console(stderr=True, soft_wrap=True)
    options.out.mkdir(parents=True, exist_ok=True)
    adopt_orphans()  # what a killed joiner leaves behind becomes ours
    before = {child.pid for child in psutil.Process().children()}
    journal = options.out / "faults.jsonl"
    records: list[FaultRecord] = []
    ended = _end_of(options.location)
    with (
        _orderly_end(),
        closing(Observer(options.location.store, options.location.job, options.conduct.ready_s)) as observer,
        open(journal, "w") as lines,
    ):

        def tell(record: FaultRecord) -> None:
            records.append(record)
            lines.write(record.model_dump_json() + "\n")
            lines.flush()
            console.print(_told(record), highlight=False)

        situation = _ready(observer, options, ended)
        member, job = _member_here(situation), observer.job
        events = options.events or (member.events if member else None)
        if events is None:
            raise ConfigError("the job writes no events: start it with --events FILE, or it cannot be verified")
        if changes:
            assert situation.plan is not None
            limit = options.limit or situation.plan.world.size
            faults = by_trace(changes, len(situation.members), limit, options.compress)
        parts = _parts(options, job, situation, member, changes)
        runner = Runner(observer, faults, options.conduct, parts, ended, tell)
        going: list[int] = []
        try:
            runner.run()
            unhealed = None
            if options.wait:
                runner.attend()
                if options.location.launcher is not None:
                    runner.wait_for_end(_END_S)
            else:
                unhealed = runner.settle(_HEAL_S)
            finished = ended() or observer.look().over
            going = runner.close("waiting" if not finished else "all")
        except KeyboardInterrupt:
            going = runner.close("waiting")
            console.print(_left(going))
            return 130
        finally:
            end_descendants(before | set(going))
    verdict = verify(
        list(read_events(events)),
        records,
        finished=options.wait,
        timeout_s=job.settings.values.membership.heartbeat_limit_s,
    )
    if options.complete and runner.reached < len(faults):
        verdict.problems.append(f"the job ended after {runner.reached} of {len(faults)} faults")
    if runner.overdue:
        verdict.problems.append(f"joiners {runner.overdue} did not end with the job")
    if unhealed is not None:
        verdict.problems.append(f"{_HEAL_S:.0f} s after the last fault the job was not healed: {unhealed}")
    _report(options, verdict, records, events, console)
    if going:
        console.print(_left(going))
    return 1 if verdict.problems else 0


def _report(
    options: CampaignOptions, verdict: Verdict, records: Sequence[FaultRecord], events: str, console: Console
) -> None:
    title = f"job {options.location.job}: {options.title}"
    report.save_json(options.out / "report.json", verdict, records, job=options.location.job, title=options.title)
    tables = Console()
    if not tables.is_terminal:
        tables = Console(width=_WIDTH)
    tables.print(report.table(verdict, records, title))
    for note in verdict.notes:
        console.print(f"note: {note}", highlight=False, markup=False)
    for problem in verdict.problems:
        console.print(f"PROBLEM: {problem}", highlight=False, markup=False, style="red")
    console.print(f"{'not verified' if verdict.problems else 'verified'}; see {options.out}", highlight=False)


def _told(record: FaultRecord) -> str:
    whom = ", ".join(record.members) or ", ".join(map(str, record.pids))
    seconds = f" for {record.seconds:.2f} s" if record.seconds is not None else ""
    number = "joiner" if record.number is None else f"fault {record.number}"
    detail = f" ({record.detail})" if record.detail else ""
    state = "" if record.confirmed else " unconfirmed" if record.outcome == "injected" else ""
    return (
        f"[dim]{record.begun_s:7.1f} s[/dim] {number}: {record.kind.value} {whom}{seconds}: "
        f"{record.outcome}{state}{detail}"
    )


def _left(pids: Sequence[int]) -> str:
    return f"joiners go on as members of the job: {', '.join(map(str, pids))}" if pids else "nothing is left behind"


# -- parts of the job -----------------------------------------------------------------------------------


@contextmanager
def _orderly_end() -> Iterator[None]:
    """SIGTERM and SIGHUP are Ctrl-C: what is stopped must not stay so."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end_of(location: JobLocation) -> Callable[[], bool]:
    """Tells whether the launcher is dead; without one on this host only etcd can tell."""
    if location.launcher is None:
        return lambda: False
    try:
        launcher = psutil.Process(location.launcher)
    except psutil.NoSuchProcess as error:
        raise LaunchError(f"the launcher of job {location.job!r}, process {location.launcher}, has ended") from error
    return lambda: dead(launcher)


def _ready(observer: Observer, options: CampaignOptions, ended: Callable[[], bool]) -> JobSituation:
    """Waits for the job's first step."""
    job, ready_s, waited = options.location.job, options.conduct.ready_s, 0.0
    while True:
        situation = observer.look(_LOOK_S)
        if situation.training:
            return situation
        waited += _LOOK_S
        if ended() or situation.over:
            raise LaunchError(f"job {job!r} has ended before its first step")
        if waited > ready_s:
            raise LaunchError(f"job {job!r} has not done a step within {ready_s:.0f} s")


def _member_here(situation: JobSituation) -> MemberRecord | None:
    """A member that has not joined later, with an agent on this host."""
    for record in situation.members.values():
        if record.joiner:
            continue
        try:
            agent_of(record)
        except psutil.NoSuchProcess:
            continue
        return record
    return None


def _parts(
    options: CampaignOptions,
    job: JobRecord,
    situation: JobSituation,
    member: MemberRecord | None,
    changes: Sequence[Change],
) -> JobParts:
    location = options.location
    env, folder = _surroundings(location)
    slots = sorted(record.slot for record in situation.members.values())
    nodes = initial_nodes(changes, len(slots)) if changes else []
    settings = job.settings.values
    return JobParts(
        join=JoinCommand(location.store, location.job, member, job.command, env, folder, options.out),
        risk_s=settings.membership.lease_ttl_s + 1.0,
        notice_file=settings.notices.file and os.path.join(folder, settings.notices.file),
        etcd_pid=None if location.launcher is None else listener(location.launcher, location.store.split(",")[0]),
        nodes=dict(zip(nodes, slots, strict=False)),
    )


def _surroundings(location: JobLocation) -> tuple[dict[str, str], str]:
    """Environment and working directory of the launcher, else our own."""
    if location.launcher is None:
        return dict(os.environ), os.getcwd()
    launcher = psutil.Process(location.launcher)
    env = launcher.environ()
    env.pop(ENV_STORE, None)
    return env, launcher.cwd()


# -- settings of the command line -----------------------------------------------------------------------


def parse_weights(texts: Sequence[str]) -> dict[FaultKind, float]:
    """``KIND=W`` each; the defaults if there are none. Raises :class:`ConfigError`."""
    found: dict[FaultKind, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            kind, weight = FaultKind(name), float(value)
        except ValueError as error:
            known = ", ".join(kind.value for kind in FaultKind)
            raise ConfigError(f"--weight {text!r}: write KIND=W with a number; kinds are {known}") from error
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"--weight {text!r}: a weight is a number from 0 on")
        found[kind] = weight
    return found or dict(WEIGHTS)


def script_line(fault: Fault) -> str:
    """The fault as a line of a script."""
    words: dict[str, Any] = {"at_s": round(fault.at_s, 3), "kind": fault.kind.value}
    if fault.target is not None:
        words["target"] = str(fault.target)
    if fault.seconds is not None:
        words["seconds"] = round(fault.seconds, 3)
    if fault.healed:
        words["healed"] = True
    return json.dumps(words)
