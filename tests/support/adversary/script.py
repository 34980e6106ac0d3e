"""What a drawn script is: data, which :mod:`tests.support.adversary.train_drawn` and the engine's model carry out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Attribute:
    """A name that a script puts on something.

    Attributes:
        on: parameter, layer, buffer, optimizer, scheduler, model, data.
        name: of the attribute.
        value: one of ``VALUES``.
        early: in the constructor of the layer; else by the script, before ``initialize``.
    """

    on: str
    name: str
    value: str
    early: bool = True


@dataclass(frozen=True)
class Action:
    """What a script does between two calls of the engine: after step ``at``, then every ``every`` steps, if ever."""

    what: str
    at: int
    every: int = 0

    def due(self, step: int) -> bool:
        """Whether it comes after so many steps."""
        return step == self.at or (self.every > 0 and step > self.at and (step - self.at) % self.every == 0)


@dataclass(frozen=True)
class Kill:
    """SIGKILL of the process of rank ``rank``, in ``step`` (from 0) where ``place`` comes for the time ``count``.

    Attributes:
        place: where in the script's own code: draw, batch_fn, loss, forward, between, evaluation, optimizer; or
            ``timer``: ``count`` milliseconds after the step has begun.
        by: the rank in whose code that is; it waits until it is told of the loss. Without it the rank itself.
        healed: not before every stage has a replica again.
    """

    rank: int
    step: int
    place: str
    count: int = 0
    by: int | None = None
    healed: bool = False


@dataclass(frozen=True)
class Script:
    """A drawn script. Of each kind of thing the default is the simplest.

    Attributes:
        seed: that it was drawn from.
        layers: kinds of layers, in their order; at least one for each stage.
        model: more about the model: tied, functions, checkpointed, uniform, instances.
        config: more about ``ds_config.json``.
        process: what the script does to its process before everything else.
    """

    seed: int = 0
    stages: int = 2
    pipelines: int = 1
    micro_batches: int = 2
    steps: int = 6
    layers: tuple[str, ...] = ("plain", "plain")
    model: tuple[str, ...] = ()
    optimizer: str = "sgd"
    scheduler: str = "none"
    loss: str = "mse"
    data: str = "iterator"
    batch_fn: str = "none"
    attributes: tuple[Attribute, ...] = ()
    actions: tuple[Action, ...] = ()
    config: tuple[str, ...] = ()
    process: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()

    @property
    def world(self) -> int:
        """Ranks."""
        return self.stages * self.pipelines

    def text(self) -> str:
        """As JSON, without what is as by default."""
        plain = Script()
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({k: _plain(v) for k, v in found.items() if v != getattr(plain, k)})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return asdict(value) if isinstance(value, (Attribute, Action, Kill)) else value


def parsed(text: str) -> Script:
    """The script that :meth:`Script.text` gave."""
    given = json.loads(text)
    kinds = {"attributes": Attribute, "actions": Action, "kills": Kill}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(kinds[name](**each) if name in kinds else each for each in value)
    return Script(**given)


def simpler(script: Script) -> list[Script]:
    """Scripts with one thing less, those that leave most away first."""
    plain = Script()
    found = []
    for name in ("kills", "actions", "attributes", "process", "config", "model"):
        items = getattr(script, name)
        found += [replace(script, **{name: ()})] if len(items) > 1 else []
        found += [replace(script, **{name: (*items[:n], *items[n + 1 :])}) for n in range(len(items))]
    for name in ("optimizer", "scheduler", "loss", "data", "batch_fn", "pipelines"):
        if getattr(script, name) != getattr(plain, name):
            found.append(replace(script, **{name: getattr(plain, name)}))
    layers = script.layers
    found += [
        replace(script, layers=(*layers[:n], "plain", *layers[n + 1 :]))
        for n, layer in enumerate(layers)
        if layer != "plain"
    ]
    if len(layers) > script.stages:
        found += [replace(script, layers=(*layers[:n], *layers[n + 1 :])) for n in range(len(layers))]
    if script.stages > 2:
        found.append(replace(script, stages=script.stages - 1))
    if script.micro_batches > 1:
        found.append(replace(script, micro_batches=script.micro_batches - 1))
    found += [
        replace(script, kills=(*script.kills[:n], replace(kill, count=0), *script.kills[n + 1 :]))
        for n, kill in enumerate(script.kills)
        if kill.count and kill.place != "timer"
    ]
    return [
        each for each in found if all(kill.rank < each.world and (kill.by or 0) < each.world for kill in each.kills)
    ]
