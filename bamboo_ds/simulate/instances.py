"""Instance types: what they cost, what their devices are, and what is simulated on them. A node has one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from ..config import BambooConfig
from ..errors import ConfigError
from .given import Given, checked
from .market import Market, Nodes
from .profile import GIB, Profile
from .run import Simulation
from .terms import Terms


class Instance(Given):
    """An instance type."""

    name: str = Field(min_length=1)
    spot: float = Field(ge=0, description="$ per hour of a spot instance")
    on_demand: float = Field(ge=0, description="$ per hour on demand")
    memory_gib: float | None = Field(None, gt=0, description="of its device; null: the profile's")
    speed: float = Field(1.0, gt=0, description="times as fast as the profile's device")
    network_gb_s: float | None = Field(None, gt=0, description="GB/s of its network; null: that of the options")
    trace: str | None = Field(None, description="file with its nodes, in place of those of the options")
    climate: str | None = Field(None, description="the same, drawn")
    rate: float | None = Field(None, ge=0, description="share of its nodes that is lost in an hour")
    nodes: int | None = Field(None, ge=1, description="nodes that are wanted, where they are drawn")

    def own(self, asked: Nodes) -> Nodes:
        """Its nodes, where ``asked`` are those of the other types."""
        if self.trace is not None:
            if (self.climate, self.rate, self.nodes) != (None, None, None):
                why = "a trace has its own nodes: leave out climate, rate and nodes, or the trace"
                raise ConfigError(f"--instance {self.name}: {why}")
            return Nodes(trace=self.trace, from_s=asked.from_s, seconds=asked.seconds, compress=asked.compress)
        mine = {name: value for name in ("climate", "rate", "nodes") if (value := getattr(self, name)) is not None}
        return asked.model_copy(update={**({"trace": None} if "climate" in mine else {}), **mine})


#: By the names that an option has for them.
_KEYS = {name.replace("_", "-"): name for name in Instance.model_fields if name != "name"}


def of_option(text: str) -> Instance:
    """The instance type of ``NAME,spot=…,on-demand=…[,memory-gib=…][,speed=…]…``.

    Raises:
        ConfigError: names what is wrong with it.
    """
    name, *settings = text.split(",")
    values: dict[str, Any] = {"name": name.strip()}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if key not in _KEYS or not equals:
            raise ConfigError(f"--instance {text!r}: {setting.strip()!r} is none of {', '.join(_KEYS)} with a value")
        values[_KEYS[key]] = value
    return checked(f"--instance {text!r}", lambda: Instance.model_validate(values))


def offered(
    instance: Instance, market: Callable[[int], Market], profile: Profile, terms: Terms, config: BambooConfig
) -> Simulation:
    """The simulation on an instance type.

    Args:
        instance: the type.
        market: its nodes, by seed.
        profile: of the model, on the device that speeds are relative to.
        terms: what is assumed of instances that do not say otherwise.
        config: settings of the job.
    """
    priced: dict[str, float] = {"spot_price": instance.spot, "on_demand_price": instance.on_demand}
    if instance.network_gb_s is not None:
        priced["network_gb_s"] = instance.network_gb_s
    there = profile.on_device(instance.speed, None if instance.memory_gib is None else round(instance.memory_gib * GIB))
    return Simulation(market, there, terms.model_copy(update=priced), config)
