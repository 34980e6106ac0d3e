"""Markets: nodes that come and go, by a trace or drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import groupby
from pathlib import Path
from random import Random

from pydantic import Field

from ..chaos.schedule import Change, parse_trace, within
from ..errors import ConfigError
from .given import Given, option


@dataclass(frozen=True)
class Market:
    """Nodes that come and go for some time.

    Attributes:
        changes: in order of time, from 0 ms on. Nodes of time 0 are there at the begin.
        seconds: how long.
        zones: of nodes, where known.
        ordered: nodes of the begin are members in their order, not in one that a seed draws.
    """

    changes: tuple[Change, ...]
    seconds: float
    zones: dict[str, str] = field(default_factory=dict)
    ordered: bool = False

    @property
    def moments(self) -> Iterator[tuple[float, list[str], list[str]]]:
        """Seconds, nodes that come and nodes that go at each moment with changes. One that comes again is another."""
        times: dict[str, int] = {}

        def named(node: str) -> str:
            return node if times[node] == 1 else f"{node}.{times[node]}"

        for at_ms, group in groupby(self.changes, key=lambda change: change.at_ms):
            come: list[str] = []
            go: list[str] = []
            for change in group:
                if change.what == "add":
                    times[change.node] = times.get(change.node, 0) + 1
                    come.append(named(change.node))
                elif named(change.node) in come:
                    come.remove(named(change.node))
                else:
                    go.append(named(change.node))
            yield at_ms / 1000, come, go

    @property
    def losses(self) -> int:
        """Number of moments at which nodes go."""
        return len({change.at_ms for change in self.changes if change.what == "remove"})

    @property
    def node_seconds(self) -> float:
        """Node-seconds of the whole market."""
        return sum(
            (self.seconds - change.at_ms / 1000) * (1 if change.what == "add" else -1) for change in self.changes
        )

    @property
    def most(self) -> int:
        """The greatest number of nodes."""
        return max(count for *_, count in self.counts())

    def counts(self, delay_s: float = 0.0) -> list[tuple[float, float, int]]:
        """Periods (begin, end, nodes); a node that comes later counts ``delay_s`` after it has come."""
        steps: list[tuple[float, int]] = []
        there: dict[str, float] = {}
        for change in self.changes:
            at_s = change.at_ms / 1000
            if change.what == "add":
                there[change.node] = at_s + (delay_s if at_s else 0.0)
            else:
                ready = there.pop(change.node)
                if ready < at_s:
                    steps += [(ready, 1), (at_s, -1)]
        steps += [(ready, 1) for ready in there.values() if ready < self.seconds]
        found: list[tuple[float, float, int]] = []
        count, last = 0, 0.0
        for at_s, group in groupby(sorted(steps), key=lambda step: step[0]):
            if at_s > last:
                found.append((last, at_s, count))
            last, count = at_s, count + sum(change for _, change in group)
        return [*found, (last, self.seconds, count)]

    def window(self, begin_s: float, seconds: float | None) -> Market:
        """The market from ``begin_s`` on, for ``seconds``; nodes that are there then are there at the begin.

        Raises:
            ConfigError: it reaches beyond the market.
        """
        left = self.seconds - begin_s
        length = left if seconds is None else seconds
        if not 0 <= begin_s < self.seconds:
            raise ConfigError(
                f"--from-s {begin_s:g} is not within the trace, which lasts {self.seconds:g} s: choose less"
            )
        if not 0 < length <= left:
            raise ConfigError(
                f"--seconds {length:g}: the nodes are known for {left:g} s from --from-s {begin_s:g} on: choose no more"
            )
        there: dict[str, None] = {}
        later = []
        for change in self.changes:
            if change.at_ms <= begin_s * 1000:
                there[change.node] = None
                if change.what == "remove":
                    del there[change.node]
            elif change.at_ms < (begin_s + length) * 1000:
                later.append(replace(change, at_ms=change.at_ms - begin_s * 1000))
        return replace(self, changes=(*(Change(0.0, "add", node) for node in there), *later), seconds=length)

    def compressed(self, times: float) -> Market:
        """The same, so many times as fast."""
        changes = tuple(replace(change, at_ms=change.at_ms / times) for change in self.changes)
        return replace(self, changes=changes, seconds=self.seconds / times)

    def rented(self, limit: int) -> Market:
        """The nodes that a job rents which wants no more than ``limit``."""
        return replace(self, changes=tuple(within(self.changes, limit)))


def parse(text: str, name: str, seed: int) -> Market:
    """The market of a trace: lines ``ms,add|remove,node``, or ``s,count`` with the number of nodes from then on.

    It lasts until the last line. Of a trace of numbers, ``seed`` draws the nodes that go.

    Raises:
        ConfigError: names the line and what is wrong with it.
    """
    lines = [line.strip() for line in text.splitlines()]
    first = next((line for line in lines if line and not line.startswith("#")), "")
    changes = list(_counted(lines, name, Random(seed)) if first.count(",") == 1 else parse_trace(text, name))
    if not changes:
        raise ConfigError(f"{name}: the trace has no nodes")
    begin = changes[0].at_ms
    return Market(tuple(replace(c, at_ms=c.at_ms - begin) for c in changes), _last_s(changes, lines) - begin / 1000)


def _last_s(changes: Sequence[Change], lines: Sequence[str]) -> float:
    last = next(line for line in reversed(lines) if line and not line.startswith("#"))
    return float(last.split(",")[0]) if last.count(",") == 1 else changes[-1].at_ms / 1000


def _counted(lines: Sequence[str], name: str, draw: Random) -> Iterator[Change]:
    there: list[str] = []
    number, last = 0, -math.inf
    for at, line in enumerate(lines, 1):
        if not line or line.startswith("#") or (last == -math.inf and line.replace(" ", "") == "time,count"):
            continue
        try:
            seconds, count = (kind(part) for kind, part in zip((float, int), line.split(","), strict=True))
        except ValueError as error:
            raise ConfigError(f"{name}:{at}: expected seconds,count and found {line!r}") from error
        if not (math.isfinite(seconds) and seconds >= max(0.0, last)) or count < 0:
            raise ConfigError(f"{name}:{at}: {line!r}: seconds are in order and from 0 on, counts are not negative")
        last = seconds
        while len(there) > count:
            yield Change(seconds * 1000, "remove", there.pop(draw.randrange(len(there))))
        while len(there) < count:
            there.append(f"node{number}")
            number += 1
            yield Change(seconds * 1000, "add", there[-1])


# -- drawn ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Climate:
    """The law by which nodes are drawn.

    Attributes:
        hourly: share of the living nodes that is lost in an hour, besides those whose lifetime ends.
        bulk: mean number of nodes that go at once; their number is geometric, as far as the zone has so many.
        zones: among which nodes are spread; those that go at once are of one.
        lifetime_h: hours after which a node goes in any case; ``None``: any.
        replaced_s: mean seconds until another node comes in place of one that goes; exponential.
        source: where the figures come from.
    """

    hourly: float
    bulk: float = 1.0
    zones: int = 1
    lifetime_h: float | None = None
    replaced_s: float = 300.0
    source: str = "given by options"


_NSDI = (
    "hourly preemption rates that Thorpe et al. replay (NSDI 2023, section 6); bulks as in the EC2 p3 trace that they"
    " publish; the time until a node is replaced is an assumption"
)
CLIMATES = {
    "bamboo-10": Climate(0.10, 2.1, 3, None, 600.0, _NSDI),
    "bamboo-16": Climate(0.16, 2.1, 3, None, 600.0, _NSDI),
    "bamboo-33": Climate(0.33, 2.1, 3, None, 600.0, _NSDI),
    "ec2-p3": Climate(
        0.61, 2.1, 3, None, 1200.0, "means of the 12-hour EC2 p3 trace published with Bamboo (NSDI 2023): 0.61 losses"
        " per node and hour, 2.1 at once"
    ),
    "gcp-preemptible": Climate(
        0.05, 1.0, 1, 24.0, 300.0, "preemptible VMs end after 24 hours (Google Cloud's documentation); the rate before"
        " that is an assumption"
    ),
}  # fmt: skip


def drawn(climate: Climate, nodes: int, seconds: float, seed: int) -> Market:
    """A market in which ``nodes`` are wanted; all of them are there at the begin."""
    draw = Random(seed)
    changes: list[Change] = []
    zones: dict[str, str] = {}
    there: dict[str, list[str]] = {f"zone{z}": [] for z in range(climate.zones)}
    names = list(there)
    queue: list[tuple[float, int, str, str]] = []  # seconds, tie, what, node or zone

    def later(at_s: float, what: str, who: str) -> None:
        if at_s < seconds:
            heappush(queue, (at_s, len(zones) + len(queue) + len(changes), what, who))

    def come(at_s: float, zone: str) -> None:
        node = f"node{len(zones)}"
        zones[node] = zone
        there[zone].append(node)
        changes.append(Change(at_s * 1000, "add", node))
        if climate.lifetime_h is not None:
            # Those of the begin are of any age.
            share = draw.random() if at_s == 0 else 1.0
            later(at_s + climate.lifetime_h * 3600 * share, "end", node)

    def go(at_s: float, node: str) -> None:
        there[zones[node]].remove(node)
        changes.append(Change(at_s * 1000, "remove", node))
        later(at_s + (draw.expovariate(1 / climate.replaced_s) if climate.replaced_s else 0.0), "come", zones[node])

    def bulks(zone: str) -> float:
        """Bulks in an hour: times their mean size, which the zone bounds, they are ``hourly`` of the nodes there."""
        count = len(there[zone])
        return climate.hourly * count / (climate.bulk * (1 - (1 - 1 / climate.bulk) ** count)) if count else 0.0

    for number in range(nodes):
        come(0.0, names[number % climate.zones])
    # Zones never have more nodes than now: bulks are drawn for as many, and some do not happen where there are fewer.
    most = {zone: bulks(zone) for zone in names}
    gap = 3600 / sum(most.values()) if climate.hourly else math.inf
    if gap < math.inf:
        later(draw.expovariate(1 / gap), "bulk", "")
    while queue:
        at_s, _, what, who = heappop(queue)
        if what == "come":
            come(at_s, who)
        elif what == "end":
            if who in there[zones[who]]:
                go(at_s, who)
        else:
            later(at_s + draw.expovariate(1 / gap), "bulk", "")
            (zone,) = draw.choices(names, list(most.values()))
            if draw.random() * most[zone] >= bulks(zone):
                continue
            size = 1 if climate.bulk == 1 else 1 + int(math.log(1 - draw.random()) / math.log(1 - 1 / climate.bulk))
            for node in draw.sample(there[zone], min(size, len(there[zone]))):
                go(at_s, node)
    return Market(tuple(changes), seconds, zones)


# -- asked for ------------------------------------------------------------------------------------------

#: How long nodes are drawn for, unless told otherwise.
HOURS = 24.0
#: What of the climate has options of its own.
_WEATHER = ("rate", "bulk", "zones", "lifetime_h", "replaced_s")


class Nodes(Given):
    """The nodes that are asked for, of a trace or of a climate; options of ``bamboo simulate`` are its fields."""

    trace: str | None = Field(None, description="file of lines ms,add|remove,node or s,count")
    climate: str | None = Field(None, description=f"draw the nodes instead, like {', '.join(CLIMATES)}")
    nodes: int | None = Field(None, ge=1, description="nodes that are wanted, where they are drawn")
    hours: float | None = Field(None, gt=0, description=f"how long, where they are drawn; if not given {HOURS:g}")
    rate: float | None = Field(None, ge=0, description="share of the nodes that is lost in an hour, not the climate's")
    bulk: float | None = Field(None, ge=1, description="nodes that go at once, on average")
    zones: int | None = Field(None, ge=1, description="zones; those that go at once are of one")
    lifetime_h: float | None = Field(None, gt=0, description="hours after which a node goes in any case")
    replaced_s: float | None = Field(None, ge=0, description="seconds until another comes in its place, on average")
    from_s: float = Field(0.0, ge=0, description="begin so far into the trace")
    seconds: float | None = Field(None, gt=0, description="only so much of it")
    compress: float = Field(1.0, gt=0, description="how many times as fast as the trace")

    def market(self, limit: int | None = None) -> Callable[[int], Market]:
        """The nodes, by seed.

        Args:
            limit: most of them that all jobs together rent; ``None``: any.

        Raises:
            ConfigError: options that contradict each other, or that mean nothing here.
        """
        if (self.trace is None) == (self.climate is None):
            raise ConfigError("give one of --trace and --climate")
        drawing = self._traced(self.trace) if self.trace is not None else self._drawn()

        @lru_cache(maxsize=1)
        def market(seed: int) -> Market:
            whole = drawing(seed).window(self.from_s, self.seconds).compressed(self.compress)
            return whole if limit is None else whole.rented(limit)

        return market

    def _traced(self, trace: str) -> Callable[[int], Market]:
        options = [option(name) for name in (*_WEATHER, "nodes", "hours") if getattr(self, name) is not None]
        if options:
            raise ConfigError(
                f"{', '.join(options)}: only for a --climate; --limit bounds the nodes of a trace, --seconds its length"
            )
        try:
            text = Path(trace).read_text()
        except OSError as error:
            raise ConfigError(f"there is no trace {trace}: {error.strerror}") from error
        return lambda seed: parse(text, trace, seed)

    def _drawn(self) -> Callable[[int], Market]:
        if self.climate not in CLIMATES:
            raise ConfigError(f"there is no climate {self.climate!r}; there are {', '.join(CLIMATES)}")
        count, seconds = self.nodes, 3600 * (self.hours or HOURS)
        if count is None:
            raise ConfigError("--climate needs --nodes: how many are wanted")
        own = {name: value for name in _WEATHER if (value := getattr(self, name)) is not None}
        if "rate" in own:
            own["hourly"] = own.pop("rate")
        climate = replace(CLIMATES[self.climate], **own)
        return lambda seed: drawn(climate, count, seconds, seed)
