"""``bamboo join``: one more slot for a job that is running."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tenacity import Retrying, retry_if_result, stop_after_delay, wait_fixed

from ..control.access import ENV_STORE, open_store
from ..control.agent_settings import AgentSettings
from ..control.leader import claim_slot
from ..control.membership import JobRecord, Keys, LeftRecord, MemberRecord
from ..control.mirror import Mirror
from ..errors import ConfigError, LaunchError
from ..store import Store
from ..topology import Plan, Role

_TIMEOUT_S = 10.0
_POLL_S = 0.2


@dataclass(frozen=True)
class JoinOptions:
    """What ``bamboo join`` was asked for; as in :class:`~bamboo_ds.control.agent_settings.AgentSettings`.

    Attributes:
        store: URLs of etcd.
        wait_s: seconds to wait until the job has built its engines.
    """

    store: str
    job: str
    address: str
    host: str | None
    zone: str
    events: str | None
    lease_ttl_s: float
    heartbeat_timeout_s: float
    settle_s: float
    grace_s: float
    wait_s: float
    command: tuple[str, ...]


def choose_home(plan: Plan, homes: Iterable[int]) -> int:
    """The rank that the script of a new member runs as.

    Scripts have iterators over a pipeline's batches at its ends only, so a pipeline whose ends nobody is at home at
    comes first; then the rank at which the fewest members are at home.

    Args:
        plan: the newest plan, with a layout.
        homes: homes of all members, admitted or not.
    """
    layout, taken = plan.world, list(homes)

    def key(rank: int) -> tuple[bool, int, bool, int]:
        role = layout.role(rank)
        ends = {layout.rank(Role(role.pipeline, stage)) for stage in (0, layout.stages - 1)}
        hungry = rank in ends and not any(home in ends for home in taken)
        return not hungry, taken.count(rank), rank not in ends, rank

    return min(range(layout.size), key=key)


def prepare(options: JoinOptions) -> AgentSettings:
    """The settings of an agent that joins the job, with a slot of its own.

    Raises:
        ConfigError: there is no such job.
        LaunchError: it has not built its engines within ``wait_s``, or has ended.
    """
    with open_store(options.store, options.job, _TIMEOUT_S) as store:
        mirror = _started(store, options)
        plan = mirror.plan
        assert plan is not None
        waiting = [record.home for record in mirror.members.values() if record.id not in plan.members]
        home = choose_home(plan, [*plan.homes, *waiting])
        spec = mirror.get(Keys.SPEC, JobRecord)
        slot = _claim_slot(store, plan.world.size)
    return AgentSettings(
        slot=slot,
        home=home,
        world_size=plan.world.size,
        store=options.store,
        job=options.job,
        address=options.address,
        zone=options.zone,
        events=options.events,
        parent_pid=os.getppid(),
        lease_ttl_s=options.lease_ttl_s,
        heartbeat_timeout_s=options.heartbeat_timeout_s,
        settle_s=options.settle_s,
        grace_s=options.grace_s,
        master_port=29500,
        pipelines=spec.pipelines if spec else None,
        result_fd=None,
        state_file=None,
        command=options.command,
        host=options.host,
    )


def _started(store: Store, options: JoinOptions) -> Mirror:
    """The job's keys, once its engines are built."""

    def look() -> Mirror:
        mirror = Mirror(store.get_prefix(""))
        if mirror.get(Keys.SPEC, JobRecord) is None and not options.wait_s:
            raise ConfigError(f"no job {options.job!r} is known at {options.store}; check --store and --job")
        if mirror.stop is not None or _over(mirror.plan, mirror.left):
            raise LaunchError(f"job {options.job!r} has ended: there is nothing to join")
        return mirror

    patience = Retrying(
        retry=retry_if_result(lambda mirror: mirror.plan is None or mirror.plan.layout is None),
        stop=stop_after_delay(options.wait_s),
        wait=wait_fixed(_POLL_S),
        retry_error_callback=lambda state: None,
    )
    found = patience(look)
    if found is None:
        raise LaunchError(
            f"job {options.job!r} at {options.store} has not built its engines within {options.wait_s:.0f} s; "
            "check --store and --job, or raise --wait-s"
        )
    return found


def _over(plan: Plan | None, left: Mapping[str, LeftRecord]) -> bool:
    return plan is not None and all(m in left and left[m].outcome == "finished" for m in plan.members)


def _claim_slot(store: Store, first: int) -> int:
    """A slot number that nobody else has."""
    taken = [MemberRecord.from_json(e.value).slot for e in store.get_prefix(Keys.MEMBERS).entries.values()]
    return claim_slot(store, max([first - 1, *taken]) + 1)


def join(options: JoinOptions) -> None:
    """Become the agent of a new slot; does not return.

    Raises:
        ConfigError, LaunchError: see :func:`prepare`.
    """
    settings = prepare(options)
    environment = {**os.environ, ENV_STORE: settings.store}
    arguments = [sys.executable, "-m", "bamboo_ds.control.agent", *settings.to_arguments()]
    sys.stdout.flush()
    sys.stderr.flush()
    # The agent must not have threads when it forks its worker; the client of etcd has left some here.
    os.execve(sys.executable, arguments, environment)
