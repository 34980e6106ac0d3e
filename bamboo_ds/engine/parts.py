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
from .announcements import Announcements
from .beats import Beats
from .block_times import BlockTimes
from .boundaries import Boundaries
from .bubbles import IdleTimes
from .building import StageBuilder
from .checkpointing import Checkpoints, End
from .committing import Commits
from .construction import Construction, Snapshots
from .copies import Copies
from .data import Batches
from .dataset import Dataset
from .deepspeed_adapter import DeepSpeedAdapter
from .division import Division
from .evaluation import Evaluation
from .exactness import ExactChecks
from .flags import FLAGS, flags_here
from .generators import RoleGenerators
from .groups import RoleGroups
from .history import History
from .joining import Joining
from .layers import Layers
from .loading import Loader
from .mismatches import Mismatches
from .monitors import JobTags, Monitors
from .passes import Passes
from .reading import Reading
from .recording import Recording
from .records import CurrentEpoch, Progress
from .recovery import RecoveryProtocol
from .reduction import Reduction
from .redundant import RedundantPasses
from .replay import Replay
from .replication import Replication
from .resuming import Resuming
from .runtime import RuntimeBinding, StageRuntime
from .saving import HostCopyEngine, Saves
from .schedulers import Pristine
from .script_calls import ScriptCalls
from .slices import SlicedPasses, mode_for
from .stage_memory import PassBytes, local_stage
from .steps import Steps
from .supply import BatchSupply, Needs
from .takeover import Takeover
from .tied import tied_stages
from .training import Training
from .visits import StageVisits
from .wrappers import stage_optimizer

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
            ds, binding, epoch, progress, batches, dataset, ds.data_iterator, history, needs
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
            ds, layout, binding, progress, batches, slices, generators, idle, checks, times, kept
        )
        self.boundaries = boundaries = Boundaries(ds, binding, epoch, progress, idle, retains)
        self.division = division = Division(ds, binding, epoch, progress, boundaries, reduction)
        self.redundant = redundant = RedundantPasses(
            ds, redundancy, mode, binding, epoch, progress, batches, passes, boundaries, idle, checks, recording
        )
        self.commits = commits = Commits(ds, binding, epoch, progress, batches, saves, checks, constructions)
        verify_every = redundancy.verify_every if mode.replicas else 0
        self.steps = steps = Steps(ds, layout, groups, binding, progress, generators, verify_every)
        mismatches = Mismatches(redundancy.verify_every)
        self.replication = replication = Replication(
            binding, epoch, progress, boundaries, steps, constructions, mismatches
        )

        # Takeover, copies, replay.
        self.copies = copies = Copies(binding, epoch, progress, builder, steps, snapshots, constructions, times, kept)
        self.joining = joining = Joining(job, binding, progress, history, saves, checks)
        announcements = Announcements(binding, epoch, progress, joining)
        self.recovery = recovery = RecoveryProtocol(
            *(ds, binding, epoch, progress, reduction.tied_stages, builder, boundaries, replication),
            *(commits, copies, supply, saves, history, collectives, joining, checks),
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
        ds.monitor = Monitors(ds.monitor, ds.global_rank, session, lambda: not joining.active and epoch.leads)

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
            if not self.joining.active:
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
