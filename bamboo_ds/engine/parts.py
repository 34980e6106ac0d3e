"""The parts of an engine, put together: each is given the context, and the parts that it calls."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ..comm.calls.script import ScriptCollectives
from ..comm.standing import Stand
from ..config import BambooConfig
from ..topology import Layout
from .checkpoints.saving import HostCopyEngine, Saves
from .context.history import History
from .context.shared import EngineContext, InContext
from .data.dataset import Dataset
from .data.supply import BatchSupply, Needs
from .iteration.measures import Measures, device_of, local_stage
from .iteration.parts import IterationParts
from .iteration.slices import mode_for
from .joining.loading import Loader
from .joining.replay import Replay
from .operations.checkpointing import Checkpoints, End
from .operations.evaluation import Evaluation
from .operations.monitors import Monitors
from .operations.script_calls import ScriptCalls
from .operations.training import Training
from .operations.visits import StageVisits
from .recovery.announcements import Announcements
from .recovery.copies import Copies
from .recovery.protocol import RecoveryProtocol
from .recovery.roles import RoleTransfer
from .recovery.takeover import Takeover
from .replicas.building import StageBuilder
from .replicas.construction import Snapshots
from .script.flags import FLAGS, flags_here
from .stage.deepspeed_adapter import DeepSpeedAdapter
from .stage.groups import RoleGroups
from .stage.layers import Layers
from .stage.runtime import RuntimeBinding, StageRuntime
from .stage.schedulers import Pristine
from .stage.tied import tied_stages
from .stage.wrappers import stage_optimizer

if TYPE_CHECKING:
    from ..worker.job import Job


class Parts(InContext):
    """The parts that the engine delegates to; :mod:`bamboo_ds.engine` draws their calls.

    Args:
        context: of the engine.
        supply: of batches.
        saves: of this member.
        builder: of further roles.
        snapshots: what this member offers to others.
        tied: stages whose gradients are summed with those of other stages.
        measures: what is measured of passes.
        flags: settings of the process that decide how tensors are computed, equal on all members.
    """

    def __init__(
        self,
        context: EngineContext,
        supply: BatchSupply,
        saves: Saves,
        builder: StageBuilder,
        snapshots: Snapshots,
        tied: Collection[int],
        measures: Measures,
        flags: dict[str, str],
    ) -> None:
        super().__init__(context)
        self.supply, self.saves, self.builder, self.flags = supply, saves, builder, flags
        self.collectives = collectives = ScriptCollectives(
            context.job.session,
            lambda: self.script.place(),
            lambda: self.script.recover(),
            lambda told: self.script.tell(told),
        )
        self.iteration = iteration = IterationParts(context, supply, saves, builder, tied, measures)
        self.copies = copies = Copies(context, iteration, builder, snapshots)
        announcements, roles = Announcements(context), RoleTransfer(context, builder)
        self.recovery = RecoveryProtocol(context, iteration, roles, copies, supply, saves, collectives, announcements)
        self.takeover = takeover = Takeover(context, iteration, self.recovery, collectives, announcements)
        self.loader = loader = Loader(context, copies, iteration.replication)
        self.replay = replay = Replay(context, loader, takeover, supply.needs.tell_all)

        # What the script calls.
        commits = iteration.commits
        self.script = ScriptCalls(context, builder, copies, replay, takeover, collectives, announcements)
        self.training = Training(context, iteration, supply, replay, takeover, copies, saves)
        self.evaluation = Evaluation(context, iteration, supply, replay, takeover, copies, saves)
        self.checkpoints = Checkpoints(context, replay, takeover, commits, copies, loader, saves)
        self.visits = StageVisits(context, replay, takeover, commits, copies, saves)
        self.end = End(context, commits, saves)

    def stand(self) -> Stand | None:
        """The script's stand, for members that wait for it; from any thread. ``None`` if it replays, or is in neither
        an operation nor a collective."""
        call, begun, progress = self.progress.operation.call, self.collectives.first_begun(), self.progress
        if progress.script.behind or (call is None and begun is None):
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
            if not self.progress.script.joining:
                self.takeover.run(self.end)
                self.visits.tell_absent()
            self.copies.close()
            self.saves.close()


def parts_of(engine: PipelineEngine, job: Job, settings: BambooConfig, layout: Layout) -> Parts:
    """The parts of an engine that DeepSpeed has built.

    Args:
        engine: DeepSpeed's.
        job: this process's job.
        settings: the block.
        layout: the logical world.

    Raises:
        UnsupportedError: the script's scheduler cannot be copied, or its checkpoint engine not be replaced.
    """
    ds, channel, session = DeepSpeedAdapter(engine), job.channel, job.session
    mode = mode_for(settings.redundancy.mode, layout, ds.global_rank)
    ds.send_whole()
    ds.fwd_outputs = []
    groups, role = RoleGroups(session, layout), layout.role(ds.global_rank)
    local = StageRuntime(role, owned=not channel.joiner, blocks=layout.blocks_of(role.stage))
    binding = RuntimeBinding(engine, local)
    local.layers, local.optimizer = Layers(local.module), stage_optimizer(ds, groups, local)
    context = EngineContext(ds, job, settings, mode, groups, binding)
    if ds.client_lr_scheduler is not None and ds.lr_scheduler is not None:
        local.pristine = Pristine(ds.lr_scheduler, ds.basic_optimizer, given=ds.client_lr_scheduler)

    dataset = _dataset_of(ds, layout)
    builder, limit = StageBuilder(context), settings.topology.memory_limit
    if ds.basic_optimizer is not None:
        builder.note_optimizer(ds.basic_optimizer)
    stage = local_stage(context, builder.parks)
    report = partial(channel.report_layout, stage=stage, memory=limit, device=device_of(context))
    needs = Needs(partial(report, layout, mode.replicas), dataset is None)
    supply = BatchSupply(context, dataset, ds.data_iterator, needs)
    host = ds.checkpoint_engine = HostCopyEngine(ds.checkpoint_engine)
    saves = Saves(job, settings.checkpoint, host, context.history, context.places)
    flags = flags_here(ds.device)
    answers = {History.PREFIX: context.history.answer, FLAGS: lambda _: json.dumps(flags)}
    session.offers.begin(settings.topology.transfer_mb_per_s, answers)
    snapshots = Snapshots(session.offers)
    tied, measures = tied_stages(ds.module), Measures.of(context)
    parts = Parts(context, supply, saves, builder, snapshots, tied, measures, flags)
    ds.monitor = Monitors(
        ds.monitor, ds.global_rank, session, lambda: not context.progress.script.joining and context.epoch.leads
    )
    return parts


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
