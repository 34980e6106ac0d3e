"""Setups: what can be chosen of a job, and which of them a model and a number of nodes allow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..config import BambooConfig, RedundancyMode
from ..simulate.market import Market
from ..simulate.profile import Profile

#: Numbers of stages that are tried: all small ones, then fewer and fewer.
_STAGES = (*range(2, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
#: Modes that are tried. Eager backward passes are simulated as eager forward passes, and take more memory.
MODES = (RedundancyMode.NONE, RedundancyMode.LAZY, RedundancyMode.EAGER_FORWARD)
#: Members that are rented beyond those that the roles need, as a share of these. More than one cannot compute.
_SPARES = (0.0, 0.25, 1.0)

Blocks = Literal["auto"] | int


class Shape(BaseModel):
    """Pipelines and stages on an instance type."""

    model_config = ConfigDict(frozen=True)

    instance: str
    pipelines: int
    stages: int

    @property
    def size(self) -> int:
        """Members that it needs for each to have one role."""
        return self.pipelines * self.stages

    def __str__(self) -> str:
        return f"{self.instance}: {self.pipelines} x {self.stages}"


class Setup(Shape):
    """What a job is run with."""

    mode: RedundancyMode = Field(description="redundancy.mode")
    blocks: Blocks = Field(description="topology.blocks")
    nodes: int = Field(description="rented at most")

    @property
    def spares(self) -> int:
        """Nodes that are rented beyond those that the roles need, where there are so many."""
        return max(0, self.nodes - self.size)

    def __str__(self) -> str:
        spares = f" + {self.spares}" if self.spares else ""
        return f"{super().__str__()}{spares}, {self.mode.value}, blocks {self.blocks}"

    @property
    def shape(self) -> Shape:
        """Its pipelines and stages."""
        return Shape(instance=self.instance, pipelines=self.pipelines, stages=self.stages)

    def config(self, base: BambooConfig) -> BambooConfig:
        """The settings of ``base`` with those of this setup."""
        changed = {"redundancy.mode": self.mode, "topology.blocks": self.blocks}
        return base.overridden(changed)


class Rejected(BaseModel):
    """What is not simulated, and why."""

    model_config = ConfigDict(frozen=True)

    what: str
    why: str
    need_gib: float | None = Field(None, description="memory that a device would need, where that is why")
    shape: str | None = Field(None, description="of a setup that was estimated")
    cost_per_million: float | None = Field(None, description="$ that it was estimated at; null: infinite")
    samples_per_s: float | None = Field(None, description="the same")


def shapes(
    instance: str, profile: Profile, market: Market, pipelines: int | None, stages: int | None
) -> Iterator[Shape | Rejected]:
    """The shapes that the number of nodes, the layers and the samples allow, and those that they do not.

    Args:
        instance: name of the instance type.
        profile: of the model.
        market: its nodes; as many as there are at most may be members.
        pipelines, stages: the only ones that are wanted; ``None``: any.
    """
    most = market.most
    layers = len(profile.each)
    wanted = [stages] if stages is not None else sorted({*_STAGES, profile.stages} - {1})
    micro_batches = profile.global_batch // profile.micro_batch
    for count in wanted:
        if count > layers or count > most or count < 2:
            if stages is not None:
                why = f"the profile has {layers} layers, there are {most} nodes at most, and a pipeline has 2 stages"
                yield Rejected(what=f"{instance}: {count} stages", why=why)
            continue
        for copies in [pipelines] if pipelines is not None else range(1, most // count + 1):
            shape = Shape(instance=instance, pipelines=copies, stages=count)
            each, rest = divmod(micro_batches, copies)
            if shape.size > most:
                yield Rejected(what=str(shape), why=f"there are {most} nodes at most")
            elif rest or not each or profile.global_batch % (profile.micro_batch * copies):
                if pipelines is not None:
                    why = f"{profile.global_batch} samples are no whole number of micro-batches for each pipeline"
                    yield Rejected(what=str(shape), why=why)
            elif each < count:
                why = f"a pipeline has {each} micro-batches, fewer than stages: most of the time is idle"
                yield Rejected(what=str(shape), why=why)
            else:
                yield shape


def setups(shape: Shape, market: Market, modes: Iterable[RedundancyMode], blocks: Iterable[Blocks]) -> Iterator[Setup]:
    """``shape`` in each of ``modes``, with each of ``blocks`` and some numbers of spare nodes."""
    limits = sorted({min(market.most, round(shape.size * (1 + share))) for share in _SPARES})
    for mode in modes:
        for each in blocks:
            for nodes in limits:
                yield Setup(**shape.model_dump(), mode=mode, blocks=each, nodes=nodes)
