"""``bamboo join``: one more slot for a job that is running, or one of the first of a job that begins."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NoReturn

from tenacity import Retrying, retry_if_exception, retry_if_result, stop_after_delay, wait_fixed

from ..control.leader.restarts import unstarted_plan
from ..control.registry.access import check_secret, open_store, put_once
from ..control.registry.keys import Keys
from ..control.registry.mirror import Mirror, read_plan
from ..control.registry.records import JobRecord
from ..control.registry.vacancies import Desertion, Vacancy, find_vacancy, is_over
from ..control.settings import AgentSettings, MemberOptions, in_slot
from ..errors import ConfigError, JobOver, LaunchError, StoreUnavailable
from ..observe import logs
from ..secret import WITHOUT_SECRET
from ..store.client import Store
from ..topology.plan import Plan
from .network import awaited

logger = logging.getLogger("bamboo_ds.launchers")

#: For an answer of etcd.
_TIMEOUT_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Starters:
    """The start of a job that a member takes part in.

    Attributes:
        members: so many start the job.
        ranks: number of ranks, at least one for each of them.
    """

    members: int
    ranks: int

    def __str__(self) -> str:
        ranks = "" if self.ranks == self.members else f" --ranks {self.ranks}"
        return f"--start {self.members}{ranks}"


def prepare(
    options: MemberOptions, start: Starters | None = None, wait_s: float = 0.0, tells: bool = False
) -> AgentSettings:
    """The settings of an agent that joins the job, with a slot of its own.

    Args:
        options: of the member.
        start: who starts the job, if nobody has started it; ``None``: it runs already.
        wait_s: seconds to wait until etcd answers (with ``start``), and until the job has built its engines.
        tells: the agent tells in the terminal what becomes of its member.

    Raises:
        ConfigError: there is no such job, it was started with other numbers of members or ranks or with other settings,
            or the sources of notices are wrong.
        JobOver: it has ended.
        LaunchError: it has not built its engines within ``wait_s``.
    """
    options.check_notices()
    if start is not None and not options.bamboo.recovery.max_restarts:
        raise ConfigError("--start needs restarts: set bamboo.recovery.max_restarts to more than 0")
    with open_store(options.store, options.job, _TIMEOUT_S, options.secret) as store:
        if start is not None:
            awaited(store.ping, StoreUnavailable, wait_s)  # etcd may be started together with the members
            begin(store, options, start)
        arrival = Arrival(store, options, start, wait_s > 0)
        vacancy = _find_place(arrival, options, wait_s)
    return in_slot(
        replace(options, settings=arrival.settings),
        **asdict(vacancy),
        parent_pid=os.getppid(),
        guest=True,
        tells=tells,
    )


def begin(store: Store, options: MemberOptions, start: Starters) -> None:
    """Makes a job that has not been started one that begins when so many members have come.

    Several may do this at once. The plan is first, since members that come later go by it.
    """
    snapshot = store.get_prefix("")
    check_secret(snapshot.entries.values(), options.job, options.secret)
    if snapshot.entries.keys() - {Keys.PLAN}:
        return
    if not options.secret:
        logger.warning(WITHOUT_SECRET)
    put_once(store, Keys.PLAN, unstarted_plan(start.ranks, options.bamboo.fence_s).to_json(), given={Keys.SPEC: 0})
    entry = store.get(Keys.PLAN)
    if entry is None:
        return  # others have given the job up
    _check_numbers(options, start, read_plan(entry))  # another one may have been faster
    starters = None if start.members == start.ranks else start.members
    put_once(store, Keys.SPEC, options.record(start.ranks, starters=starters).to_json())


def _check_numbers(options: MemberOptions, start: Starters, plan: Plan, job: JobRecord | None = None) -> None:
    """Raises :class:`ConfigError` if the job was started with other numbers, as far as they are known."""
    ranks, members = len(plan.owners), start.members if job is None else job.starters or job.world_size
    if start != Starters(members, ranks):
        others = f"{ranks} ranks" if job is None else Starters(members, ranks)
        raise ConfigError(
            f"{start}: job {options.job!r} at {options.store} was started with {others}, which does not change; take "
            "that, or another name for a new job"
        )


class Arrival:
    """The job as a member finds it that comes.

    Args:
        start, waits: see :func:`prepare`.

    Attributes:
        answered: etcd has, at least once. One that never has is hardly the right one.
        settings: the job's, as far as they are known.
    """

    def __init__(
        self,
        store: Store,
        options: MemberOptions,
        start: Starters | None,
        waits: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._options, self._start, self._waits = store, options, start, waits
        self.settings = options.settings
        self._desertion = Desertion(clock)
        self.answered = start is not None

    def look(self) -> Vacancy | None:
        """A place in the job once its engines are built, it waits for members, or all that built them are gone.

        In the last case nobody is left who could say that the job starts again: this member will lead it. ``None``: not
        yet. Raises as :func:`prepare` does.
        """
        options = self._options
        snapshot, self.answered = self._store.get_prefix(""), True
        check_secret(snapshot.entries.values(), options.job, options.secret)
        spec = snapshot.entries.get(Keys.SPEC)
        if spec is not None and not spec.genuine:
            raise LaunchError(f"what {options.store} says about job {options.job!r} was written by somebody else")
        mirror = Mirror(snapshot)
        if Keys.SPEC not in snapshot.entries and not self._waits:
            raise ConfigError(f"no job {options.job!r} is known at {options.store}; check --store and --job")
        if is_over(mirror):
            what = "has finished" if mirror.stop is None else f"has ended ({mirror.stop.reason})"
            raise JobOver(f"job {options.job!r} {what}: there is nothing to join", finished=mirror.stop is None)
        plan, job = mirror.plan, mirror.job
        if plan is None or job is None:
            return None
        if self._start is not None:
            _check_numbers(options, self._start, plan, job)
        self.settings = job.settings.of_member(options.settings)
        restarts = self.settings.values.recovery.max_restarts > 0
        if plan.lost_roles and not restarts:
            raise JobOver(f"job {options.job!r} has ended by a fatal loss: there is nothing to join", finished=False)
        if plan.layout is not None or plan.lost_roles:
            return find_vacancy(self._store, mirror, plan)
        if not self._desertion.look(mirror, self.settings.values.membership.lease_ttl_s) or not restarts:
            return None
        logger.warning("nobody is left of job %r, which has not built its engines: this member leads it", options.job)
        return find_vacancy(self._store, mirror, plan, restart=True)


def _find_place(arrival: Arrival, options: MemberOptions, wait_s: float) -> Vacancy:
    """A place in the job, as soon as there is one; raises as :func:`prepare` does."""

    def outage(error: BaseException) -> bool:
        return isinstance(error, StoreUnavailable) and arrival.answered

    looking = Retrying(
        retry=retry_if_result(lambda found: found is None) | retry_if_exception(outage),
        stop=stop_after_delay(wait_s),
        wait=wait_fixed(_POLL_S),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    found = looking(arrival.look)
    if found is None:
        raise LaunchError(
            f"job {options.job!r} at {options.store} has not built its engines within {wait_s:.0f} s; "
            "check --store and --job, or raise --wait-s"
        )
    return found


def become_agent(agent: AgentSettings) -> NoReturn:
    """Becomes that agent."""
    logs.end()
    # The agent must not have threads when it forks its worker; the client of etcd has left some here.
    os.execve(sys.executable, agent.agent_command, agent.environment())
