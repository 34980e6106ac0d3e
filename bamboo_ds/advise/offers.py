"""Instance types, with what is simulated on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ..config import BambooConfig
from ..simulate.baselines import Stock
from ..simulate.market import Market
from ..simulate.profile import Profile
from ..simulate.run import Simulation
from ..simulate.terms import Terms
from .instances import Instance

_GIB = 2**30


@dataclass(frozen=True, eq=False)
class Offer:
    """An instance type, with what is simulated on it.

    Attributes:
        market: its nodes, by seed.
        profile: the model on its device.
        terms: with its prices and its network.
        stock: stock DeepSpeed on it.
    """

    instance: Instance
    market: Callable[[int], Market]
    profile: Profile
    terms: Terms
    stock: Stock

    @cached_property
    def most(self) -> int:
        """The greatest number of nodes."""
        return self.market(0).most

    def simulation(self, config: BambooConfig, pipelines: int, stages: int, nodes: int) -> Simulation:
        """Of a job on it that rents so many nodes at most."""
        found = Simulation(self.market, self.profile, self.terms, config, pipelines, stages, nodes)
        found.stock = self.stock  # which knows arrangements of before
        return found


def offered(instance: Instance, market: Callable[[int], Market], profile: Profile, terms: Terms) -> Offer:
    """What ``instance`` offers for a model.

    Args:
        market: its nodes, by seed.
        profile: of the model, on the device that speeds are relative to.
        terms: what is assumed of instances that do not say otherwise.
    """
    layers = profile.layers
    if instance.speed != 1:
        times = ("forward_s", "backward_s", "update_s")
        layers = tuple(
            layer.model_copy(update={name: getattr(layer, name) / instance.speed for name in times}) for layer in layers
        )
    memory = profile.memory_bytes if instance.memory_gib is None else round(instance.memory_gib * _GIB)
    priced: dict[str, float] = {"spot_price": instance.spot, "on_demand_price": instance.on_demand}
    if instance.network_gb_s is not None:
        priced["network_gb_s"] = instance.network_gb_s
    # Not by a copy, which would keep what has been worked out of other layers.
    fields = {name: getattr(profile, name) for name in Profile.model_fields}
    there = Profile(**{**fields, "layers": layers, "memory_bytes": memory})
    own = terms.model_copy(update=priced)
    return Offer(instance, market, there, own, Stock(there, own))
