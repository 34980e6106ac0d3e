"""Drawn scripts in the engine's model: members are threads of one process, and a loop in plain torch is the oracle.

The loop has no pipelines, schedules and messages: each micro-batch goes through all stages and back, one after another.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn

from bamboo_ds.bare import bare
from bamboo_ds.engine.iteration import reduction
from bamboo_ds.engine.joining import replay
from bamboo_ds.engine.stage import shares
from bamboo_ds.engine.stage.clones import PristineOptimizer
from bamboo_ds.errors import BambooError, FatalLoss
from bamboo_ds.topology import Role
from bamboo_ds.worker import plan_changes

from ..simulated_deepspeed import Stage
from ..simulated_engine import Cut, Member, Spec, World, state_of
from . import data, grammar, layers, optimizers
from .attributes import made
from .between import Between
from .judge import DIFFERS, INVALID, REFUSED, RESTARTS, TRAINS, Verdict, known
from .script import Script

#: What scripts do that the model has no part for.
LAYERS = frozenset(layers.KINDS) - frozenset(layers.RANDOM) - {"global", "of-class", "warm"}
OPTIMIZERS = frozenset(optimizers.KINDS) - frozenset(optimizers.RANDOM) - {"of-config", "function", "of-class"}
DATA = frozenset(("iterator", "refilled", "overwritten", "views", "object"))
BATCH_FNS = frozenset(("none", "plain", "noise", "count", "in-place"))
ACTIONS = frozenset(
    [
        "lr",
        "lr-inner",
        "decay",
        "momentum",
        "clamp",
        "reload-optimizer",
        "reload-model",
        "copy",
        "zero-grad",
        "attribute",
        "anneal-layers",
        "clamp-data",
        "new-data",
        "freeze",
        "unfreeze",
    ]
)


def simulable(script: Script) -> Script:
    """The part of a script that the model can run."""
    evaluates = tuple(each for each in script.actions if "evaluate" in each.what)
    return replace(
        script,
        steps=5,
        layers=tuple(each if each in LAYERS else "plain" for each in script.layers),
        model=tuple(each for each in script.model if each == "tied"),
        optimizer=script.optimizer if script.optimizer in OPTIMIZERS else "sgd",
        scheduler="none",
        loss="mse",
        data=script.data if script.data in DATA else "iterator",
        batch_fn=script.batch_fn if script.batch_fn in BATCH_FNS else "none",
        attributes=tuple(
            each
            for each in script.attributes
            if each.on in ("parameter", "buffer", "layer") and each.early and each.name != "tensor_model_parallel"
        ),
        actions=tuple(
            [*evaluates[:1], *(replace(each, at=min(each.at, 3)) for each in script.actions if each.what in ACTIONS)]
        ),
        config=tuple(each for each in script.config if each in ("lazy", "eager", "sums", "clipped")),
        process=(),
    )


class DrawnStage(Stage):
    """One stage of a script."""

    def __init__(self, script: Script, stage: int, seed: int) -> None:
        nn.Module.__init__(self)
        kinds = stages_of(script)
        with torch.random.fork_rng():
            torch.manual_seed(seed + stage)
            self.forward_funcs = [made(kind, script.attributes) for kind in kinds[stage]]
            for number, layer in enumerate(self.forward_funcs):
                self.add_module(str(number), layer)
            self.tied_modules = nn.ModuleDict()
            if "tied" in script.model and stage in (0, script.stages - 1):
                torch.manual_seed(seed)
                self.tied_modules["ends"] = nn.Linear(layers.WIDTH, layers.WIDTH)
                self.forward_funcs.append(self.tied_modules["ends"])
        self.tied_comms: dict[str, Any] = {}
        self._local_start, self._layer_specs = sum(map(len, kinds[:stage])), [None] * (sum(map(len, kinds)) + 2)


def hides(script: Script) -> bool:
    """Whether copies of a stage lack something that a script keeps, so that the check of the first steps refuses it."""
    hidden = (*grammar.OTHER_LAYERS, *grammar.OTHER_OPTIMIZERS, *grammar.OTHER_LOSSES)
    return bool({*script.layers, script.optimizer, script.loss}.intersection(hidden))


def stages_of(script: Script) -> list[list[str]]:
    """The kinds of the layers of each stage."""
    size, left = divmod(len(script.layers), script.stages)
    rest, found = list(script.layers), []
    for stage in range(script.stages):
        count = size + (stage < left)
        found.append(rest[:count])
        rest = rest[count:]
    return found


def limit_of(script: Script) -> float:
    """To which norm gradients are clipped; without clipping one that none has."""
    return 0.1 if "clipped" in script.config else 1e30


def _processed(script: Script) -> Any:
    generator, count = torch.Generator().manual_seed(5), [0]

    def process(batch: Any) -> Any:
        inputs, labels = batch
        if script.batch_fn == "noise":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=generator)
        elif script.batch_fn == "count":
            count[0] += 1
            inputs = inputs * (1 + 0.01 * count[0])
        elif script.batch_fn == "in-place":
            inputs.mul_(0.5)
        return inputs, labels

    return process


def _changes(engine: Any, script: Script, step: int) -> None:
    if step == script.steps:
        return  # nothing comes that takes it to replicas
    between = Between(SimpleNamespace(rank=1, say=lambda *_: None), engine, None, None)  # type: ignore[arg-type]
    for action in script.actions:
        if action.what in ACTIONS and action.due(step):
            between.do(action.what, step)


# -- the model ------------------------------------------------------------------------------------------------
class DrawnMember(Member):
    """A member that runs a drawn script."""

    world: DrawnWorld

    def __init__(self, world: DrawnWorld, *more: Any, **named: Any) -> None:
        self._run_batch_fn = _processed(world.script)
        super().__init__(world, *more, **named)
        self.ds.engine.__dict__["gradient_clipping"] = lambda: limit_of(world.script)

    def stage(self, role: Role, seed: int) -> Any:
        return DrawnStage(self.world.script, role.stage, seed)

    def optimizer(self, module: Any, mine: list[nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optimizers.KINDS[self.world.script.optimizer](module)
        if not hasattr(self, "binding"):
            self.pristine = PristineOptimizer(made)
            return made
        names = {parameter: name for name, parameter in module.named_parameters()}
        groups = [[names[parameter] for parameter in group["params"]] for group in made.param_groups]
        return self.pristine.clone(module, groups)

    def _iterator(self, role: Role, seed: int, drawn: list[int]) -> Any:
        for batch in data.ITERATORS[self.world.script.data](seed + role.pipeline):
            self.happens("a draw")
            drawn[0] += 1
            yield batch

    def _process(self, batch: Any) -> Any:
        self.happens("batch_fn")
        return self._run_batch_fn(batch)

    def happens(self, what: str) -> None:
        """The script's own code runs; others go on meanwhile, and it may be lost."""
        self.look(what)
        if self.started:
            self.world.before(self.name, what)

    def _change(self, iteration: int) -> None:
        _changes(self.ds.engine, self.world.script, iteration + 1)


@dataclass(eq=False)
class DrawnWorld(World):
    """A job of a drawn script."""

    kind: ClassVar[type[Member]] = DrawnMember
    script: Script = field(default_factory=Script)

    @classmethod
    def of(cls, script: Script, seed: int, cuts: tuple[Cut, ...] = ()) -> DrawnWorld:
        """A job of ``script``; everything else is drawn from ``seed``."""
        mode = {"lazy": "lazy-frc-lazy-brc", "eager": "eager-frc-eager-brc"}
        spec = Spec(
            pipelines=script.pipelines,
            stages=script.stages,
            micro_batches=script.micro_batches,
            iterations=script.steps,
            mode=next((mode[each] for each in script.config if each in mode), "eager-frc-lazy-brc"),
            sync_every=int("sums" in script.config),
            tied="tied" in script.model,
            evaluates=any("evaluate" in each.what for each in script.actions),
            heals=len(cuts) > 1,
            checked=3,
        )
        return cls(spec, seed, cuts, script=script)


# -- the oracle -----------------------------------------------------------------------------------------------
@dataclass
class _Plain:
    """One stage of one pipeline, with its optimizer."""

    module: Any
    optimizer: Any

    @property
    def engine(self) -> Any:
        """What scripts see of it."""
        return SimpleNamespace(module=self.module, optimizer=self.optimizer)


def plain(script: Script) -> tuple[list[float], dict[Role, dict[str, torch.Tensor]]]:
    """The losses and the state at the end of the script as a loop in plain torch."""
    lines = [[_plain_stage(script, stage) for stage in range(script.stages)] for pipeline in range(script.pipelines)]
    sources = [data.ITERATORS[script.data](100 + pipeline) for pipeline in range(script.pipelines)]
    held_out = [data.ITERATORS[script.data](200 + pipeline) for pipeline in range(script.pipelines)]
    process, losses = [_processed(script) for _ in lines], []
    evaluates = any("evaluate" in each.what for each in script.actions)

    def pass_through(number: int, batch: Any, training: bool) -> torch.Tensor:
        inputs, labels = process[number](batch)
        for stage in lines[number]:
            stage.module.train(training)
            inputs = stage.module(inputs)
        return nn.functional.mse_loss(inputs, labels)

    def evaluate() -> None:
        means = []
        for number in range(script.pipelines):
            with torch.no_grad():
                found = [pass_through(number, next(held_out[number]), False) for _ in range(script.micro_batches)]
            means.append(float(torch.stack(found).sum() / script.micro_batches))
        losses.append(_mean(means))

    for step in range(script.steps):
        if evaluates:
            evaluate()
        means = []
        for number in range(script.pipelines):
            total: Any = None
            for _ in range(script.micro_batches):
                loss = pass_through(number, next(sources[number]), True)
                (loss / script.micro_batches).backward()
                total = loss.detach().clone() if total is None else total + loss.detach()
            means.append(float(total / script.micro_batches))
        losses.append(_mean(means))
        if "tied" in script.model:
            for line in lines:
                first, last = (line[at].module.tied_modules["ends"].weight for at in (0, -1))
                total = first.grad + last.grad
                first.grad, last.grad = total.clone(), total.clone()
        for stage in range(script.stages):
            _reduce([line[stage].module for line in lines])
        for line in lines:
            _clip(line, limit_of(script), script.pipelines)
            for each in line:
                each.optimizer.step()
                each.module.zero_grad(set_to_none=True)
                each.module.train()
                _changes(each.engine, script, step + 1)
    if evaluates:
        evaluate()
    return losses, {
        Role(pipeline, stage): {
            **{f"parameter {name}": bare(parameter) for name, parameter in each.module.named_parameters()},
            **{f"buffer {name}": buffer for name, buffer in each.module.named_buffers()},
        }
        for pipeline, line in enumerate(lines)
        for stage, each in enumerate(line)
    }


def _mean(values: list[float]) -> float:
    total = torch.zeros(())
    for value in values:
        total = total + torch.tensor(value)
    return float(total / len(values))


def _plain_stage(script: Script, stage: int) -> _Plain:
    module = DrawnStage(script, stage, 50)
    return _Plain(module, optimizers.KINDS[script.optimizer](module))


def _reduce(copies: list[Any]) -> None:
    """The mean over pipelines."""
    for parameters in zip(*(module.parameters() for module in copies), strict=True):
        if not parameters[0].requires_grad:
            continue
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if len(copies) > 1:
            total = parameters[0].grad + parameters[1].grad
            for parameter in parameters:
                parameter.grad = total * (1.0 / len(copies))


def _clip(line: list[_Plain], limit: float, pipelines: int) -> None:
    """As DeepSpeed, which counts the first stage's gradients where there are no tensor slices."""
    found = [parameter.grad.norm(2) for parameter in line[0].module.parameters() if parameter.grad is not None]
    norm = torch.stack(found).pow(2).sum().pow(0.5) * 1.0 / float(pipelines)
    norm = sum([norm] * (pipelines - 1), norm)
    factor = torch.clamp(torch.tensor([limit]) / (norm + 1e-6), max=1.0)
    for each in line:
        for parameter in each.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


# -- judging --------------------------------------------------------------------------------------------------
def judge(script: Script, cuts: int = 2) -> list[Verdict]:
    """The verdicts of an undisturbed job of a script, and of jobs with losses at ``cuts`` drawn places."""
    random = Random(script.seed)
    try:
        wanted = plain(script)
    except Exception as error:
        return [Verdict(INVALID, f"{type(error).__name__}: {error}")]
    seed = random.randrange(1000)
    calm = _run(script, seed, ())
    found = [_judged(script, calm, wanted, 0)]
    if not isinstance(calm, World) or found[0].outcome != TRAINS:
        return found
    for _ in range(cuts):
        victim, other = random.sample(sorted(calm.done), 2)
        first = 3 if hides(script) else 0  # it has too few steps for a check that begins again
        places = [event for event, (steps, _) in enumerate(calm.done[victim]) if steps >= first]
        if places:
            chosen = [Cut(victim, random.choice(places))]
            if script.world > 2 and random.random() < 0.4:
                chosen.append(Cut(other, random.randrange(30), _whole))
            world = _run(script, seed, tuple(chosen))
            found.append(_judged(script, world, wanted, len(world.killed) if isinstance(world, World) else 1))
    return found


def _whole(world: World) -> bool:
    """Every stage has a replica again."""
    return all(world.plan.shadows) and not world.network.dead.intersection(world.plan.members)


def _run(script: Script, seed: int, cuts: tuple[Cut, ...]) -> World | Exception:
    try:
        return DrawnWorld.of(script, seed, cuts).run()
    except Exception as error:
        return error


def _judged(script: Script, world: World | Exception, wanted: Any, kills: int) -> Verdict:
    if isinstance(world, Exception):
        told = isinstance(world, BambooError) and not kills
        return Verdict(REFUSED if told else DIFFERS, f"{type(world).__name__}: {world}"[:600], kills)
    fatal = [member.fatal for member in world.survivors() if member.fatal]
    if fatal:
        if world.killed and all(isinstance(each, FatalLoss) for each in fatal):
            return Verdict(RESTARTS, str(fatal[0])[:600], kills)
        told = not world.killed
        return Verdict(REFUSED if told else DIFFERS, f"{type(fatal[0]).__name__}: {fatal[0]}"[:600], kills)
    losses, states = wanted
    for member in world.survivors():
        if member.losses != losses[-len(member.losses) :] or (not member.losses and not member.left):
            at = next((n for n, (a, b) in enumerate(zip(member.losses, losses, strict=False)) if a != b), -1)
            return Verdict(DIFFERS, f"losses of {member.name} from {at} on: {member.losses}, not {losses}", kills)
        if member.strange:
            return Verdict(DIFFERS, f"the script's code finds another role: {member.strange[0]}", kills)
    try:
        found = state_of(world)
    except AssertionError as error:
        return Verdict(DIFFERS, str(error), kills)
    for role, state in states.items():
        for name, tensor in state.items():
            mine = found[role].get(name)
            if mine is not None and not torch.equal(mine, tensor):
                return Verdict(DIFFERS, f"{name} of {role}", kills)
    return Verdict(TRAINS, "", kills)


@contextmanager
def simulation() -> Iterator[None]:
    """In the body members of jobs are threads of this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    groups = SimpleNamespace(all_reduce=lambda tensor, group: group.all_reduce(tensor))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    with ExitStack() as patches:
        for module, name, value in (
            (replay, "time", clock),
            (reduction, "dist", groups),
            (shares, "dist", groups),
            (plan_changes, "_listeners", []),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield
    torch.set_num_threads(threads)


def main() -> None:
    """The scripts of seeds FIRST-LAST, with so many losses each: ``FIRST-LAST [LOSSES]``."""
    first, last = (int(each) for each in sys.argv[1].split("-"))
    cuts = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    logging.disable()
    counts: Counter[str] = Counter()
    with simulation():
        for seed in range(first, last + 1):
            script = simulable(grammar.draw(seed))
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                found = judge(script, cuts)
            for verdict in found:
                met = known(script, verdict) if verdict.outcome == DIFFERS else ""
                counts[f"{verdict.outcome} {met}".strip()] += 1
                counts["losses"] += verdict.kills
                if verdict.outcome in (DIFFERS, INVALID) and not met:
                    print(f"{seed}: {verdict.outcome} {verdict.why[:300]}\n    {script.text()}", flush=True)
    print(f"{last + 1 - first} scripts: {dict(counts)}")


if __name__ == "__main__":
    main()
