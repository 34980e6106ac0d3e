"""``bamboo join``: one more slot for a job that is running."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from ..control.registry.access import check_secret, open_store
from ..control.registry.keys import Keys
from ..control.registry.mirror import Mirror
from ..control.registry.vacancies import find_vacancy, is_over
from ..control.settings import AgentSettings, MemberOptions
from ..errors import ConfigError, LaunchError
from ..store import Store

_TIMEOUT_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class JoinOptions(MemberOptions):
    """What ``bamboo join`` was asked for.

    Attributes:
        store: URLs of etcd.
        wait_s: seconds to wait until the job has built its engines.
        quiet: whether the course of the member is not told.
    """

    store: str
    wait_s: float
    quiet: bool


def prepare(options: JoinOptions) -> AgentSettings:
    """The settings of an agent that joins the job, with a slot of its own.

    Raises:
        ConfigError: there is no such job, or the sources of notices are wrong.
        LaunchError: it has not built its engines within ``wait_s``, or has ended.
    """
    options.check_notices()
    with open_store(options.store, options.job, _TIMEOUT_S, options.secret) as store:
        mirror = _started(store, options)
        plan = mirror.plan
        assert plan is not None
        if plan.unheld and not options.bamboo.recovery.max_restarts:
            raise LaunchError(f"job {options.job!r} has ended by a fatal loss: there is nothing to join")
        vacancy = find_vacancy(store, mirror, plan)
    return AgentSettings(
        **options.member_options(),
        **dataclasses.asdict(vacancy),
        store=options.store,
        parent_pid=os.getppid(),
        guest=True,
        tells=not options.quiet,
    )


def _started(store: Store, options: JoinOptions) -> Mirror:
    """The job's keys, once its engines are built."""

    def look() -> Mirror:
        snapshot = store.get_prefix("")
        check_secret(snapshot.entries.values(), options.job, options.secret)
        spec = snapshot.entries.get(Keys.SPEC)
        if spec is not None and not spec.genuine:
            raise LaunchError(f"what {options.store} says about job {options.job!r} was written by somebody else")
        mirror = Mirror(snapshot)
        if Keys.SPEC not in snapshot.entries and not options.wait_s:
            raise ConfigError(f"no job {options.job!r} is known at {options.store}; check --store and --job")
        if is_over(mirror):
            raise LaunchError(f"job {options.job!r} has ended: there is nothing to join")
        return mirror

    started = Retrying(
        retry=retry_if_result(lambda m: m.plan is None or (m.plan.layout is None and not m.plan.unheld)),
        stop=stop_after_delay(options.wait_s),
        wait=wait_fixed(_POLL_S),
        retry_error_callback=lambda state: None,
    )
    found = started(look)
    if found is None:
        raise LaunchError(
            f"job {options.job!r} at {options.store} has not built its engines within {options.wait_s:.0f} s; "
            "check --store and --job, or raise --wait-s"
        )
    return found


def join(options: JoinOptions) -> None:
    """Become the agent of a new slot; does not return.

    Raises:
        ConfigError, LaunchError: see :func:`prepare`.
    """
    settings = prepare(options)
    arguments = [sys.executable, "-m", "bamboo_ds.control.agent", *settings.to_arguments()]
    sys.stdout.flush()
    sys.stderr.flush()
    # The agent must not have threads when it forks its worker; the client of etcd has left some here.
    os.execve(sys.executable, arguments, settings.environment())
