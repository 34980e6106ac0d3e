"""The engine that ``deepspeed.initialize`` returns for a job with a ``"bamboo"`` block."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable
from typing import Any

import torch

from ..comm.transport import Transport
from ..compat import check_config, check_module
from ..config import bamboo_config
from ..errors import ConfigError, EpochChanged, ProtocolError
from ..launch import current_job
from ..observe import logs
from ..state import join, split
from ..topology import Layout, Role
from .bubbles import IdleTimes
from .commit import mean_over_pipelines
from .data import Batches
from .lanes import Stream
from .operations import CheckpointSave, End, Evaluation, TrainIteration
from .recovery import RecoveringExecutor
from .replica import build_replica, capture, clone_scheduler, restore
from .runtime import RuntimeBinding, StageRuntime


class BambooPipelineEngine(RecoveringExecutor):
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
        self._lanes = {}
        self._transport: Transport = None  # type: ignore[assignment]  # until the first epoch with roles
        self._join(layout)

    # -- start --------------------------------------------------------------------------------------------

    def _join(self, layout: Layout) -> None:
        """Report the layout, enter the first epoch with roles, agree on the seed, build the replicas."""
        job = self._job
        role = Role(self.grid.data_parallel_id, self.stage_id)
        logs.set_context(role=str(role))
        self._home = StageRuntime(role, owned=True)
        job.channel.report_layout(layout, self._mode.replicas)
        plan = job.channel.wait_plan(job.session.epoch, job.session.timeout.total_seconds())
        self._enter(plan)
        job.lost_at = None
        if plan.world != layout:
            raise ProtocolError(f"the plan is for {plan.world}, this engine has {layout}")
        self._install_groups(role, self.grid)
        self.fwd_outputs: list[torch.Tensor] = []
        self._binding = RuntimeBinding(self, self._home)
        self._connect_batches({})
        facts = json.dumps({"seed": torch.initial_seed(), "micro_batches": self.micro_batches})
        everybody = {member: json.loads(text) for member, text in self._transport.exchange(facts).items()}
        self._seed = everybody[plan.owner(Role(0, 0))]["seed"]
        self._copy_state([r for r in layout.roles if plan.shadow(r) is not None])
        job.at_finish = self._leave

    def _install_groups(self, role: Role, grid: Any) -> None:
        """Give ``grid`` the data-parallel group of ``role``'s stage, under a name that is equal on all members."""
        layout = self._plan.world
        ranks = [layout.rank(Role(d, role.stage)) for d in range(layout.pipelines)]
        group = self._job.session.logical_group(f"bamboo/data/{role.stage}", ranks, layout.rank(role))
        grid.dp_group, grid.dp_proc_group = ranks, group

    def _replica_runtime(self, role: Role) -> StageRuntime:
        """A runtime for another role of this pipeline, with everything that the topology determines."""
        home = self._home
        self._binding.refresh()
        layout = self._plan.world
        grid = copy.copy(home.attributes["grid"])
        grid.global_rank = layout.rank(role)
        grid.stage_id = role.stage
        grid.is_first_stage, grid.is_last_stage = role.stage == 0, role.stage == layout.stages - 1
        # The model-parallel group of a pipeline is the pipeline itself: its ranks are the stages.
        grid.ds_model_rank = role.stage
        self._install_groups(role, grid)
        buffers = {name: [None] * self.micro_batches for name in home.attributes["pipe_buffers"]}
        runtime = StageRuntime(role, owned=False)
        runtime.attributes = dict(home.attributes)
        runtime.attributes.update(
            stage_id=role.stage,
            prev_stage=role.stage - 1,
            next_stage=role.stage + 1,
            global_rank=layout.rank(role),
            checkpoint_mp_rank=role.stage,
            grid=grid,
            mpu=grid,
            pipe_buffers=buffers,
            num_pipe_buffers=self.micro_batches,
            loss=torch.tensor(0.0, device=self.device),
        )
        return runtime

    def _scheduler_for(self, optimizer: torch.optim.Optimizer) -> Any:
        """A learning-rate scheduler for a replica's optimizer, made as DeepSpeed made this stage's own."""
        own = self._home.attributes["lr_scheduler"]
        if own is None:
            return None
        if self.client_lr_scheduler is None:
            return self._scheduler_from_config(optimizer)
        if callable(self.client_lr_scheduler):
            return self.client_lr_scheduler(optimizer)
        return clone_scheduler(own, self._home.attributes["basic_optimizer"], optimizer)

    def _copy_state(self, roles: Iterable[Role]) -> None:
        """Copy the full state of ``roles`` from their owners to their shadows. Collective."""
        roles = list(roles)
        self._binding.refresh()
        runtimes = self._binding.runtimes
        for role in roles:
            if self._plan.owner(role) == self._job.session.member:
                text, tensors = split(capture(runtimes[role]))
                header = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
                self._transport.send(self._lanes[Stream.STATE, role], self._sequence, (header, *tensors))
        for role in roles:
            if self._plan.shadow(role) == self._job.session.member:
                payload = self._transport.recv(self._lanes[Stream.STATE, role], self._sequence)
                assert isinstance(payload, tuple)
                state = join(bytes(payload[0].tolist()).decode(), payload[1:])
                if role in runtimes:
                    restore(runtimes[role], state)
                    if runtimes[role] is self._binding.current:
                        self._binding.reload()
                else:
                    self._build_replica(role, state)
        self._transport.drain()

    def _build_replica(self, role: Role, state: Any) -> None:
        runtime = self._replica_runtime(role)
        build_replica(self._home, runtime, state, self.device, self._scheduler_for)
        self._binding.runtimes[role] = runtime
        self._binding.use(runtime)
        self.module_forward_pre_hook = self._create_module_forward_pre_hook()
        self.module_forward_post_hook = self._create_module_forward_post_hook()
        self._binding.use(self._home)
        runtime.begin_iteration()

    # -- training -----------------------------------------------------------------------------------------

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
            for (stream, role), lane in self._lanes.items() if gradients else ():
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
        self.eval_return_logits = return_logits
        self._compute_loss = compute_loss
        micro_batches = self.micro_batches if num_micro_batches is None else num_micro_batches
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

        def save(folder: str) -> None:
            self._create_checkpoint_file(folder, name, False)
            self._save_checkpoint(folder, name, client_state or {}, exclude_frozen_parameters)

        self._protected(CheckpointSave(self, save_dir, name, save_latest, save))
        self._job.progressed(self._committed_steps, os.path.join(save_dir, name))
        return True

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; replicas get the loaded state too. Call it before or between iterations."""
        result: Any = (None, None)
        for runtime in self._binding.owned():
            self._binding.use(runtime)
            loaded = super().load_checkpoint(*args, **kwargs)
            if runtime is self._home:
                result = loaded
        self._binding.use(self._home)
        layout = self._plan.world
        self._copy_state([r for r in layout.roles if self._plan.shadow(r) is not None])
        return result

    # -- end ----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._protected(End(self))
