"""Evaluations: forward passes of all micro-batches without gradients, done again from the start after a loss.

Layers may keep what they see in an evaluation, too (counts, larger caches): other copies of a stage follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...bare import bare
from ...observe.spans import Kind
from ...schedule import RoleProgress
from ...state import Tree
from ...topology import Role
from ..checkpoints.saving import Saves
from ..context.channels import Stream
from ..context.operation import Outcome
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..data.supply import BatchSupply
from ..iteration.parts import IterationParts
from ..joining.replay import Replay
from ..recovery.copies import Copies
from ..recovery.takeover import Takeover
from ..stage.commit import alike, encode_drawn, mean_over_copies
from ..stage.runtime import StageRuntime
from ..stage.tracing import bits


@dataclass(eq=False)
class Evaluation(InContext):
    """``eval_batch``, and its passes as an :class:`~..context.operation.Operation`."""

    iteration: IterationParts
    supply: BatchSupply
    replay: Replay
    takeover: Takeover
    copies: Copies
    saves: Saves
    _micro_batches: int = field(default=0, init=False)
    _reduce: str | None = field(default=None, init=False)
    _losses: dict[int, Any] = field(default_factory=dict, init=False)
    _told_iterators: bool = field(default=False, init=False)
    #: What the layers of the roles that this member computes kept before the evaluation.
    _before: dict[Role, Tree] = field(default_factory=dict, init=False)
    #: What those of other copies keep after it, where that is something else.
    _changed: dict[Role, Tree] = field(default_factory=dict, init=False)

    call = "eval_batch"
    draws = watched = goes_on = True
    takes_steps = False

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool,
        compute_loss: bool,
        reduce_output: str | None,
        bcast_loss: bool,
        num_micro_batches: int | None,
    ) -> Any:
        """See :meth:`..pipeline_engine.BambooPipelineEngine.eval_batch`."""
        ds = self.ds
        self._micro_batches = ds.micro_batches if num_micro_batches is None else num_micro_batches
        recorded = self.replay.recorded("evaluate")
        if recorded is not None:
            self.supply.skip(data_iter, self._micro_batches)
            ds.module.eval()
            mean = self._mean(recorded)
            return (mean, None) if return_logits else mean
        if self.supply.dataset is not None and not self._told_iterators:
            # Any member can draw from the dataset, but not from what the script evaluates on.
            self._told_iterators = True
            self.supply.needs.tell(iterators=True)
        ds.eval_return_logits, ds.compute_loss = return_logits, compute_loss
        self._reduce, self._losses = reduce_output, {}
        self.supply.use_iterator("evaluate", data_iter)
        self.takeover.run(self)
        ds.module.eval()  # DeepSpeed leaves it so until the next iteration
        ds.eval_return_logits, ds.compute_loss = False, True
        losses, self._losses = self._losses, {}
        result: Any = losses.get(self.binding.local.role.pipeline)
        if compute_loss and (bcast_loss or ds.monitor.enabled or ds.is_last_stage()) and reduce_output is not None:
            result = self._mean(self._agreed()[0])
        if ds.monitor.enabled and result is not None:
            ds.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), ds.global_samples)])
        if return_logits:
            outputs, ds.outputs = ds.outputs, None
            return result, outputs
        return result

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """See :func:`bamboo_ds.evaluating_with`."""
        exchanged = self.iteration.exchanged
        before, exchanged.name = exchanged.name, name
        try:
            yield
        finally:
            exchanged.name = before

    def _agreed(self) -> tuple[list[float], bool | None]:
        """The losses by pipeline, and whether the ends of pipelines are alike, as the commit has agreed."""
        assert self.progress.vector is not None
        pipelines = self.epoch.layout.pipelines
        return list(self.progress.vector[:pipelines]), alike(self.progress.vector[pipelines:])

    def _mean(self, losses: Any) -> torch.Tensor:
        return mean_over_copies(self.epoch.layout, self.binding.local.role, losses).to(self.ds.device)

    # -- the operation ------------------------------------------------------------------------------------

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        self.progress.operation.evaluating = True
        self._changed.clear()
        try:
            self.iteration.exchanged.compare()
            with torch.no_grad(), self.iteration.exchanged.in_place():
                self._note_layers()
                for runtime in self.binding.owned():
                    self.binding.use(runtime)
                    self.ds.reserve_pipe_buffers(self._micro_batches)
                    self.ds.module.eval()
                    self.ds.fwd_outputs = []
                self.supply.draw_ahead(self._micro_batches)
                for m in range(self._micro_batches):
                    for runtime in self.binding.owned():
                        with self.recording.span(Kind.EVALUATE, runtime.role, m):
                            self._forward(runtime.role, m)
                        self.beats.beat()
        finally:
            self.progress.operation.evaluating = False
        self._replicate_layers()
        self.commit()

    def _note_layers(self) -> None:
        """Keeps what the layers keep; what an attempt before this one has changed is undone."""
        for role, layers in self._before.items():
            if role in self.binding.runtimes:
                self.binding.runtimes[role].layers.restore(layers)
        for runtime in self.binding.owned():
            if runtime.role not in self._before:
                self._before[runtime.role] = runtime.layers.undo()

    def _replicate_layers(self) -> None:
        plan, member, channels = self.epoch.plan, self.epoch.member, self.epoch.channels
        for runtime in self.binding.owned():
            layers, before = runtime.layers.capture(), self._before[runtime.role]
            kept = [name for name in before if name not in ("tensors", "whole")]
            same = not layers["tensors"] and all(bits(layers[name]) == bits(before[name]) for name in kept)
            for channel in channels.of(Stream.REPLICA, runtime.role):
                channel.send(self.progress.sequence, as_message(None if same else layers))
        for role in (*plan.shadowed_by(member), *plan.built_by(member)):
            layers = from_message(channels.replica(role, member).recv(self.progress.sequence))
            if layers is not None:
                self._changed[role] = layers

    def _forward(self, role: Role, m: int) -> None:
        last, channels = self.epoch.layout.stages - 1, self.epoch.channels
        self.iteration.passes.use_role(role)
        buffers = self.ds.pipe_buffers
        if role.stage > 0:
            buffers["inputs"][m] = channels[Stream.ACTIVATION, role].recv(m)
        if role.stage in (0, last):
            self.iteration.passes.load(m)
        self.iteration.passes.forward(m)
        outputs = buffers["outputs"][m]
        for slots in buffers.values():
            slots[m] = None
        if role.stage < last:
            channels[Stream.ACTIVATION, Role(role.pipeline, role.stage + 1)].send(m, outputs)

    def commit(self) -> None:
        vector = torch.zeros(self.epoch.layout.pipelines, dtype=torch.float64)
        for runtime in self.binding.owned():
            self.binding.use(runtime)
            if self.ds.is_last_stage():
                reduced = self.ds.reduce_outputs(
                    self.ds.fwd_outputs, reduce=self._reduce, reduce_dp=False, micro_batches=self._micro_batches
                )
                self._losses[runtime.role.pipeline] = reduced
                if torch.is_tensor(reduced) and bare(reduced).numel() == 1:
                    vector[runtime.role.pipeline] = float(reduced)
        self.supply.complete(self._micro_batches)
        self.epoch.drain()
        self.progress.operation.entered = True
        self.iteration.commits.agree(
            torch.cat([vector, encode_drawn(self.epoch.layout, self.iteration.commits.drawn())])
        )

    def repeatable(self) -> bool:
        """The outputs of a last stage died with its owner; the others may have entered long before it was through."""
        last = self.epoch.layout.stages - 1
        taken = self.progress.operation.taken_over
        return not any(r.role in taken for r in self.binding.owned() if r.role.stage == last)

    def finish(self, outcome: Outcome) -> None:
        if outcome is Outcome.COMMITTED:
            self.supply.collect_leftovers(self._micro_batches, gradients=False)
        else:
            self.supply.drop()
        for role, layers in self._changed.items():
            self.copies.follow_owner(role, partial(_keep, layers))
        self._before.clear()
        self._changed.clear()
        losses, same = self._agreed()
        self.supply.note_ends("evaluate", same)
        self.history.add("evaluate", losses, same)
        self.binding.begin_iteration()
        for runtime in self.binding.owned():
            runtime.layers.tensors.settle()
            runtime.module.train()
        self.copies.advance(stepped=False)
        self.saves.poll()


def _keep(layers: Tree, runtime: StageRuntime) -> None:
    runtime.layers.restore(layers)
    runtime.layers.tensors.settle()
