"""The parts of an engine, put together: each is given what it needs, and knows of no other."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ..comm.script import ScriptCollectives
from ..comm.standing import Stand
from ..config import BambooConfig
from ..topology import Layout, Role
from .checkpoints.saving import HostCopyEngine, Saves
from .context.history import History
from .context.records import CurrentEpoch, Progress
from .data.accounts import Accounts
from .data.batches import Batches
from .data.dataset import Dataset
from .data.reading import Reading
from .data.supply import BatchSupply, Needs
from .iteration.block_times import BlockTimes
from .iteration.boundaries import Boundaries
from .iteration.bubbles import IdleTimes
from .iteration.committing import Commits
from .iteration.division import Division
from .iteration.exactness import ExactChecks
from .iteration.generators import RoleGenerators
from .iteration.passes import Passes
from .iteration.reduction import Reduction
from .iteration.redundant import RedundantPasses
from .iteration.replication import Replication
from .iteration.slices import SlicedPasses, mode_for
from .iteration.stage_memory import PassBytes, local_stage
from .iteration.steps import Steps
from .joining.joining import Joining
from .joining.loading import Loader
from .joining.replay import Replay
from .joining.resuming import Resuming
from .operations.checkpointing import Checkpoints, End
from .operations.evaluation import Evaluation
from .operations.script_calls import ScriptCalls
from .operations.training import Training
from .operations.visits import StageVisits
from .recovery.announcements import Announcements
from .recovery.copies import Copies
from .recovery.protocol import RecoveryProtocol
from .recovery.takeover import Takeover
from .replicas.building import StageBuilder
from .replicas.construction import Construction, Snapshots
from .script.flags import FLAGS, flags_here
from .stage.deepspeed_adapter import DeepSpeedAdapter
from .stage.groups import RoleGroups
from .stage.layers import Layers
from .stage.runtime import RuntimeBinding, StageRuntime
from .stage.schedulers import Pristine
from .stage.tied import tied_stages
from .stage.wrappers import stage_optimizer
from .telling.beats import Beats
from .telling.mismatches import Mismatches
from .telling.monitors import JobTags, Monitors
from .telling.recording import Recording

if TYPE_CHECKING:
    from ..worker.job import Job


class Parts:
    """What the engine delegates to; see :mod:`bamboo_ds.engine` for who calls whom.

    Args:
        engine: built by DeepSpeed.
        job: this process's job.
        settings: the block.
        layout: the logical world.

    Raises:
        UnsupportedError: the script's scheduler cannot be copied, or its checkpoint engine not be replaced.
    """

    def __init__(self, engine: PipelineEngine, job: Job, settings: BambooConfig, layout: Layout) -> None:
        self.job, self.layout = job, layout
        self.ds = ds = DeepSpeedAdapter(engine)
        redundancy, channel, session = settings.redundancy, job.channel, job.session
        mode = mode_for(redundancy.mode, layout, ds.global_rank)
        ds.send_whole()
        ds.fwd_outputs = []

        # What is shared.
        self.groups = groups = RoleGroups(session, layout)
        role = layout.role(ds.global_rank)
        local = StageRuntime(role, owned=not channel.joiner, blocks=layout.blocks_of(role.stage))
        self.binding = binding = RuntimeBinding(engine, local)
        local.layers, local.optimizer = Layers(local.module), stage_optimizer(ds, groups, local)
        self.epoch = epoch = CurrentEpoch(job, layout, mode.eager_backward)
        self.progress = progress = Progress(torch.initial_seed())
        history, batches, idle = (
            History(layout.slices),
            Batches(layout.slices, Reading(binding, groups).batches),
            IdleTimes(),
        )
        beats, generators = Beats(job, progress), RoleGenerators(ds, layout, progress, history)
        recording = Recording(ds, binding, progress, channel.spans, settings.observe.timeline)
        self.accounts = accounts = Accounts(settings.observe.ledger, session.member)
        brought = ds.client_lr_scheduler is not None and ds.lr_scheduler is not None
        if brought:
            local.pristine = Pristine(ds.lr_scheduler, ds.basic_optimizer, given=ds.client_lr_scheduler)
        #: Settings of the process that decide how tensors are computed, equal on all members.
        self.flags = flags_here(ds.device)
        answers = {History.PREFIX: history.answer, FLAGS: lambda _: json.dumps(self.flags)}
        snapshots = Snapshots(session.address, settings.topology.transfer_mb_per_s, answers, channel.secret)
        constructions: dict[Role, Construction] = {}
        host = ds.checkpoint_engine = HostCopyEngine(ds.checkpoint_engine)
        self.saves = saves = Saves(job, settings.checkpoint, host, history)
        self.collectives = collectives = ScriptCollectives(
            session, lambda: self.script.place(), lambda: self.script.recover(), lambda told: self.script.tell(told)
        )
        dataset = _dataset_of(ds, layout)
        stage, limit = local_stage(ds, layout, mode.eager_backward), settings.topology.memory_limit
        needs = Needs(partial(channel.report_layout, layout, mode.replicas, stage=stage, memory=limit), dataset is None)
        self.report_layout = needs.tell_all
        self.supply = supply = BatchSupply(
            ds, binding, epoch, progress, batches, accounts, dataset, ds.data_iterator, history, needs
        )

        # Passes, reduction, commit, step.
        self.reduction = reduction = Reduction(ds, binding, epoch, tied_stages(ds.module))
        self.builder = builder = StageBuilder(ds, layout, groups, binding)
        stops = redundancy.on_mismatch == "stop"
        asked = redundancy.check_exact is not None
        self.checks = checks = ExactChecks(ds, stops, asked, binding, epoch, progress, reduction, builder, beats)
        self.slices = slices = SlicedPasses(ds, groups, binding)
        # Passes on other devices than CPUs go on after they have returned, unless launches wait for their kernels.
        waits = ds.device.type == "cpu" or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
        self.times = times = BlockTimes(bool(layout.blocks) and waits)
        retains = mode.replicas or layout.slices > 1
        kept = PassBytes(ds, layout, limit is not None, retains)
        self.passes = passes = Passes(
            ds, layout, binding, progress, batches, accounts, slices, generators, idle, checks, times, kept
        )
        self.boundaries = boundaries = Boundaries(ds, binding, epoch, progress, idle, retains)
        self.division = division = Division(ds, binding, epoch, progress, boundaries, reduction)
        self.redundant = redundant = RedundantPasses(
            ds, redundancy, mode, binding, epoch, progress, batches, passes, boundaries, idle, checks, recording
        )
        self.commits = commits = Commits(ds, binding, epoch, progress, batches, accounts, saves, checks, constructions)
        verify_every = redundancy.verify_every if mode.replicas else 0
        self.steps = steps = Steps(ds, layout, groups, binding, progress, generators, verify_every)
        mismatches = Mismatches(redundancy.verify_every)
        self.replication = replication = Replication(
            binding, epoch, progress, boundaries, steps, constructions, mismatches
        )

        # Takeover, copies, replay.
        self.copies = copies = Copies(binding, epoch, progress, builder, steps, snapshots, constructions, times, kept)
        self.joining = joining = Joining(job, binding, progress, history, saves, accounts, checks)
        announcements = Announcements(binding, epoch, progress)
        self.recovery = recovery = RecoveryProtocol(
            *(ds, binding, epoch, progress, reduction.tied_stages, builder, boundaries, replication),
            *(commits, copies, supply, saves, history, collectives, joining.take_over, checks),
            *(announcements, recording),
        )
        self.takeover = takeover = Takeover(
            binding, epoch, progress, recovery, commits, replication, checks, collectives, beats, announcements
        )
        self.resuming = resuming = Resuming(epoch, progress, history, joining)
        self.loader = loader = Loader(ds, layout, groups, binding, progress, copies, replication)
        self.replay = replay = Replay(job, progress, history, joining, resuming, loader, takeover, self.report_layout)
        self.script = ScriptCalls(
            *(binding, epoch, progress, builder, copies, replay, takeover, collectives, announcements)
        )

        # What the script calls.
        self.training = Training(
            *(ds, redundancy, mode, binding, epoch, progress, supply, replay, takeover, division, redundant),
            *(commits, steps, replication, copies, checks, saves, history, beats, recording),
            JobTags(ds, epoch, progress),
        )
        self.evaluation = Evaluation(
            *(ds, binding, epoch, progress, supply, replay, takeover, passes, replication, commits, copies, saves),
            *(history, beats, recording),
        )
        self.checkpoints = Checkpoints(
            *(ds, groups, binding, epoch, progress, replay, takeover, commits, copies, loader, saves, history),
            *(recording, settings.checkpoint.asynchronous),
        )
        self.visits = StageVisits(
            *(engine, groups, binding, epoch, progress, replay, takeover, commits, copies, saves, history)
        )
        self.end = End(epoch, progress, commits, saves)
        ds.monitor = Monitors(ds.monitor, ds.global_rank, session, lambda: not progress.joining and epoch.leads)

    def stand(self) -> Stand | None:
        """Where the script is, for members that wait for it; from any thread. ``None``: it replays, or is in neither
        an operation nor a collective."""
        call, begun, progress = self.progress.call, self.collectives.first_begun(), self.progress
        if self.replay.under_way or (call is None and begun is None):
            return None
        rank, done = self.job.channel.rank, self.collectives.completed()
        if call is not None:
            return Stand(rank, *call, progress.steps, done=done)
        assert begun is not None
        return Stand(rank, progress.sequence, begun.name, progress.steps, begun.key, begun.number, begun.ranks, done)

    def leave(self) -> None:
        """The script has ended."""
        self.script.leave()  # nothing is computed with what the script has changed after its last call
        with self.script.inside():
            if not self.progress.joining:
                self.takeover.run(self.end)
                self.visits.tell_absent()
            self.copies.close()
            self.saves.close()


def _dataset_of(ds: DeepSpeedAdapter, layout: Layout) -> Dataset | None:
    """The ``training_data`` of ``deepspeed.initialize``, if it was given."""
    data: Any = ds.training_data
    if not data:
        return None
    size = ds.micro_batch_size()
    dataset = Dataset(data, layout.copies, size, lambda sampler: ds.loader_of(data, data_sampler=sampler))
    if ds.data_iterator is not None:  # DeepSpeed opens one at the ends of a pipeline
        dataset.adopt(ds.grid.data_parallel_id, ds.data_iterator)
    return dataset
