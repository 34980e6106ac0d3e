"""Schedules of faults: by rate, by trace, by script. Pure."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError
from .faults import SECONDS, WEIGHTS, Fault, FaultKind, Target


def by_rate(
    per_minute: float,
    seed: int,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    weights: Mapping[FaultKind, float] = WEIGHTS,
) -> list[Fault]:
    """Faults at random times (a Poisson process), drawn from ``seed``.

    The faults of a longer schedule begin with those of a shorter one.

    Args:
        per_minute: mean number of faults in a minute.
        seed: equal seeds and settings give equal schedules.
        count: how many.
        duration_s: up to when; one of the two is needed, the earlier end counts.
        weights: how often each kind is drawn.

    Raises:
        ConfigError: a number that cannot be.
    """
    weights = {kind: weight for kind, weight in weights.items() if weight > 0}
    if not (per_minute > 0 and math.isfinite(per_minute)):
        raise ConfigError(f"the rate of faults is {per_minute}: it must be a positive number per minute")
    if count is None and duration_s is None:
        raise ConfigError("faults by rate need an end: --count or --duration-s")
    if not weights:
        raise ConfigError("all weights of faults are 0: there is nothing to do")
    draw = random.Random(seed)
    kinds = sorted(weights, key=lambda kind: kind.value)
    faults: list[Fault] = []
    at_s = 0.0
    while count is None or len(faults) < count:
        # The same number of draws for each, lest a setting of one kind change all that follows.
        gap, pick, length, choice = (draw.random() for _ in range(4))
        at_s += -math.log(1.0 - gap) * 60.0 / per_minute
        if duration_s is not None and at_s > duration_s:
            break
        kind = _pick(kinds, weights, pick)
        low, high = SECONDS.get(kind, (0.0, 0.0))
        lasting = low * (high / low) ** length if kind.timed else None
        faults.append(Fault(len(faults), at_s, kind, None, lasting, choice))
    return faults


def _pick(kinds: Sequence[FaultKind], weights: Mapping[FaultKind, float], share: float) -> FaultKind:
    left = share * sum(weights.values())
    for kind in kinds:
        left -= weights[kind]
        if left < 0:
            return kind
    return kinds[-1]


# -- by trace -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A line of a trace: a node came or went."""

    at_ms: float
    what: Literal["add", "remove"]
    node: str


def parse_trace(text: str, name: str) -> list[Change]:
    """The lines ``ms,add|remove,node`` of a trace; empty ones and those that begin with ``#`` do not count.

    Raises:
        ConfigError: names the line (``name:number``) and what is wrong with it.
    """
    changes: list[Change] = []
    there: set[str] = set()
    for where, line in _lines(text, name):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or parts[1] not in ("add", "remove") or not parts[2]:
            raise ConfigError(f"{where}: expected ms,add|remove,node and found {line!r}")
        at_ms = _milliseconds(parts[0], where)
        if changes and at_ms < changes[-1].at_ms:
            raise ConfigError(f"{where}: {at_ms:g} ms is before the line above: a trace is in order of time")
        what, node = parts[1], parts[2]
        if (what == "add") == (node in there):
            raise ConfigError(f"{where}: {node} is {'there already' if what == 'add' else 'not there'}")
        (there.add if what == "add" else there.remove)(node)
        changes.append(Change(at_ms, "add" if what == "add" else "remove", node))
    if not changes:
        raise ConfigError(f"{name}: the trace is empty")
    return changes


def _milliseconds(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {text!r} is no number of milliseconds") from error
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{where}: {text!r} is no number of milliseconds from 0 on")
    return value


def by_trace(changes: Sequence[Change], initial: int, limit: int, compress: float = 1.0) -> list[Fault]:
    """A trace as faults: a node that comes joins, one that goes is killed with its agent.

    The nodes of the trace's first instant stand for the job's ``initial`` members, in the order of their slots; further
    ones join. No more than ``limit`` nodes are in the job: others wait, and take the place of one that goes.

    Args:
        changes: of :func:`parse_trace`.
        initial: members of the job at the begin.
        limit: bound on the nodes in the job.
        compress: how many times faster than the trace.
    """
    if not (compress > 0 and math.isfinite(compress)):
        raise ConfigError(f"--compress is {compress}: it must be a positive number")
    if limit < 1 or initial < 1:
        raise ConfigError("a job by trace needs at least one member")
    begin = changes[0].at_ms if changes else 0.0
    founders = set(initial_nodes(changes, initial))
    faults: list[Fault] = []
    for change in within(changes, limit, frozenset(founders)):
        if change.what == "add" and change.node in founders:
            founders.remove(change.node)
        else:
            kind = FaultKind.JOIN if change.what == "add" else FaultKind.KILL_AGENT
            at_s = (change.at_ms - begin) / 1000 / compress
            faults.append(Fault(len(faults), at_s, kind, Target("node", change.node)))
    return faults


def within(changes: Iterable[Change], limit: int, first: Collection[str] = ()) -> Iterator[Change]:
    """The changes of a job that has no more than ``limit`` nodes: others wait, and take the place of one that goes.

    Args:
        changes: of a trace.
        limit: bound on the nodes.
        first: nodes that count as there from the begin on.
    """
    running, waiting = set(first), dict[str, None]()
    for change in changes:
        if change.what == "add":
            if change.node in first and change.node in running:
                yield change
            elif len(running) < limit:
                running.add(change.node)
                yield change
            else:
                waiting[change.node] = None
        elif change.node in waiting:
            del waiting[change.node]
        else:
            running.remove(change.node)
            yield change
            if waiting:
                node = next(iter(waiting))
                del waiting[node]
                running.add(node)
                yield Change(change.at_ms, "add", node)


def initial_nodes(changes: Sequence[Change], initial: int) -> list[str]:
    """The nodes that stand for the job's ``initial`` members, in the order of their slots."""
    first = [c.node for c in changes if c.what == "add" and c.at_ms == changes[0].at_ms]
    return first[:initial]


# -- by script ------------------------------------------------------------------------------------------


class ScriptLine(BaseModel):
    """A line of a script.

    Attributes:
        at_s: seconds since the begin.
        kind: see :class:`~.faults.FaultKind`.
        target: see :meth:`~.faults.Target.parse`; drawn if not given.
        seconds: how long a timed fault lasts.
        healed: wait until everything that was lost before has been replaced.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    at_s: float = Field(ge=0, allow_inf_nan=False)
    kind: FaultKind
    target: str | int | None = None
    seconds: float | None = Field(None, gt=0, allow_inf_nan=False)
    healed: bool = False


def parse_script(text: str, name: str, seed: int = 0) -> list[Fault]:
    """The faults of a script of JSON lines (see :class:`ScriptLine`), in order of time.

    Args:
        text: the script; empty lines and those that begin with ``#`` do not count.
        name: of the file, for errors.
        seed: of what the script leaves open.

    Raises:
        ConfigError: names the line (``name:number``) and what is wrong with it.
    """
    draw = random.Random(seed)
    faults: list[Fault] = []
    for where, line in _lines(text, name):
        try:
            parsed = ScriptLine.model_validate(json.loads(line))
            target = None if parsed.target is None else Target.parse(parsed.target)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join(map(str, first["loc"])) or "line"
            raise ConfigError(f"{where}: {key}: {first['msg']}") from error
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        length, choice = draw.random(), draw.random()
        seconds = parsed.seconds
        if parsed.kind.timed and seconds is None:
            low, high = SECONDS[parsed.kind]
            seconds = low * (high / low) ** length
        elif not parsed.kind.timed and seconds is not None:
            raise ConfigError(f"{where}: {parsed.kind.value} is over at once: leave out seconds")
        faults.append(Fault(len(faults), parsed.at_s, parsed.kind, target, seconds, choice, parsed.healed))
    if not faults:
        raise ConfigError(f"{name}: the script is empty")
    ordered = sorted(faults, key=lambda fault: fault.at_s)
    return [replace(fault, number=number) for number, fault in enumerate(ordered)]


def _lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    """(``name:number``, line) of all lines that count."""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield f"{name}:{number}", stripped
