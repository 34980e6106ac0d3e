"""What scripts do between two calls of the engine, and what they say."""

from __future__ import annotations

import copy
import gc
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import distributed as dist
from torch import nn

from tests.support.adversary import data, layers
from tests.support.adversary.losses import LOSSES


class Between:
    """What a script does between two calls."""

    def __init__(self, run: Any, engine: Any, optimizer: Any, train: Any) -> None:
        self.run, self.engine, self.optimizer, self.train = run, engine, optimizer, train
        self.average: dict[str, torch.Tensor] = {}
        self.group: Any = None
        self.held_out = data.batches(77)
        self.step = 0

    def do(self, what: str, step: int) -> None:
        self.step = step
        getattr(self, "do_" + what.replace("-", "_"))()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.engine.module.parameters())

    @property
    def inner(self) -> Any:
        return getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)

    def evaluate(self, name: str, **settings: Any) -> None:
        def watched() -> Iterator[Any]:
            for batch in self.held_out:
                layers.happens("evaluation")
                yield batch

        found = self.engine.eval_batch(watched(), **settings)
        loss, outputs = found if isinstance(found, tuple) else (found, None)
        if loss is not None:
            self.run.say(f"{name} after step {self.step}", hexed(loss))
        if outputs is not None and self.engine.is_last_stage():
            self.run.say(f"outputs after step {self.step}", _digest([("outputs", outputs)]))

    def do_evaluate(self) -> None:
        self.evaluate("evaluation")

    def do_evaluate_logits(self) -> None:
        self.evaluate("evaluation", return_logits=True)

    def do_evaluate_inference(self) -> None:
        with torch.inference_mode():
            self.evaluate("evaluation")

    def do_evaluate_no_grad(self) -> None:
        with torch.no_grad():
            self.evaluate("evaluation")

    def do_evaluate_few(self) -> None:
        self.evaluate("evaluation", num_micro_batches=1)

    def do_evaluate_training(self) -> None:
        self.engine.eval()
        self.evaluate("evaluation")
        self.engine.train()

    def do_lr(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] *= 0.9

    def do_lr_inner(self) -> None:
        for group in self.inner.param_groups:
            group["lr"] = group["lr"] * 0.9

    def do_decay(self) -> None:
        for group in self.engine.optimizer.param_groups:
            group["weight_decay"] = 0.02
            group["script"] = {"step": self.step}

    def do_momentum(self) -> None:
        for group in self.engine.optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = 0.8
            if "betas" in group:
                group["betas"] = (0.8, 0.99)

    def do_clamp(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.clamp_(-0.3, 0.3)

    def do_clamp_data(self) -> None:
        for parameter in self.parameters:
            parameter.data.clamp_(-0.3, 0.3)

    def do_new_data(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()

    def do_ema(self) -> None:
        named = dict(self.engine.module.named_parameters())
        with torch.no_grad():
            for name, parameter in named.items():
                self.average.setdefault(name, torch.zeros_like(parameter)).lerp_(parameter, 0.5)
            kept = {name: parameter.detach().clone() for name, parameter in named.items()}
            for name, parameter in named.items():
                parameter.copy_(self.average[name])
            self.evaluate("averaged")
            for name, parameter in named.items():
                parameter.copy_(kept[name])

    def do_freeze(self) -> None:
        for name, parameter in self.engine.module.named_parameters():
            parameter.requires_grad_("bias" not in name)

    def do_unfreeze(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(True)

    def do_anneal(self) -> None:
        layers.GLOBALS["temperature"] *= 0.9

    def do_anneal_layers(self) -> None:
        for module in self.engine.module.modules():
            if hasattr(module, "temperature"):
                module.temperature = 0.9**self.step

    def do_loss(self) -> None:
        self.engine.module.loss_fn = LOSSES["huber"]()

    def do_grad_norm(self) -> None:
        self.run.say(f"norm after step {self.step}", hexed(self.engine.get_global_grad_norm() or 0.0))

    def do_lr_said(self) -> None:
        self.run.say(f"lr after step {self.step}", [hexed(lr) for lr in self.engine.get_lr()])

    def do_counters(self) -> None:
        engine = self.engine
        self.run.say(
            f"counters after step {self.step}", [engine.global_steps, engine.global_samples, engine.micro_steps]
        )

    def do_reload_optimizer(self) -> None:
        self.inner.load_state_dict(copy.deepcopy(self.inner.state_dict()))

    def do_reload_model(self) -> None:
        module = self.engine.module
        module.load_state_dict(copy.deepcopy(module.state_dict()))

    def do_copy(self) -> None:
        copy.deepcopy(self.inner.state_dict())
        [copy.deepcopy(layer) for layer in self.engine.module.forward_funcs if isinstance(layer, nn.Module)]

    def do_zero_grad(self) -> None:
        self.engine.optimizer.zero_grad()
        self.engine.module.zero_grad()

    def do_float(self) -> None:
        self.engine.module.float().to("cpu").train()

    def do_seed(self) -> None:
        torch.manual_seed(self.step)
        random.seed(self.step)
        numpy.random.seed(self.step)

    def do_numbers(self) -> None:
        drawn = [torch.rand(()).item(), random.random(), float(numpy.random.rand())]
        if self.run.rank == 0:
            self.run.say(f"numbers after step {self.step}", [each.hex() for each in drawn])

    def do_collect(self) -> None:
        gc.collect()

    def do_attribute(self) -> None:
        for parameter in self.parameters:
            parameter.step = self.step  # type: ignore[attr-defined]

    def do_engine_attribute(self) -> None:
        self.engine.script_value = {"step": self.step}
        self.engine.module.script_value = self.step

    def do_optimizer_attribute(self) -> None:
        self.engine.optimizer.script_value = self.step

    def do_batch_size(self) -> None:
        self.engine.set_train_batch_size(self.engine.train_batch_size() + self._batch())

    def _batch(self) -> int:
        return int(self.engine.train_micro_batch_size_per_gpu() * self.engine.dp_world_size)

    def do_save(self) -> None:
        self.engine.save_checkpoint(str(self.run.out / "saved"), tag=f"step{self.step}")

    def do_save_untagged(self) -> None:
        self.engine.save_checkpoint(str(self.run.out / "saved"), client_state={"step": self.step})

    def do_load(self) -> None:
        folder = str(self.run.out / "reloaded")
        self.engine.save_checkpoint(folder, tag="now")
        self.engine.load_checkpoint(folder, tag="now")

    def do_all_reduce(self) -> None:
        total = torch.tensor([1.0, float(self.step)])
        dist.all_reduce(total)
        self.run.say(f"sum after step {self.step}", total.tolist())

    def do_all_reduce_async(self) -> None:
        total = torch.tensor([1.0, float(self.step)])
        dist.all_reduce(total, op=dist.ReduceOp.MAX, async_op=True).wait()
        self.run.say(f"maximum after step {self.step}", total.tolist())

    def do_own_group(self) -> None:
        if self.group is None:
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            self.group = groups[dist.get_rank()]
        total = torch.tensor([float(self.step)])
        dist.all_reduce(total, group=self.group)
        self.run.say(f"own sum after step {self.step}", total.tolist())

    def do_new_group(self) -> None:
        group = dist.new_group(list(range(dist.get_world_size())))
        objects = [self.step]
        dist.broadcast_object_list(objects, 0, group=group)
        self.run.say(f"objects after step {self.step}", objects)

    def do_pair_group(self) -> None:
        group = dist.new_group([0, dist.get_world_size() - 1])
        if dist.get_rank() in (0, dist.get_world_size() - 1):
            total = torch.ones(2)
            dist.all_reduce(total, group=group)
            self.run.say(f"pair after step {self.step}", total.tolist())

    def do_barrier(self) -> None:
        dist.barrier()

    def do_gather_objects(self) -> None:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {"step": self.step})
        self.run.say(f"gathered after step {self.step}", found)

    def do_all_gather(self) -> None:
        found = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(found, torch.full((2,), float(self.step)))
        self.run.say(f"gathered tensors after step {self.step}", torch.cat(found).tolist())

    def do_broadcast(self) -> None:
        tensor = torch.tensor([float(self.step)])
        dist.broadcast(tensor, dist.get_world_size() - 1)
        self.run.say(f"broadcast after step {self.step}", tensor.tolist())

    def do_state_said(self) -> None:
        say_weights(self.run, self.engine, f" after step {self.step}")

    def do_optimizer_modes(self) -> None:
        self.engine.optimizer.zero_grad(set_to_none=False)

    def do_grad_off(self) -> None:
        with torch.no_grad():
            [p.sum().item() for p in self.parameters]


def hexed(value: Any) -> str:
    """A number to the last bit."""
    return float(value).hex()


def _digest(named: Any) -> str:
    found = hashlib.sha256()
    for name, tensor in named:
        found.update(name.encode())
        if torch.is_tensor(tensor):
            whole = torch.Tensor.detach(tensor).cpu().contiguous().reshape(-1)
            found.update(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return found.hexdigest()[:16]


def say_weights(run: Any, engine: Any, when: str) -> None:
    """Of each stage, in whichever process it is."""

    def say(found: Any) -> None:
        where = f"stage {found.stage_id} of pipeline {found.grid.get_data_parallel_rank()}{when}"
        named = {n: t for n, t in found.module.state_dict(keep_vars=True).items() if torch.is_tensor(t)}
        run.say(f"weights of {where}", _digest(sorted(named.items(), key=lambda each: each[0])))

    if "bamboo_ds" in sys.modules:
        import bamboo_ds

        bamboo_ds.for_each_stage(engine, say)
    else:
        say(engine)
