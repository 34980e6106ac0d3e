"""Runtimes for roles that this member did not begin with: replicas, copies that are being made, clones."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..control.messages import Place
from ..errors import FatalLoss, TransferError
from ..state import join, split
from ..topology import Layout, Plan, Role
from .lanes import Stream
from .learning import Kept, Learner, arrived, begin_fetch, snapshot_key
from .passes import PassExecutor
from .replica import build_replica, capture, clone_scheduler, restore
from .runtime import StageRuntime

logger = logging.getLogger("bamboo_ds")

#: Seconds at a boundary that a copy may take to catch up; it performs two iterations in any case, so it gets there.
_CATCH_UP_S = 0.05


class CopyingExecutor(PassExecutor):
    """Makes and hands out copies of roles' states."""

    # -- runtimes -----------------------------------------------------------------------------------------

    def _install_groups(self, role: Role, grid: Any, layout: Layout) -> None:
        """Give ``grid`` the data-parallel group of ``role``'s stage, under a name that is equal on all members."""
        ranks = [layout.rank(Role(d, role.stage)) for d in range(layout.pipelines)]
        group = self._job.session.logical_group(f"bamboo/data/{role.stage}", ranks, layout.rank(role))
        grid.dp_group, grid.dp_proc_group = ranks, group

    def _replica_runtime(self, role: Role) -> StageRuntime:
        """A runtime for another role, with everything that the topology determines."""
        home = self._home
        self._binding.refresh()
        layout = self._plan.world
        grid = copy.copy(home.attributes["grid"])
        grid.global_rank = layout.rank(role)
        grid.stage_id, grid.data_parallel_id = role.stage, role.pipeline
        grid.is_first_stage, grid.is_last_stage = role.stage == 0, role.stage == layout.stages - 1
        # The model-parallel group of a pipeline is the pipeline itself: its ranks are the stages.
        grid.ds_model_rank = role.stage
        self._install_groups(role, grid, layout)
        buffers = {name: [None] * self.micro_batches for name in home.attributes["pipe_buffers"]}
        runtime = StageRuntime(role, owned=False)
        runtime.attributes = dict(home.attributes)
        runtime.attributes.update(
            stage_id=role.stage,
            prev_stage=role.stage - 1,
            next_stage=role.stage + 1,
            global_rank=layout.rank(role),
            checkpoint_mp_rank=role.stage,
            save_non_zero_checkpoint=role.pipeline == 0,
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

    def _build_runtime(self, role: Role, state: Any) -> StageRuntime:
        """A runtime for ``role`` with ``state``; not yet one of this member's."""
        before = self._binding.current
        self._binding.refresh()
        if role == self._home.role:
            runtime = self._home
            restore(runtime, state)
            if before is runtime:
                self._binding.reload()
            runtime.valid = True
            return runtime
        runtime = self._replica_runtime(role)
        build_replica(self._home, runtime, state, self.device, self._scheduler_for)
        self._binding.use(runtime)
        self.module_forward_pre_hook = self._create_module_forward_pre_hook()
        self.module_forward_post_hook = self._create_module_forward_post_hook()
        self._binding.use(before)
        runtime.begin_iteration()
        return runtime

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
                    runtimes[role] = self._build_runtime(role, state)
        self._transport.drain()

    def _clone_sibling(self, role: Role, plan: Plan) -> StageRuntime:
        """A runtime for ``role``, whose holders are all lost, from the same stage of another pipeline.

        Parameters and optimizer state of the two are equal. Buffers of the module (running statistics) are the other
        pipeline's; they were never equal, and the lost ones cannot be had any more.

        Raises:
            FatalLoss: this member has no state of the stage.
        """
        siblings = [r for r in self._binding.runtimes.values() if r.role.stage == role.stage and r.role != role]
        source = next((r for r in siblings if r.owned or r.valid), None)
        if source is None:
            raise FatalLoss([(role.pipeline, role.stage)], plan.lost, self._job.newest_checkpoint)
        logger.warning("role %s goes on from the state of role %s", role, source.role)
        self._binding.refresh()
        text, tensors = split(capture(source))
        # An optimizer keeps the tensors of a state that it loads.
        runtime = self._build_runtime(role, join(text, [t.clone() for t in tensors]))
        if source.reduced is not None:
            runtime.reduced = [g.clone() for g in source.reduced]
        self._binding.runtimes[role] = runtime
        return runtime

    # -- copies in the background ---------------------------------------------------------------------------

    def _begin_copies(self, plan: Plan, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Begin the copies of ``plan``, and find out which snapshots this member has to offer."""
        member = self._job.session.member
        self._cancel_copies()
        self._snapshots.begin()
        for rank, learner in plan.learners:
            role = plan.world.role(rank)
            if rank in records[learner]["replicas"]:
                continue
            if plan.owners[rank] == member:
                self._snapshots.want(role)
            if learner == member:
                source = snapshot_key(plan.epoch, rank), Place(**records[plan.owners[rank]]["place"])
                self._learners[role] = Learner(role, source, begin_fetch(*source))

    def _cancel_copies(self) -> None:
        for learner in self._learners.values():
            learner.fetch.cancel()
        self._learners.clear()

    def _advance_copies(self) -> None:
        """At a boundary: offer the snapshots that are due, catch up with copies that have arrived."""
        self._binding.refresh()
        for role in self._snapshots.wanted():
            key = snapshot_key(self._plan.epoch, self._plan.world.rank(role))
            self._snapshots.offer(role, key, capture(self._binding.runtimes[role]), self._sequence)
        for learner in list(self._learners.values()):
            try:
                self._advance_copy(learner)
            except TransferError as error:
                logger.warning("copying role %s failed and begins again: %s", learner.role, error)
                learner.fetch = begin_fetch(*learner.source)

    def _advance_copy(self, learner: Learner) -> None:
        if learner.runtime is None:
            found = arrived(learner)
            if found is None:
                return
            sequence, state = found
            learner.forget(sequence)
            learner.runtime = self._build_runtime(learner.role, state)
        begin, count = time.monotonic(), 0
        while learner.kept and (count < 2 or time.monotonic() - begin < _CATCH_UP_S):
            self._repeat(learner.runtime, learner.kept.popleft())
            count += 1
        if learner.kept:
            return
        role = learner.role
        self._binding.runtimes[role] = learner.runtime
        learner.runtime.owned, learner.runtime.valid = False, True
        del self._learners[role]
        logger.info("the replica of role %s is complete", role)
        self._job.channel.event(
            "replica_built",
            epoch=self._plan.epoch,
            step=self._committed_steps,
            role=[role.pipeline, role.stage],
            seconds=time.monotonic() - learner.begun,
            bytes=sum(t.nbytes for t in learner.runtime.tensors()),
        )
        self._report_standing()

    def _repeat(self, runtime: StageRuntime, kept: Kept) -> None:
        """Perform the optimizer step of an iteration that the others have done already."""
        before, committed = self._binding.current, self._committed
        runtime.reduced, runtime.received_buffers = kept.reduced, kept.buffers
        self._committed = kept.committed
        self._binding.use(runtime)
        self._apply_reduced(runtime)
        self._step_quietly()
        self._binding.use(before)
        self._committed = committed
        runtime.reduced = runtime.received_buffers = None

    def _report_standing(self) -> None:
        """Tell the control plane which epoch this member has entered and which replicas it holds."""
        ranks = [self._plan.world.rank(r.role) for r in self._binding.replicas() if r.valid]
        self._job.channel.standing(self._plan.epoch, ranks, self._snapshots.place)

    def _advance_home(self) -> None:
        """Count an iteration on the home runtime if its role is computed by others."""
        if self._home.role not in self._binding.runtimes:
            self._count_home_step()

    def _count_home_step(self) -> None:
        before = self._binding.current
        self._binding.use(self._home)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self._binding.use(before)
