"""The grammar: one script for each seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from .script import Action, Attribute, Kill, Script

_Item = TypeVar("_Item")

#: Names that people give to attributes of tensors, layers, optimizers and schedulers: those of torch's methods among
#: them, as far as stock DeepSpeed itself does not call them.
NAMES = {
    "parameter": "stride storage_offset is_contiguous untyped_storage data_ptr size dim numel element_size clone "
    "detach copy_ cpu float view reshape sum item step state tensor_model_parallel ds_id kind count index add_ mul_ to "
    "is_floating_point nelement contiguous view_as register_hook reshape_as unsqueeze type half zero_ expand flatten",
    "buffer": "stride storage_offset is_contiguous data_ptr size clone copy_ step state kind view reshape numel",
    "layer": "stride step state device dtype shape index stage_id role name kind count owned runtime layers parts "
    "data_ptr numel size module is_contiguous children_count copies group parameters_count forward_funcs key",
    "optimizer": "name kind count device role layers wrapper groups clear kept steps optimizer module stage lr "
    "step_count runtime shard size stride owned clock",
    "scheduler": "name kind count role groups module stage size optimizer_name steps history",
    "model": "name kind role device dtype stride step state size owned runtime count layers shard",
    "data": "name seed sampler batch_size kind size shuffle state index",
}
#: What copies of a stage follow, and what they do not, so that jobs are refused.
LAYERS = [
    "counted",
    "running",
    "running-hidden",
    "replaced-buffer",
    "tensors",
    "tabled",
    "counters",
    "numpied",
    "arrayed",
    "flagged",
    "tupled",
    "late",
    "lazy",
    "private",
    "inner",
    "extra-state",
    "falsy",
    "equal",
    "delegating",
    "strict",
    "copied",
    "hooked",
    "unused",
    "sometimes",
    "by-mode",
    "frozen",
    "strange",
    "aliased",
    "shared",
    "normed",
    "weighted",
    "batched",
    "recomputed",
    "own-backward",
    "dict",
    "recurrent",
    "warm",
    "annealed",
    "dropped",
    "drawing",
    "chancy",
]
OTHER_LAYERS = [
    "listed",
    "short",
    "metered",
    "array-inside",
    "texted",
    "enumerated",
    "set",
    "complexed",
    "fractioned",
    "of-class",
    "global",
    "settings",
    "queued",
    "written",
    "written-openly",
    "on-parameter",
]
OPTIMIZERS = [
    "nesterov",
    "adam",
    "amsgrad",
    "foreach",
    "fused",
    "capturable-lr",
    "adamw-groups",
    "named",
    "rmsprop",
    "adagrad",
    "adadelta",
    "nadam",
    "radam",
    "adamax",
    "asgd",
    "rprop",
    "adafactor",
    "of-config",
    "function",
    "subclass",
    "own",
    "in-state",
    "deep-state",
    "list-state",
    "numpy-state",
    "in-group",
    "tensor-in-group",
    "counted",
    "state-count",
    "tensor-count",
    "norms",
    "lookahead",
    "assigned",
    "noisy",
]
OTHER_OPTIMIZERS = [
    "deque-state",
    "by-id",
    "by-parameter",
    "by-place",
    "on-parameter",
    "number-on-parameter",
    "metered",
    "of-class",
    "norm-deque",
    "defaultdict",
    "wrapper",
]
#: Whose steps are the script's own code.
OWN_OPTIMIZERS = frozenset(OPTIMIZERS[OPTIMIZERS.index("subclass") :])
SCHEDULERS = [
    "step",
    "lambda",
    "lambdas",
    "cosine",
    "restarts",
    "one-cycle",
    "cyclic",
    "sequential",
    "chained",
    "multiplicative",
    "polynomial",
    "samples",
    "listed",
    "stateless",
]
LOSSES = ["module", "huber", "measured", "kept", "warm"]
OTHER_LOSSES = ["object", "method", "closure", "function-attribute"]
DATA = [
    "refilled",
    "overwritten",
    "global",
    "numpy",
    "threaded",
    "apart",
    "views",
    "object",
    "loader",
    "working-loader",
    "stream",
    "listed",
    "per-step",
    "dataset",
    "augmented",
]
BATCH_FNS = ["plain", "noise", "global-noise", "count", "in-place", "dictionary", "collective"]
ACTIONS = [
    "evaluate",
    "evaluate",
    "evaluate-logits",
    "evaluate-inference",
    "evaluate-no-grad",
    "evaluate-few",
    "evaluate-training",
    "lr",
    "lr-inner",
    "decay",
    "momentum",
    "clamp",
    "clamp-data",
    "new-data",
    "ema",
    "freeze",
    "unfreeze",
    "anneal",
    "anneal-layers",
    "loss",
    "grad-norm",
    "lr-said",
    "counters",
    "reload-optimizer",
    "reload-model",
    "copy",
    "zero-grad",
    "float",
    "seed",
    "numbers",
    "collect",
    "attribute",
    "engine-attribute",
    "optimizer-attribute",
    "batch-size",
    "save",
    "save-untagged",
    "load",
    "all-reduce",
    "all-reduce-async",
    "own-group",
    "new-group",
    "pair-group",
    "barrier",
    "gather-objects",
    "all-gather",
    "broadcast",
    "state-said",
    "optimizer-modes",
    "grad-off",
]
PROCESS = [
    "warnings",
    "socket-timeout",
    "tee",
    "no-gc",
    "logging",
    "root-logger",
    "children",
    "terminate",
    "recursion",
    "anomaly",
    "deterministic",
    "device",
    "numpy-errors",
    "umask",
    "excepthook",
    "folder",
    "print-options",
    "switch-interval",
    "trace",
    "tensor-print",
]
CONFIG = ["lazy", "eager", "sums", "sums", "clipped", "zero", "scheduler", "own-checkpoints", "verified", "bf16"]
MODEL = ["tied", "functions", "checkpointed", "uniform", "instances", "seeded", "scheduler-function"]
_VALUES = ["one", "one", "none", "true", "text", "tensor", "list", "function"]


def draw(seed: int) -> Script:
    """The script of a seed."""
    random = Random(seed)
    stages = random.choice((2, 3, 3, 4))
    pipelines = random.choice((1, 1, 1, 2)) if stages < 4 else 1
    size = stages + random.choice((0, 0, 1, 2))
    layers = tuple(_one(random, LAYERS, OTHER_LAYERS) if random.random() < 0.35 else "plain" for _ in range(size))
    script = Script(
        seed=seed,
        stages=stages,
        pipelines=pipelines,
        micro_batches=random.choice((1, 2, 3, 4)),
        layers=layers,
        model=_some(random, MODEL, 0.3),
        optimizer=_one(random, OPTIMIZERS, OTHER_OPTIMIZERS) if random.random() < 0.7 else "sgd",
        scheduler=random.choice(SCHEDULERS) if random.random() < 0.25 else "none",
        loss=_one(random, LOSSES, OTHER_LOSSES) if random.random() < 0.25 else "mse",
        data=random.choice(DATA) if random.random() < 0.5 else "iterator",
        batch_fn=random.choice(BATCH_FNS) if random.random() < 0.25 else "none",
        attributes=_attributes(random),
        actions=_actions(random),
        config=_some(random, CONFIG, 0.5),
        process=_some(random, PROCESS, 0.35),
    )
    if script.loss in ("module", "huber") or {"normed", "weighted", "recurrent"}.intersection(script.layers):
        script = replace(script, config=tuple(each for each in script.config if each != "bf16"))  # stock fails
    kills = _kills(random, script)
    return replace(script, kills=kills, steps=40 if any(kill.healed for kill in kills) else 8)


def _one(random: Random, usual: Sequence[str], others: Sequence[str]) -> str:
    return random.choice(usual if random.random() < 0.9 else others)


def _some(random: Random, items: Sequence[str], chance: float) -> tuple[str, ...]:
    found: list[str] = []
    while random.random() < chance:
        found.append(random.choice(items))
    return tuple(dict.fromkeys(found))


def _attributes(random: Random) -> tuple[Attribute, ...]:
    found = []
    while random.random() < 0.45:
        on = random.choice(("parameter", "parameter", *NAMES))
        early = on in ("parameter", "buffer", "layer") and random.random() < 0.7
        found.append(Attribute(on, random.choice(NAMES[on].split()), random.choice(_VALUES), early))
    return tuple(found)


def _actions(random: Random) -> tuple[Action, ...]:
    found = []
    while random.random() < 0.7:
        found.append(Action(random.choice(ACTIONS), random.choice((0, 1, 2, 3, 5)), random.choice((0, 0, 1, 2, 3))))
    return tuple(found)


def _kills(random: Random, script: Script) -> tuple[Kill, ...]:
    if random.random() < 0.1:
        return ()
    kills = []
    ranks = random.sample(range(script.world), 2)
    for number in range(2 if script.world > 2 and random.random() < 0.4 else 1):
        others = [rank for rank in range(script.world) if rank not in ranks[: number + 1]]
        by = random.choice(others) if others and random.random() < 0.35 else None
        place = random.choice(_places(script, ranks[number] if by is None else by))
        count = random.choice((1, 5, 20, 50)) if place == "timer" else 0
        if place in ("draw", "forward", "loss", "batch_fn"):
            count = random.randrange(script.micro_batches)
        step = random.choice((2, 3, 4, 5))
        if place == "evaluation":
            step = next((a.at - 1 for a in script.actions if "evaluate" in a.what and a.at > 1), step)
        kills.append(Kill(ranks[number], step, place, count, None if place == "timer" else by, number > 0))
    return tuple(kills)


def _places(script: Script, rank: int) -> list[str]:
    """Where code of the script runs on a rank."""
    found = ["forward", "forward", "between", "timer"]
    stage = rank // script.pipelines
    if stage in (0, script.stages - 1):
        found += ["draw", "draw"] + ["batch_fn", "batch_fn"] * (script.batch_fn != "none")
        found += ["evaluation", "evaluation"] * any("evaluate" in action.what for action in script.actions)
    if stage == script.stages - 1 and script.loss not in ("module", "huber"):
        found += ["loss", "loss"]
    if script.optimizer in OWN_OPTIMIZERS:
        found += ["optimizer", "optimizer"]
    return found
