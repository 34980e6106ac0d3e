"""Training: iterations of pipeline, reduction, replication, commit, step."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import ConfigError, EpochChanged, ReplicaDiffers
from ...observe.spans import Kind
from ...schedule import Commit, Program, RecvReplica, RoleProgress, commit_program, member_program
from ...topology import Role
from ..checkpoints.saving import Saves
from ..context.operation import Outcome
from ..context.shared import InContext
from ..data.supply import BatchSupply
from ..iteration.parts import IterationParts
from ..iteration.recomputing import end_iteration
from ..joining.replay import Replay
from ..recovery.copies import Copies
from ..recovery.takeover import Takeover
from ..stage.commit import Committed, mean_over_copies, mean_over_pipelines
from ..stage.optimizers import NoOptimizer
from ..stage.schedulers import SchedulerPosition
from .monitors import JobTags

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class Training(InContext):
    """``train_batch``, and its iteration as an :class:`~..context.operation.Operation`."""

    iteration: IterationParts
    supply: BatchSupply
    replay: Replay
    takeover: Takeover
    copies: Copies
    saves: Saves
    tags: JobTags = field(init=False)
    _begin: float = field(default=0.0, init=False)

    call = "train_batch"
    draws = watched = takes_steps = goes_on = True

    def __post_init__(self) -> None:
        self.tags = JobTags(self.context)

    def train_batch(self, data_iter: Any) -> torch.Tensor:
        """The mean loss of an iteration; see :meth:`..pipeline_engine.BambooPipelineEngine.train_batch`."""
        if isinstance(self.binding.local.optimizer, NoOptimizer):
            raise ConfigError(
                "train_batch: must provide optimizer during init in order to use backward (give one to "
                "deepspeed.initialize, or name it in the configuration)"
            )
        done = self.replay.recorded("train")
        if done is not None:
            return self._replay(done, data_iter)
        rank = self.ds.global_rank
        self.iteration.exchanged.begin_training()
        try:
            mean = self.ds.train_batch(data_iter)
            self.iteration.exchanged.end_training()
            self.tags.write()
            return mean
        finally:
            self.ds.global_rank = rank

    def run_iteration(self) -> None:
        """Runs the iteration that DeepSpeed executes a schedule for."""
        self.iteration.corruption.refuse()
        self._begin = time.monotonic()
        self.binding.refresh()
        self.progress.script.position = SchedulerPosition.of(self.binding.local)
        self.copies.note_position((self.progress.sequence - 1, True))
        self.supply.use_training()
        self.iteration.checks.begin_iteration()
        with self.recording.iteration(), self.tags.iteration(), self.epoch.job.iterating():
            self.takeover.run(self)
        # What DeepSpeed prints and gives to monitors now is the word of the member that speaks for the job.
        self.ds.global_rank = 0 if self.epoch.leads else -1

    def mean_loss(self) -> torch.Tensor:
        """The iteration's mean loss, with additional ones, as DeepSpeed keeps them; the commit has agreed on it."""
        ds, losses, local = self.ds, self.progress.operation.agreed.losses, self.binding.local.role
        ds.dp_group_loss = torch.tensor(losses[local.pipeline][0], dtype=torch.float32, device=ds.device)
        means = [mean_over_copies(self.epoch.layout, local, each).to(ds.device) for each in zip(*losses, strict=True)]
        names = list(ds.module.get_additional_losses() or {})
        ds.agg_additional_losses = dict(zip(names, means[1:], strict=False)) or None
        return means[0]

    def _replay(self, done: Mapping[str, Any], data_iter: Any) -> torch.Tensor:
        """Replays an iteration that the job has done."""
        if data_iter is not None:
            self.ds.set_data_iterator(data_iter)
        self.supply.skip(self.ds.data_iterator, self.ds.micro_batches)
        self.iteration.steps.count_local(done["skipped"])
        self.progress.operation.committed = Committed(tuple(tuple(x) for x in done["losses"]), (), 0, ())
        mean = self.ds.agg_train_loss = self.mean_loss()
        self.replay.arrive()
        return mean

    # -- the operation ------------------------------------------------------------------------------------

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        micro_batches = self.ds.micro_batches
        for runtime in self.binding.runtimes.values():
            runtime.module.train()
        self.progress.operation.evaluating = False
        torch.clear_autocast_cache()  # within the script's own context it outlives steps, on each copy another time
        for runtime in self.binding.runtimes.values():
            self.binding.use(runtime)
            self.ds.reserve_pipe_buffers(micro_batches)
        self.iteration.sums.begin()
        self.iteration.division.begin(progress)
        self.supply.draw_ahead(micro_batches)
        program = member_program(
            self.epoch.plan,
            self.epoch.member,
            micro_batches,
            progress,
            bubbles=self.mode.replicas,
            sync_every=self.iteration.sums.every,
        )
        self._execute(program, until_commit=True)

    def commit(self) -> None:
        self._execute(commit_program(self.epoch.plan, self.epoch.member), until_commit=True)

    def repeatable(self) -> bool:
        return all(self.iteration.commits.is_complete(runtime) for runtime in self.binding.owned())

    def finish(self, outcome: Outcome) -> None:
        progress, committed = self.progress, outcome is Outcome.COMMITTED
        agreed = progress.operation.committed = self.iteration.commits.decoded()
        behind = outcome is Outcome.BEHIND
        settled = self.iteration.corruption.settle(agreed, self.iteration.commits.plan, behind)
        self._execute(commit_program(self.epoch.plan, self.epoch.member)[1:], until_commit=False)
        if committed:
            self.supply.collect_leftovers(self.ds.micro_batches, gradients=not progress.operation.resumed)
        else:
            self.supply.drop()
        self.binding.begin_iteration()
        progress.script.changed.clear()
        for runtime in self.binding.runtimes.values():
            if outcome is Outcome.BEHIND and runtime.trained and runtime is not self.binding.local:
                runtime.train_only(runtime.trained)  # of the next iteration, in which others are already
            else:
                runtime.trained = None
        end_iteration()
        self.iteration.redundant.end_iteration()
        self.iteration.sums.end_iteration(time.monotonic() - self._begin)
        self.supply.note_ends("train", agreed.alike)
        self.history.add_iteration(agreed.losses, self.iteration.steps.skipped(), agreed.alike)
        progress.steps += 1
        progress.consumed += self.ds.micro_batches
        self.iteration.steps.advance_local()
        self.supply.account()
        doubtful = tuple(role for role in agreed.mismatches if role not in settled)
        lasting = self._mend(doubtful) if committed else []
        measured = self.iteration.measures.times.end_iteration(time.monotonic() - self._begin)
        if self.iteration.division.note_cuts() | measured | self.iteration.measures.kept.is_news():
            self.copies.tell_replicas()
        self.copies.advance(stepped=True)
        self.copies.builder.place(self.epoch.plan)
        self.saves.poll()
        self.epoch.job.progressed(progress.steps)
        self._report_step(agreed)
        if committed:
            self._give_up(lasting)

    def _execute(self, program: Program, until_commit: bool) -> None:
        for instruction in program:
            commits = type(instruction) is Commit
            if until_commit and not commits:
                self.copies.complete_arrived(instruction.role if isinstance(instruction, RecvReplica) else None)
            if commits and self.iteration.checks.on:
                with self.recording.span(Kind.REHEARSE):
                    self.iteration.checks.rehearse()
            self.recording.execute(instruction, self.epoch.channels)
            self.beats.beat()
            if until_commit and commits:
                return

    def _report_step(self, agreed: Committed) -> None:
        if not self.epoch.leads:
            return
        plan = self.epoch.plan
        idle, lent = (None, *plan.parked), {each.rank for each in plan.lent}
        shadowed = sum(shadow not in idle and rank not in lent for rank, shadow in enumerate(plan.shadows))
        self.job.channel.event(
            "step",
            epoch=plan.epoch,
            step=self.progress.steps,
            loss=mean_over_pipelines([x[0] for x in agreed.losses[:: self.epoch.layout.slices]]).item(),
            seconds=time.monotonic() - self._begin,
            frc_done=agreed.redundant,
            frc_total=shadowed * self.ds.micro_batches,
            samples=self.ds.train_batch_size(),
            consumed=newest.model_dump() if (newest := self.progress.newest) is not None else None,
        )

    # -- replicas that differ -----------------------------------------------------------------------------

    def _mend(self, mismatches: tuple[Role, ...]) -> list[Role]:
        """Copies the state of ``mismatches`` again, but of those that differed before as well, which it returns.

        A replica stays invalid if a loss prevents it.
        """
        if not mismatches:
            return []
        step = self.progress.steps - 1
        # One that was lent has computed with what differs.
        lasting = [
            r for r in mismatches if self.iteration.replication.mismatches.note(r, step) or self.epoch.plan.lending(r)
        ]
        try:
            with self.recording.span(Kind.COPY):
                self.copies.copy_state(role for role in mismatches if role not in lasting)
        except EpochChanged as error:
            # The next operation recovers; it refuses to take a role over from an invalid replica.
            logger.warning("replicas of %s were not mended: %s", mismatches, error)
        return lasting

    def _give_up(self, lasting: list[Role]) -> None:
        """Tells of replicas of this member that have just been found to differ for ever.

        Raises:
            ReplicaDiffers: it is to end the job (``redundancy.on_mismatch``).
        """
        differing = dict(self.iteration.replication.differing)
        self.iteration.replication.differing.clear()
        optimizer = type(self.binding.local.optimizer.inner).__name__
        for role in lasting:
            if role not in differing:
                continue  # another member's, or told of before
            error = ReplicaDiffers(role.pipeline, role.stage, differing[role], optimizer)
            if not self.settings.redundancy.bears:
                raise error
            logger.error("%s", error)
