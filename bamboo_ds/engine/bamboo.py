"""The engine that ``deepspeed.initialize`` returns for a job with a ``"bamboo"`` block."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .. import plan_change
from ..comm.inner import use_for_cuda
from ..comm.script import ScriptCollectives
from ..comm.transport import Transport
from ..config import bamboo_config
from ..errors import ConfigError, EpochChanged, ProtocolError
from ..launch import current_job
from ..launched import checked_steps
from ..observe import logs
from ..stages import built
from ..state.publish import check_tag
from ..supported import check_config, check_schedule, layout_of
from ..topology import Layout, Role
from .accounts import Accounts, Consumed
from .answers import ignore
from .between import ScriptingExecutor, engine_call
from .bubbles import IdleTimes
from .commit import mean_over_pipelines
from .data import Batches, Dataset
from .doubts import Doubts
from .flags import FLAGS, compare_flags, flags_here
from .history import History
from .kept import save_kept
from .lanes import Stream
from .layers import Layers
from .learning import Snapshots
from .monitors import Monitors
from .operations import CheckpointSave, End, Evaluation, TrainIteration
from .refusals import check_hooks, check_layers, check_named_optimizer, check_optimizer, check_optimizer_hooks
from .runtime import RuntimeBinding, StageRuntime
from .saving import HostCopyEngine, Saves
from .schedulers import Pristine
from .slices import mode_for
from .tied import connect_ties, tied_stages
from .wrappers import is_sharded, stage_optimizer

logger = logging.getLogger("bamboo_ds")


class BambooPipelineEngine(ScriptingExecutor):
    """DeepSpeed's ``PipelineEngine`` whose iterations survive the loss of members.

    ``train_batch``, ``eval_batch``, ``save_checkpoint`` and ``load_checkpoint`` have DeepSpeed's signatures and
    results. They raise :class:`~bamboo_ds.errors.FatalLoss` when a stage has no holder left.
    """

    global_rank: int
    _told_iterators = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        job = current_job()
        config = kwargs.get("config")
        settings = bamboo_config(config)
        assert settings is not None
        self.__dict__["_check_steps"] = settings.redundancy.steps_to_check(checked_steps(os.environ))
        check_config(config)
        check_schedule()
        use_for_cuda(settings.comm.cuda_backend)
        module: Any = kwargs.get("model")
        layout = layout_of(module)
        job.check_first_engine()
        check_layers(module)
        copied = settings.redundancy.mode.replicas or layout.copies > 1
        if kwargs.get("optimizer") is None:
            check_named_optimizer(config, copied)
        check_hooks(module)
        built(module, module.stage_id)
        # DeepSpeed's constructor runs its own schedule-free code on these.
        self.__dict__["_evaluating"] = False
        super().__init__(*args, **kwargs)
        if self.has_moe_layers:
            raise ConfigError('mixture-of-experts layers are not supported together with "bamboo" yet')
        check_optimizer_hooks(self.basic_optimizer)
        layout = replace(layout, sharded=layout.copies > 1 and is_sharded(self.optimizer))
        self._layout = layout
        self._send_whole()
        self._job, self._settings = job, settings
        self._mode = mode_for(settings.redundancy.mode, layout, self.global_rank)
        job.settings = settings
        check_optimizer(self.basic_optimizer, copied)
        self._retain = self._mode.replicas or layout.slices > 1
        self._batches, self._idle = Batches(layout.slices), IdleTimes()
        self._sequence = self._committed_steps = self._loading = 0
        self._entered = self._interrupted = False
        self._last_beat, self._longest_beat = time.monotonic(), 0.0
        self._vector = self._committed = self._pending = None
        self._bubble_begin = {}
        self._learners, self._changed, self._known_changes = {}, set(), {}
        self._budget, self._exhausted, self._exact = None, False, None
        self._doubts, self._differing = Doubts(settings.redundancy.verify_every), {}
        self._history = History(layout.slices)
        answers = {History.PREFIX: self._history.answer, FLAGS: lambda _: json.dumps(self._flags)}
        rate, secret = settings.topology.transfer_mb_per_s, job.channel.secret
        self._snapshots = Snapshots(job.session.address, rate, answers, secret)
        host = HostCopyEngine(self.checkpoint_engine)
        self.checkpoint_engine: Any = host
        self._saves = Saves(job, settings.checkpoint, host, self._history)
        self.monitor: Any = Monitors(self.monitor, self.global_rank, job.session, self._speaks)
        brought = self.client_lr_scheduler is not None and self.lr_scheduler is not None
        self._pristine = Pristine(self.lr_scheduler, self.basic_optimizer) if brought else None
        self._accounts = Accounts(settings.observe.ledger, job.session.member)
        self._switch_due = self._joining = False
        self._agreed = ()
        self._seed = torch.initial_seed()
        self._flags = flags_here(self.device)
        self._operation = End(self)
        self._consumed = 0
        self._tied_stages = tied_stages(module)
        self._dataset, self._dataset_iterator = None, self.data_iterator
        if self.training_data:
            size = self.train_micro_batch_size_per_gpu()
            self._dataset = Dataset(self.training_data, layout.copies, size, lambda sampler: self._loader_with(sampler))
            if self.data_iterator is not None:  # DeepSpeed opens one at the ends of a pipeline
                self._dataset.adopt(self.grid.data_parallel_id, self.data_iterator)
        self._transport: Transport = None  # type: ignore[assignment]  # until the first epoch with roles
        self._script = ScriptCollectives(job.session, self._where, self._recover_between, self._tell_lacking)
        job.has_engine = True
        with job.channel.activity.at_work():
            self._join(layout)
        job.session.script = self._script
        self._leave_to_script()

    def _loader_with(self, sampler: Any) -> Any:
        return self.deepspeed_io(self.training_data, data_sampler=sampler)

    # -- start --------------------------------------------------------------------------------------------

    def _join(self, layout: Layout) -> None:
        """Report the layout, enter the first epoch with roles, agree on the seed, build the replicas."""
        job = self._job
        role = layout.role(self.global_rank)
        logs.set_context(role=str(role))
        self._home = StageRuntime(role, owned=not job.channel.joiner)
        self.fwd_outputs: list[torch.Tensor] = []
        if job.channel.joiner:
            self._install_groups(role, self.grid, layout)
            connect_ties(self.module, role, layout, job.session)
            self._bind_home()
            job.at_finish = self._leave
            self._begin_joining()
            return
        job.channel.report_layout(layout, self._mode.replicas, self._dataset is None)
        plan = job.channel.wait_plan(job.session.epoch, job.session.timeout.total_seconds())
        self._agreed = plan.members
        self._enter(plan)
        plan_change.begin(plan)
        job.lost_at = None
        if plan.world != layout:
            raise ProtocolError(f"the plan is for {plan.world}, this engine has {layout}")
        self._install_groups(role, self.grid, layout)
        connect_ties(self.module, role, layout, job.session)
        self._bind_home()
        self._connect_batches({})
        facts = {
            "seed": self._seed,
            "micro_batches": self.micro_batches,
            "nonce": secrets.token_hex(4),
            "resumed": self._find_resumed() if self._leads() else None,
            "ledger": self._accounts.folder,
            "exact": self._check_steps,
            "flags": self._flags,
        }
        everybody = {m: json.loads(text) for m, text in self._transport.exchange(json.dumps(facts)).items()}
        leads = plan.owner(Role(0, 0))
        agreed = everybody[leads]
        compare_flags({member: told["flags"] for member, told in everybody.items()}, leads)
        self._flags = agreed["flags"]
        self._seed, self._saves.nonce = agreed["seed"], agreed["nonce"]
        self._accounts.begin(agreed["nonce"], agreed["ledger"])
        self._exact = self._check_of(agreed["exact"])
        try:
            self._copy_state(layout.roles)
            self._report_standing()
        except EpochChanged as error:
            # Others may be in their first operation already. This member's recovers, with the copies that are complete.
            logger.info("interrupted at the end of building: %s", error)
        job.at_finish = self._leave
        if agreed["resumed"] is not None:
            self._begin_resuming(*agreed["resumed"])

    def _bind_home(self) -> None:
        self._binding = RuntimeBinding(self, self._home)
        self._home.layers = Layers(self._home.module)
        self._home.optimizer = stage_optimizer(self, self._home)

    def _use_training_batches(self) -> None:
        """Set where the batches of the next iteration come from."""
        if self._dataset is not None and self.data_iterator is self._dataset_iterator:
            self._batches.use_dataset(self._dataset, self._consumed, self.batch_fn)
        else:
            self._batches.use_iterator(self._home.role.pipeline, self._source(self.data_iterator), self.batch_fn)

    def _account(self) -> None:
        """Write what the iteration that has just committed has consumed."""
        assert self._committed is not None
        self._binding.refresh()
        self._accounts.commit(
            Consumed(
                step=self._committed_steps,
                global_step=self._home.attributes["global_steps"],
                checksums=self._committed.consumed,
                position=self._consumed - self.micro_batches if self._batches.shared else None,
            )
        )
        self._accounts.write(self._plan, self._dataset)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's, for the modules of all roles that this member has or gets."""
        if self._compiled_with is not None:
            return
        home = self.module
        compile_home = home.compile

        def compile_and_note(**how: Any) -> None:
            self._compiled_with = how
            compile_home(**how)

        home.__dict__["compile"] = compile_and_note
        try:
            super().compile(*args, **kwargs)
        finally:
            del home.__dict__["compile"]
        if self._compiled_with is not None:
            for runtime in self._binding.runtimes.values():
                if runtime.module is not home:
                    runtime.module.compile(**self._compiled_with)

    # -- training -----------------------------------------------------------------------------------------

    @engine_call
    def train_batch(self, data_iter: Any = None) -> Any:
        """As DeepSpeed's; a member that joins gets the results of iterations that were done before it came."""
        done = self._recorded("train")
        if done is not None:
            return self._replay_iteration(done, data_iter)
        rank = self.global_rank
        try:
            return super().train_batch(data_iter)
        finally:
            self.global_rank = rank

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        check_schedule()
        self._protected(TrainIteration(self))  # in place of DeepSpeed's
        # What DeepSpeed prints and gives to monitors now is the word of the member that speaks for the job.
        self.global_rank = 0 if self._leads() else -1

    def _aggregate_total_loss(self) -> torch.Tensor:
        """The iteration's mean loss; the commit has agreed on it."""
        assert self._committed is not None
        losses = self._committed.losses
        self.dp_group_loss = torch.tensor(losses[self._home.role.pipeline][0], dtype=torch.float32, device=self.device)
        names = list(self.module.get_additional_losses() or {})
        self.agg_additional_losses = {
            n: self._mean_loss([x[1 + i] for x in losses]) for i, n in enumerate(names)
        } or None
        return self._mean_loss([x[0] for x in losses])

    def _mean_loss(self, losses: Sequence[float]) -> torch.Tensor:
        """Mean of one loss over the copies of the model, of the slice that the script runs as."""
        layout = self._layout
        return mean_over_pipelines(losses[layout.slice_of(self._home.role) :: layout.slices]).to(self.device)

    def _collect_leftovers(self, micro_batches: int, gradients: bool) -> None:
        """Take in labels (and gradients for shadows) that were not needed; their senders drained before the commit."""
        try:
            self._batches.end(micro_batches)
            for (stream, _), lane in self._lanes.streams.items() if gradients else ():
                if stream is Stream.SHADOW_GRADIENT and lane.destination == self._job.session.member:
                    self._transport.take(lane)  # those of the next iteration depend on what this member does in it
        except EpochChanged:
            # The operation has committed; what was left of it in the lanes is gone with their epoch.
            self._batches.drop()

    def _leads(self) -> bool:
        """Whether this member owns the role of rank 0, whose owner speaks for the job."""
        return self._plan.owners[0] == self._job.session.member

    def _speaks(self) -> bool:
        """Whether this member leads, and its script is where the job is."""
        return not self._joining and self._leads()

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
            loss=mean_over_pipelines([x[0] for x in self._committed.losses[:: layout.slices]]).item(),
            seconds=seconds,
            frc_done=self._committed.redundant,
            frc_total=shadowed * self.micro_batches,
        )

    # -- evaluation ---------------------------------------------------------------------------------------

    @engine_call
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
            self.module.eval()
            found = self._mean_loss(recorded)
            return (found, None) if return_logits else found
        if self._dataset is not None and not self._told_iterators:
            # Anybody can draw from the dataset, but not from what the script evaluates on.
            self._told_iterators = True
            self._job.channel.report_layout(self._layout, self._mode.replicas)
        self.eval_return_logits = return_logits
        self._compute_loss = compute_loss
        evaluation = Evaluation(self, data_iter, micro_batches, reduce_output)
        self._protected(evaluation)
        self.module.eval()  # DeepSpeed leaves it so until the next iteration
        self._compute_loss = True
        self.eval_return_logits = False
        result: Any = evaluation.losses.get(self._home.role.pipeline)
        if compute_loss and (bcast_loss or self.monitor.enabled or self.is_last_stage()) and reduce_output is not None:
            assert self._vector is not None
            result = self._mean_loss(self._vector)
        if self.monitor.enabled and result is not None:
            self.monitor.write_events([("Train/Samples/eval_loss", result.mean().item(), self.global_samples)])
        if return_logits:
            outputs, self.outputs = self.outputs, None
            return result, outputs
        return result

    # -- checkpoints --------------------------------------------------------------------------------------

    @engine_call
    def save_checkpoint(
        self,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's. The folder of the checkpoint appears when it is complete, never before.

        It returns after a copy to host memory (``bamboo.checkpoint.asynchronous``); a failure to write is an event.

        Returns:
            Whether the checkpoint is being written, or complete if it was waited for.

        Raises:
            CheckpointError: ``tag`` cannot name a checkpoint inside ``save_dir``.
        """
        if not save_dir:
            raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
        name = check_tag(str(tag) if tag is not None else f"global_step{self.global_steps}")
        recorded = self._recorded("save")
        if recorded is not None:
            return recorded["save_id"] is not None

        def save() -> None:
            with self._answering(self._binding.current, ignore):
                self._save_checkpoint(save_dir, name, client_state or {}, exclude_frozen_parameters)
                if self.save_zero_checkpoint:
                    self._save_zero_checkpoint(save_dir, name)
            role = self._binding.current
            save_kept(role, Path(save_dir, name), self._layout.rank(role.role), self.checkpoint_engine.save)

        operation = CheckpointSave(self, save_dir, name, save_latest, save)
        self._protected(operation)
        return operation.succeeded

    def _copy_recovery_script(self, save_path: str) -> None:
        os.makedirs(save_path, exist_ok=True)  # the checkpoint itself comes later
        super()._copy_recovery_script(save_path)

    @engine_call
    def load_checkpoint(self, load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; replicas get the loaded state too. Call it before or between iterations.

        A member that joins gets the newest checkpoint that the job has written since, if that is in ``load_dir``, and
        goes on from there.
        """
        load = super().load_checkpoint
        if self._resumed is not None:
            return self._load_resumed(lambda name: load(load_dir, name, *args, **kwargs), load_dir, tag)
        if self._job.replaying:
            return self._replay_load(lambda name: load(load_dir, name, *args, **kwargs), load_dir, tag)
        if self._history.save_folders():
            # It may be the one that is being written.
            self._saves.wait()
            self._transport.barrier()
        result = self._load_roles(load_dir, tag, None, *args, **kwargs)
        name = os.path.relpath(os.path.dirname(result[0]), load_dir) if result[0] is not None else None
        self._history.add("load", {"folder": os.path.abspath(load_dir), "tag": name})
        return result

    # -- end ----------------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._leave_to_script()  # nothing is computed with what the script has changed after its last call
        with self._inside():
            self._end()

    def _end(self) -> None:
        if not self._joining:
            self._protected(End(self))
        self._cancel_copies()
        self._snapshots.close()
        self._saves.close()
