"""The engine that ``deepspeed.initialize`` returns for a job with a ``"bamboo"`` block.

It is DeepSpeed's ``PipelineEngine``: the methods that scripts call, those that DeepSpeed itself calls and that do
something else here, and the map of instructions. All of them delegate to the engine's parts (:mod:`.parts`).

What is not an object of its own is so because torch and DeepSpeed have it so: the process's job and session
(``worker.job.current_job``, one set of process groups per process), DeepSpeed's buffers of activation checkpointing
(:mod:`.iteration.recomputing`), the default random number generators (:mod:`.stage.rng`), and the attributes that
DeepSpeed's methods read and set on the engine (:mod:`.stage.runtime`, :mod:`.stage.deepspeed_adapter`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as stock
from deepspeed.runtime.pipe.engine import PipelineEngine

from .. import schedule
from ..comm.attachment import INSTALLER
from ..comm.inner import use_for_cuda
from ..config import bamboo_config
from ..devices.streams import use_accelerator
from ..errors import ConfigError
from ..stages import built
from ..state.checkpoints import is_own
from ..supported import check_config, check_schedule, layout_of
from ..worker.job import current_job
from .context.channels import Channels
from .iteration.parts import IterationParts
from .parts import Parts, parts_of
from .replicas.refusals import check_hooks, check_layers, check_named_optimizer, check_optimizer, check_optimizer_hooks
from .script.replaced import Replacements
from .stage.blocks import with_blocks
from .stage.tied import loading_alone
from .stage.wrappers import is_sharded
from .starting import start


def _by(find: Callable[[IterationParts], Callable[..., None]]) -> Callable[..., None]:
    """An instruction's handler: the method that ``find`` gives, with the instruction's arguments."""

    def execute(engine: BambooPipelineEngine, channels: Channels, **arguments: Any) -> None:
        find(engine._parts.iteration)(**arguments)

    return execute


def _over(find: Callable[[IterationParts], Callable[..., None]]) -> Callable[..., None]:
    """The same, where the method is given the channels: those of the epoch, or of a rehearsal."""

    def execute(engine: BambooPipelineEngine, channels: Channels, **arguments: Any) -> None:
        find(engine._parts.iteration)(channels, **arguments)

    return execute


class BambooPipelineEngine(PipelineEngine):  # type: ignore[misc]  # DeepSpeed is untyped
    """DeepSpeed's ``PipelineEngine`` whose iterations survive the loss of members.

    ``train_batch``, ``eval_batch``, ``save_checkpoint`` and ``load_checkpoint`` have DeepSpeed's signatures and
    results. They raise :class:`~bamboo_ds.errors.FatalLoss` when a stage has no holder left.
    """

    #: ``None`` while DeepSpeed's constructor runs, which calls some of the methods below.
    _parts: Parts = None  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        job = current_job()
        config = kwargs.get("config")
        module: Any = kwargs.get("model")
        block = bamboo_config(config)
        assert block is not None
        settings = job.channel.settings.of_script(block)
        exact = settings.redundancy.steps_to_check()
        check_config(config)
        check_schedule()
        self._replacements = replacements = Replacements(type(self))
        use_for_cuda(settings.comm.cuda_backend)
        use_accelerator()
        layout = layout_of(module)
        job.check_first_engine()
        check_layers(module)
        copied = settings.redundancy.mode.replicas or layout.copies > 1
        if kwargs.get("optimizer") is None:
            check_named_optimizer(config, copied)
        check_hooks(module)
        with job.session.attachment.among_nobody(INSTALLER):
            built(module, module.stage_id)
        # The epoch ends when all engines are built, and its communicators with it.
        with job.session.attachment.through_host():
            super().__init__(*args, **kwargs)
        if self.has_moe_layers:
            raise ConfigError('mixture-of-experts layers are not supported together with "bamboo" yet')
        check_optimizer_hooks(self.basic_optimizer)
        replacements.check(self)
        job.settings = settings
        check_optimizer(self.basic_optimizer, copied)
        layout = replace(layout, sharded=layout.copies > 1 and is_sharded(self.optimizer))
        layout = with_blocks(layout, module, settings.topology.blocks)
        self._parts = parts = parts_of(self, job, settings, layout)
        job.has_engine = True
        with job.channel.activity.at_work():
            start(parts, exact)
        job.session.attachment.script, job.session.stand = parts.collectives, parts.stand
        parts.script.leave()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """The body is a call of the script."""
        self._replacements.check(self)
        with self._parts.script.inside():
            yield

    # -- what scripts call --------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> Any:
        """As DeepSpeed's; a member that joins gets the results of iterations that were done before it came."""
        with self._inside():
            return self._parts.training.train_batch(data_iter)

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As DeepSpeed's; an evaluation that a loss interrupts is done again with the same batches."""
        with self._inside():
            return self._parts.evaluation.eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's. The folder of the checkpoint appears when it is complete, never before.

        It returns when the checkpoint is complete, or could not be written, which is an event, too. With
        ``bamboo.checkpoint.asynchronous`` it returns after a copy to host memory.

        Returns:
            Whether the checkpoint is complete, or is being written.

        Raises:
            CheckpointError: ``tag`` cannot name a checkpoint inside ``save_dir``.
        """
        with self._inside():
            return self._parts.checkpoints.save(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; replicas get the loaded state too. Call it before or between iterations.

        A member that joins gets the newest checkpoint that the job has written since, if that is in ``load_dir``, and
        goes on from there.
        """
        with self._inside():
            return self._parts.checkpoints.load(load_dir, tag, *args, **kwargs)

    def for_each_stage(self, function: Callable[[Any], Any]) -> list[Any]:
        """See :func:`bamboo_ds.for_each_stage`."""
        with self._parts.script.inside():
            return self._parts.visits.visit(function)

    def evaluating_with(self, name: str) -> AbstractContextManager[None]:
        """See :func:`bamboo_ds.evaluating_with`."""
        return self._parts.evaluation.using(name)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's, for the modules of all roles that this member has or gets."""
        if self._parts.builder.compiled_with is None:
            with self._parts.builder.compiling():
                super().compile(*args, **kwargs)

    # -- what DeepSpeed calls -----------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self._parts.training.run_iteration()  # in place of DeepSpeed's

    def _aggregate_total_loss(self) -> torch.Tensor:
        return self._parts.training.mean_loss()

    def _next_batch(self) -> Any:
        return self._parts.iteration.passes.next_batch()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        self._parts.iteration.steps.take_model_step(lr_kwargs)

    def clip_fp32_gradients(self) -> None:
        """As DeepSpeed's, without collectives; a script's own in its place is called for each copy of a stage."""
        if not self._replacements.clipping:
            self._parts.iteration.steps.clip_gradients()
            return
        with self._parts.iteration.steps.clipping():
            super().clip_fp32_gradients()

    def _report_progress(self, step: int) -> None:
        if self._parts is None or self._parts.binding.current.owned:
            super()._report_progress(step)

    def load_universal_checkpoint(self) -> bool:
        """As DeepSpeed's: whether checkpoints are universal ones; those that the job has saved itself are not."""
        may_be = self._parts is None or self._parts.loader.universal
        return may_be and bool(super().load_universal_checkpoint())

    def load_module_state_dict(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's, without collectives."""
        with loading_alone(self.module, checkpoint, self._curr_ckpt_path, self.checkpoint_engine):
            super().load_module_state_dict(checkpoint, *args, **kwargs)

    def _copy_recovery_script(self, save_path: str) -> None:
        if not is_own(save_path):
            os.makedirs(save_path, exist_ok=True)  # the checkpoint itself comes later
            super()._copy_recovery_script(save_path)

    if hasattr(PipelineEngine, "curriculum_enabled_legacy"):

        def curriculum_enabled_legacy(self) -> bool:
            """As DeepSpeed's before 0.19.8, which asks in a pass too, to hand the sequence length to the model.

            Layers of pipelines do not take it: DeepSpeed spares them by the name of its own engine's class.
            """
            passing = self._parts is not None and self._parts.iteration.slices.passing
            return not passing and bool(super().curriculum_enabled_legacy())

    #: By instruction. DeepSpeed's own map is left as it is: see :mod:`.script.replaced` for what scripts put into it.
    HANDLERS = {
        stock.LoadMicroBatch: _by(lambda iteration: iteration.passes.load),
        stock.ForwardPass: _by(lambda iteration: iteration.passes.forward),
        stock.BackwardPass: _by(lambda iteration: iteration.passes.backward),
        stock.SendActivation: _over(lambda iteration: iteration.boundaries.send_activations),
        stock.RecvActivation: _over(lambda iteration: iteration.boundaries.recv_activations),
        stock.SendGrad: _over(lambda iteration: iteration.boundaries.send_grads),
        stock.RecvGrad: _over(lambda iteration: iteration.boundaries.recv_grads),
        stock.ReduceTiedGrads: _by(lambda iteration: iteration.reduction.reduce_tied),
        stock.ReduceGrads: _by(lambda iteration: iteration.reduction.reduce),
        stock.OptimizerStep: _by(lambda iteration: iteration.steps.step_owned),
        schedule.UseRole: _by(lambda iteration: iteration.passes.use_role),
        schedule.FillBubble: _over(lambda iteration: iteration.redundant.fill_bubble),
        schedule.ResendActivation: _over(lambda iteration: iteration.boundaries.resend_activation),
        schedule.ResendGrad: _over(lambda iteration: iteration.boundaries.resend_grad),
        schedule.SendChanges: _by(lambda iteration: iteration.division.send_changes),
        schedule.RecvChanges: _by(lambda iteration: iteration.division.receive_changes),
        schedule.SendPart: _by(lambda iteration: iteration.division.send_part),
        schedule.RecvPart: _by(lambda iteration: iteration.division.receive_part),
        schedule.SendSums: _by(lambda iteration: iteration.sums.send),
        schedule.SendReplica: _by(lambda iteration: iteration.replication.send),
        schedule.RecvReplica: _by(lambda iteration: iteration.replication.receive),
        schedule.Commit: _by(lambda iteration: iteration.commits.commit_iteration),
        schedule.StepReplica: _by(lambda iteration: iteration.replication.step),
    }
