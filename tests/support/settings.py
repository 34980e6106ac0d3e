"""Settings of agents and leaders, by the names of what differs from the defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bamboo_ds.config import BambooConfig, parse_block
from bamboo_ds.control.leader.decisions import Decider
from bamboo_ds.control.leader.restarts import RestartLimits
from bamboo_ds.control.leader.view import View
from bamboo_ds.control.settings import AgentSettings
from bamboo_ds.job_settings import JobSettings, paths_by_name


def block(**values: Any) -> BambooConfig:
    """A block with these settings."""
    paths, found = paths_by_name(), {}
    for name, value in values.items():
        part, _, leaf = paths[name].partition(".")
        found.setdefault(part, {})[leaf] = value
    return parse_block(found)


def unchecked(**values: Any) -> BambooConfig:
    """The same, with values that no user could give."""
    paths = paths_by_name()
    return BambooConfig().overridden({paths[name]: value for name, value in values.items()})


def agent(**values: Any) -> AgentSettings:
    """Of an agent; ``values`` are fields of its settings, or settings of its block. Nothing is started again."""
    names = {field.name for field in fields(AgentSettings)}
    told = {
        "job": "j",
        "command": ("true",),
        "slot": 0,
        "world_size": 1,
        "store": "http://127.0.0.1:1",
        "parent_pid": 1,
        **{name: value for name, value in values.items() if name in names},
    }
    others = {name: value for name, value in values.items() if name not in names}
    return AgentSettings(**{"settings": JobSettings(values=block(**{"max_restarts": 0, **others})), **told})


def deciding(settle_s: float, reply_s: float, limits: RestartLimits | None = None, **values: Any) -> Decider:
    """One that waits so long for companions of a loss and for a health reply. Nothing is started again."""
    waits = {"settle_ms": settle_s * 1000, "lease_ttl_s": 2 * reply_s, "max_restarts": 0}
    return Decider(unchecked(**{**waits, **values}), limits or RestartLimits())


def decided(kind: type[Any], decider: Decider, view: View, now: float) -> Any:
    """What it decides, which must be of that kind."""
    action = decider.decide(view, now)
    assert isinstance(action, kind), action
    return action
