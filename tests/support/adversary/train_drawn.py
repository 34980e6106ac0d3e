"""Carries out a drawn script: with stock DeepSpeed, or with the package.

train_drawn.py --deepspeed_config FILE --out FOLDER --script FILE

What must equal stock's is in files ``said-PID`` below FOLDER: lines ``KEY = VALUE``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import deepspeed
import numpy
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import distributed as dist
from torch import nn

from tests.support.adversary import data, layers, optimizers
from tests.support.adversary.attributes import made, nothing, put
from tests.support.adversary.between import Between, hexed, say_weights
from tests.support.adversary.losses import LOSSES
from tests.support.adversary.process import PROCESS
from tests.support.adversary.running import Run
from tests.support.adversary.script import Attribute, Script, parsed

#: Seconds between the steps of a job that is to heal.
PACE_S = 0.03


class Drawn(nn.Sequential):
    """Puts attributes on what is made."""

    def __init__(self, kind: str, attributes: tuple[Attribute, ...]) -> None:
        super().__init__(made(kind, attributes))


class End(nn.Linear):
    """Both ends of the pipeline have it."""

    def __init__(self) -> None:
        super().__init__(layers.WIDTH, layers.WIDTH)


def model_of(script: Script) -> PipelineModule:
    """The module of a script."""
    early = tuple(each for each in script.attributes if each.early)
    parts: list[Any] = [LayerSpec(Drawn, kind, early) for kind in script.layers]
    if "instances" in script.model:
        parts = [made(kind, early) for kind in script.layers]
    if "functions" in script.model:
        parts[1:1] = [lambda x: x * 1.01]
        parts.append(torch.tanh)
    if "tied" in script.model:
        parts = [TiedLayerSpec("ends", End), *parts, TiedLayerSpec("ends", End)]
    settings: dict[str, Any] = {"loss_fn": LOSSES[script.loss]()}
    if "checkpointed" in script.model:
        settings["activation_checkpoint_interval"] = 1
    if "uniform" in script.model:
        settings["partition_method"] = "uniform"
    if "seeded" in script.model:
        settings.update(seed_layers=True, seed_fn=torch.manual_seed)
    return PipelineModule(parts, num_stages=script.stages, **settings)


def _batch_fn(script: Script, run: Run) -> Any:
    generator, count = torch.Generator().manual_seed(5), [0]
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if script.batch_fn == "collective" else []

    def process(batch: Any) -> Any:
        layers.happens("batch_fn")
        if script.batch_fn == "dictionary":
            return batch["inputs"], batch["labels"]
        inputs, labels = batch
        if script.batch_fn == "noise":
            inputs = inputs + 0.1 * torch.randn(inputs.shape, generator=generator)
        elif script.batch_fn == "global-noise":
            inputs = inputs + 0.1 * torch.randn(inputs.shape)
        elif script.batch_fn == "count":
            count[0] += 1
            inputs = inputs * (1 + 0.01 * count[0])
        elif script.batch_fn == "in-place":
            inputs.mul_(0.5)
        elif script.batch_fn == "collective":
            dist.broadcast(inputs, run.rank, group=own[run.rank])
        return inputs, labels

    return process


def train(run: Run, script: Script, arguments: argparse.Namespace) -> None:
    """The whole of it."""
    for each in script.process:
        PROCESS[each]()
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    net = model_of(script)
    for attribute in script.attributes:
        if not attribute.early:
            targets: dict[str, list[Any]] = {
                "parameter": list(net.parameters()),
                "layer": [each for each in net.forward_funcs if isinstance(each, nn.Module)],
                "buffer": list(net.buffers()),
                "model": [net],
            }
            for target in targets.get(attribute.on, []):
                put(target, attribute)
    given: dict[str, Any] = {"model": net, "model_parameters": [p for p in net.parameters() if p.requires_grad]}
    kind = optimizers.KINDS[script.optimizer]
    if kind == "function":
        given["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=optimizers.LR)
    elif kind is not None:
        given["optimizer"] = kind(net)
    optimizer = given.get("optimizer")
    if optimizer is not None and script.scheduler in optimizers.SCHEDULERS and kind != "function":
        made = optimizers.SCHEDULERS[script.scheduler]
        given["lr_scheduler"] = made if "scheduler-function" in script.model else made(optimizer)
    for attribute in script.attributes:
        if attribute.on == "optimizer" and isinstance(optimizer, torch.optim.Optimizer):
            put(optimizer, attribute)
        if attribute.on == "scheduler" and not callable(given.get("lr_scheduler", nothing)):
            put(given["lr_scheduler"], attribute)
    if script.data in data.DATASETS:
        given["training_data"] = data.DATASETS[script.data](1)
        for attribute in script.attributes:
            if attribute.on == "data":
                put(given["training_data"], attribute)
    engine = deepspeed.initialize(args=arguments, **given)[0]
    run.engine = engine
    if script.batch_fn != "none":
        engine.set_batch_fn(_batch_fn(script, run))
    pipeline = engine.grid.get_data_parallel_rank()
    source = data.ITERATORS[script.data](10 + pipeline) if script.data in data.ITERATORS else None
    if script.batch_fn == "dictionary":
        source = map(_as_dictionary, source)
    between = Between(run, engine, optimizer, source)
    _do(script, between, 0)
    for step in range(script.steps):
        run.begin(step)
        if source is None:
            loss = engine.train_batch()
        elif script.data == "listed":
            loss = engine.train_batch(iter([next(source) for _ in range(engine.micro_batches)]))
        elif script.data == "per-step":
            loss = engine.train_batch(data.batches(100 * step + pipeline))
        else:
            loss = engine.train_batch(source)
        run.say(f"loss of step {step}", hexed(loss))
        layers.happens("between")
        _do(script, between, step + 1)
        if run.pending():
            time.sleep(PACE_S)
    say_weights(run, engine, " at the end")


def _as_dictionary(batch: Any) -> dict[str, Any]:
    return dict(zip(("inputs", "labels"), batch, strict=True))


def _do(script: Script, between: Between, step: int) -> None:
    for action in script.actions:
        if action.due(step):
            between.do(action.what, step)


def main() -> None:
    """One script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--script", type=Path, required=True)
    arguments = parser.parse_args()
    script = parsed(arguments.script.read_text())
    train(Run(script, arguments.out), script, arguments)


if __name__ == "__main__":
    main()
