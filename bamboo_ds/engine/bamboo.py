"""The engine that ``deepspeed.initialize`` returns for a job with a ``"bamboo"`` block."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from ..comm.transport import Transport
from ..compat import check_config, check_module
from ..config import bamboo_config
from ..errors import ConfigError, EpochChanged, ProtocolError
from ..launch import current_job
from ..observe import logs
from ..topology import Layout, Role
from .bubbles import IdleTimes
from .commit import mean_over_pipelines
from .data import Batches, Dataset
from .history import History
from .joining import JoiningExecutor
from .lanes import Stream
from .learning import Snapshots
from .operations import CheckpointSave, End, Evaluation, TrainIteration
from .runtime import RuntimeBinding, StageRuntime


class BambooPipelineEngine(JoiningExecutor):
    """DeepSpeed's ``PipelineEngine`` whose iterations survive the loss of members.

    ``train_batch``, ``eval_batch``, ``save_checkpoint`` and ``load_checkpoint`` have DeepSpeed's signatures and
    results. They raise :class:`~bamboo_ds.errors.FatalLoss` when a stage has no holder left.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        job = current_job()
        config = kwargs.get("config")
        settings = bamboo_config(config)
        assert settings is not None
        check_config(config)
        module: Any = kwargs.get("model")
        topology = module._topo
        layout = Layout(pipelines=topology.get_dim("data") or 1, stages=topology.get_dim("pipe"))
        check_module(module, layout)
        # DeepSpeed's constructor runs its own schedule-free code on these.
        self.__dict__["_evaluating"] = False
        super().__init__(*args, **kwargs)
        if self.has_moe_layers:
            raise ConfigError('mixture-of-experts layers are not supported together with "bamboo" yet')
        self._job, self._settings, self._mode = job, settings, settings.redundancy.mode
        job.settings = settings
        self._retain = self._mode.replicas
        self._batches, self._idle = Batches(), IdleTimes()
        self._sequence = self._committed_steps = self._loading = 0
        self._entered = self._interrupted = False
        self._vector = self._committed = self._pending = None
        self._bubble_begin = {}
        self._learners = {}
        self._history = History()
        self._snapshots = Snapshots(job.session.address, settings.topology.transfer_mb_per_s, self._history)
        self._switch_due = self._joining = False
        self._seed = torch.initial_seed()
        self._operation = End(self)
        self._consumed = 0
        self._dataset, self._dataset_iterator = None, self.data_iterator
        if self.training_data:
            size = self.train_micro_batch_size_per_gpu()
            self._dataset = Dataset(
                self.training_data, layout.pipelines, size, lambda sampler: self._loader_with(sampler)
            )
            if self.data_iterator is not None:  # DeepSpeed opens one at the ends of a pipeline
                self._dataset.adopt(self.grid.data_parallel_id, self.data_iterator)
        self._transport: Transport = None  # type: ignore[assignment]  # until the first epoch with roles
        self._join(layout)

    def _loader_with(self, sampler: Any) -> Any:
        return self.deepspeed_io(self.training_data, data_sampler=sampler)

    # -- start --------------------------------------------------------------------------------------------

    def _join(self, layout: Layout) -> None:
        """Report the layout, enter the first epoch with roles, agree on the seed, build the replicas."""
        job = self._job
        role = Role(self.grid.data_parallel_id, self.stage_id)
        logs.set_context(role=str(role))
        self._home = StageRuntime(role, owned=not job.channel.joiner)
        self.fwd_outputs: list[torch.Tensor] = []
        if job.channel.joiner:
            self._install_groups(role, self.grid, layout)
            self._binding = RuntimeBinding(self, self._home)
            job.at_finish = self._leave
            self._begin_joining(layout)
            return
        job.channel.report_layout(layout, self._mode.replicas, self._dataset is None)
        plan = job.channel.wait_plan(job.session.epoch, job.session.timeout.total_seconds())
        self._enter(plan)
        job.lost_at = None
        if plan.world != layout:
            raise ProtocolError(f"the plan is for {plan.world}, this engine has {layout}")
        self._install_groups(role, self.grid, layout)
        self._binding = RuntimeBinding(self, self._home)
        self._connect_batches({})
        facts = json.dumps({"seed": self._seed, "micro_batches": self.micro_batches})
        everybody = {member: json.loads(text) for member, text in self._transport.exchange(facts).items()}
        self._seed = everybody[plan.owner(Role(0, 0))]["seed"]
        self._copy_state([r for r in layout.roles if plan.shadow(r) is not None])
        self._report_standing()
        job.at_finish = self._leave

    def _use_training_batches(self) -> None:
        """Set where the batches of the next iteration come from."""
        if self._dataset is not None and self.data_iterator is self._dataset_iterator:
            self._batches.use_dataset(self._dataset, self._consumed, self.batch_fn)
        else:
            iterator = self.data_iterator if self._is_source() else None
            self._batches.use_iterator(self._home.role.pipeline, iterator, self.batch_fn)

    # -- training -----------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> Any:
        """As DeepSpeed's; a member that joins gets the results of iterations that were done before it came."""
        losses = self._recorded("train")
        return super().train_batch(data_iter) if losses is None else self._replay_iteration(losses, data_iter)

    def _train_schedule(self) -> Any:
        return TrainIteration(self)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self._protected(pipe_schedule)

    def _aggregate_total_loss(self) -> torch.Tensor:
        """The iteration's mean loss; the commit has agreed on it."""
        assert self._committed is not None
        losses = self._committed.losses
        self.dp_group_loss = torch.tensor(losses[self._home.role.pipeline][0], dtype=torch.float32, device=self.device)
        names = list(self.module.get_additional_losses() or {})
        self.agg_additional_losses = {
            n: mean_over_pipelines([x[1 + i] for x in losses]).to(self.device) for i, n in enumerate(names)
        } or None
        return mean_over_pipelines([x[0] for x in losses]).to(self.device)

    def _collect_leftovers(self, micro_batches: int, gradients: bool) -> None:
        """Take in labels (and gradients for shadows) that were not needed; their senders drained before the commit."""
        try:
            self._batches.end(micro_batches)
            for (stream, role), lane in self._lanes.streams.items() if gradients else ():
                if stream is Stream.SHADOW_GRADIENT and lane.destination == self._job.session.member:
                    for m in range(self._binding.runtimes[role].backwards, micro_batches):
                        self._transport.recv(lane, m)
        except EpochChanged:
            # The operation has committed; what was left of it in the lanes is gone with their epoch.
            self._batches.drop()

    def _leads(self) -> bool:
        """Whether this member owns the role of rank 0, whose owner speaks for the job."""
        return self._plan.owners[0] == self._job.session.member

    def _report_step(self, seconds: float) -> None:
        if not self._leads():
            return
        assert self._committed is not None
        layout = self._plan.world
        shadowed = sum(shadow is not None for shadow in self._plan.shadows)
        self._job.channel.event(
            "step",
            epoch=self._plan.epoch,
            step=self._committed_steps,
            loss=sum(x[0] for x in self._committed.losses) / layout.pipelines,
            seconds=seconds,
            frc_done=self._committed.redundant,
            frc_total=shadowed * self.micro_batches,
        )

    # -- evaluation ---------------------------------------------------------------------------------------

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
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
        recorded = self._recorded("evaluate")
        if recorded is not None:
            self._drop_batches(data_iter, micro_batches)
            found = mean_over_pipelines(recorded).to(self.device)
            return (found, None) if return_logits else found
        self.eval_return_logits = return_logits
        self._compute_loss = compute_loss
        evaluation = Evaluation(self, data_iter, micro_batches, reduce_output)
        self._protected(evaluation)
        self._compute_loss = True
        self.eval_return_logits = False
        result: Any = evaluation.losses.get(self._home.role.pipeline)
        if compute_loss and (bcast_loss or self.monitor.enabled or self.is_last_stage()) and reduce_output is not None:
            assert self._vector is not None
            result = mean_over_pipelines(self._vector).to(self.device)
        if self.global_rank == 0 and self.monitor.enabled:
            self.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), self.global_samples)])
        if return_logits:
            outputs, self.outputs = self.outputs, None
            return result, outputs
        return result

    # -- checkpoints --------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's. The folder of the checkpoint appears when it is complete, never before."""
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        name = str(tag) if tag is not None else f"global_step{self.global_steps}"
        if self._recorded("save") is not None:
            return True

        def save(folder: str) -> None:
            self._create_checkpoint_file(folder, name, False)
            self._save_checkpoint(folder, name, client_state or {}, exclude_frozen_parameters)

        self._protected(CheckpointSave(self, save_dir, name, save_latest, save))
        self._job.progressed(self._committed_steps, os.path.join(save_dir, name))
        return True

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; replicas get the loaded state too. Call it before or between iterations.

        A member that joins gets the newest checkpoint that the job has written since, if that is in ``load_dir``, and
        goes on from there.
        """
        load = super().load_checkpoint
        if self._job.replaying:
            return self._replay_load(lambda name: load(load_dir, name, *args, **kwargs), load_dir, tag)
        result: Any = (None, None)
        for runtime in self._binding.owned():
            self._binding.use(runtime)
            loaded = load(load_dir, tag, *args, **kwargs)
            if runtime is self._home or result[0] is None:
                result = loaded
        self._binding.use(self._home)
        layout = self._plan.world
        self._copy_state([r for r in layout.roles if self._plan.shadow(r) is not None])
        name = os.path.basename(os.path.dirname(result[0])) if result[0] is not None else None
        self._history.add("load", {"folder": os.path.abspath(load_dir), "tag": name})
        return result

    # -- end ----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        if not self._joining:
            self._protected(End(self))
        self._cancel_copies()
        self._snapshots.close()
