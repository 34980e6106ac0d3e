"""Stages as DeepSpeed's engine computes them, without DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bamboo_ds.bare import bare
from bamboo_ds.engine.stage.deepspeed_adapter import DeepSpeedAdapter
from bamboo_ds.engine.stage.optimizers import PlainOptimizer

WIDTH = 3
CLIPPING = 0.05


class Layer(nn.Module):
    """A layer that draws random numbers and may change a buffer, which the result depends on."""

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(()))
        self.statistics = statistics

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.statistics:
            self.seen += inputs.detach().mean()
        return self.dropout(torch.tanh(self.linear(inputs))) + 0.1 * self.seen


class Stage(nn.Module):
    """One stage of so many layers; ``shared``: it holds weights of the other end of its pipeline, too."""

    seed_layers, activation_checkpoint_interval, micro_offset = False, 0, 0

    def __init__(self, stage: int, layers: int, shared: bool, seed: int, statistics: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed + stage)
            self.forward_funcs: list[nn.Module] = [Layer(statistics) for _ in range(layers)]
            for number, layer in enumerate(self.forward_funcs):
                self.add_module(str(number), layer)
            self.tied_modules = nn.ModuleDict()
            if shared:
                torch.manual_seed(seed)
                self.tied_modules["ends"] = nn.Linear(WIDTH, WIDTH)
                self.forward_funcs.append(self.tied_modules["ends"])
        self.tied_comms: dict[str, Any] = {}
        self._local_start, self._layer_specs = stage * layers, [None] * (stage + 2) * layers

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.forward_funcs:
            inputs = layer(inputs)
        return inputs

    def get_additional_losses(self) -> None:
        """There are none."""


class Shards(PlainOptimizer):
    """Partitioned over the pipelines: each steps those parameters of its stage that are its own."""

    def groups(self) -> list[list[nn.Parameter]]:
        return [list(self._runtime.module.parameters())]

    def _mine(self, part: int) -> list[int]:
        return list(range(part, len(list(self._runtime.module.parameters())), self._groups.layout.pipelines))

    def shard(self, part: int) -> list[torch.Tensor]:
        parameters = list(self._runtime.module.parameters())
        return [parameters[place].detach() for place in self._mine(part)]

    def fill(self, part: int, shard: list[torch.Tensor]) -> None:
        parameters = list(self._runtime.module.parameters())
        for place, given in zip(self._mine(part), shard, strict=True):
            parameters[place].data.copy_(given)  # as where they are views of one buffer: autograd does not count it

    def gather(self) -> None:
        own = self.shard(self._runtime.role.pipeline)
        for part, given in enumerate(self._ds.mpu.get_data_parallel_group().all_gather(own)):
            self.fill(part, given)

    def keep(self, reduced: list[torch.Tensor]) -> list[torch.Tensor]:
        return [reduced[place].clone() for place in self._mine(self._runtime.role.pipeline)]

    def apply(self, kept: list[torch.Tensor]) -> None:
        self.clear()
        parameters = list(self._runtime.module.parameters())
        for place, gradient in zip(self._mine(self._runtime.role.pipeline), kept, strict=True):
            parameters[place].grad = gradient.clone()


class SimulatedDeepSpeed(DeepSpeedAdapter):
    """The methods of DeepSpeed that parts call, for :class:`Stage`."""

    def is_first_stage(self) -> bool:  # type: ignore[override]
        """Whether the bound role's is."""
        return self.engine.__dict__["stage_id"] == 0

    def is_last_stage(self) -> bool:  # type: ignore[override]
        """Whether the bound role's is."""
        return self.engine.__dict__["stage_id"] == self.num_stages - 1

    def load_micro_batch(self, buffer_id: int) -> None:
        inputs, labels = self.engine._parts.iteration.passes.next_batch()
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = inputs
        if self.is_last_stage():
            self.pipe_buffers["labels"][buffer_id] = labels

    def forward_pass(self, buffer_id: int) -> None:
        buffers = self.pipe_buffers
        outputs = buffers["outputs"][buffer_id] = self.module(buffers["inputs"][buffer_id])
        if self.is_last_stage():
            self.loss = nn.functional.mse_loss(outputs, buffers["labels"][buffer_id])
            detached = self.loss.detach().clone()
            if not self.module.training:
                self.fwd_outputs.append(detached)
                return
            self.total_loss = detached if self.total_loss is None else self.total_loss + detached

    def backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            self.scaled_by_micro_batches(self.loss).backward()
        else:
            self.pipe_buffers["outputs"][buffer_id].backward(self.grad_layer)

    def reduce_outputs(self, outputs: list[Any], micro_batches: int, **_: Any) -> Any:  # type: ignore[override]
        return torch.stack(outputs).sum() / micro_batches

    def scaled_by_micro_batches(self, loss: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return loss / self.micro_batches

    def _trainable(self) -> list[nn.Parameter]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def gradients(self) -> list[torch.Tensor]:
        """As DeepSpeed's: parameters without a gradient get one."""
        for parameter in self._trainable():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [p.grad for p in self._trainable()]

    def reduce_in_buckets(self, grads: list[torch.Tensor], elements_per_buffer: int) -> None:  # type: ignore[override]
        """The average over the pipelines."""
        group = self.engine.__dict__["data_parallel_group"]
        flat = torch.cat([gradient.reshape(-1) for gradient in grads])
        group.all_reduce(flat)
        flat.mul_(1.0 / group.size)
        for gradient, part in zip(grads, flat.split([gradient.numel() for gradient in grads]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def scales(self, pipelines: int) -> tuple[float, float]:
        """Gradients are divided after they have been summed."""
        return 1.0, 1.0 / pipelines

    def train_batch(self, data_iter: Any) -> torch.Tensor:
        self.engine._parts.training.run_iteration()
        return self.engine._parts.training.mean_loss()

    def reserve_pipe_buffers(self, count: int) -> None:  # type: ignore[override]
        for buffers in self.pipe_buffers.values():
            buffers.extend([None] * (count - len(buffers)))

    def optimizer_step(self) -> None:
        """As DeepSpeed's, without reports."""
        self.engine._parts.iteration.steps.take_model_step(None)

    def quiet_step(self) -> None:
        self.engine._parts.iteration.steps.take_model_step(None)

    def take_model_step(self, lr_kwargs: Any) -> None:
        self.engine._parts.iteration.steps.clip_gradients()
        self.optimizer.step()
        self.module.zero_grad(set_to_none=True)
        self.note_step(skipped=False)

    def save_files(self, folder: str, tag: str, client_state: dict[str, Any], exclude_frozen: bool) -> None:
        """The state of the bound role is saved."""
        parts = self.engine._parts
        runtime = parts.binding.current
        state = {name: bare(tensor).clone() for name, tensor in runtime.named_tensors()}
        parts.saves.collected[tag][runtime.role] = state
