"""Runtimes for roles that this member did not begin with: replicas, copies that are being made, clones."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from deepspeed.runtime.utils import is_model_parallel_parameter

from ..comm.session import slices_name
from ..compat import cast_module, wrap_optimizer
from ..control.messages import Place
from ..errors import FatalLoss, TransferError
from ..stages import built
from ..state import join, split
from ..topology import Layout, Plan, Role
from .answers import ignore
from .clones import clone_optimizer
from .layers import Layers
from .learning import Kept, Learner, arrived, begin_fetch, snapshot_key
from .replica import build_stage_module, capture, check_structure, restore
from .rng import left_alone
from .runtime import StageRuntime
from .schedulers import Standing, take_step
from .steps import StepExecutor
from .tied import connect_ties
from .wrappers import stage_optimizer

logger = logging.getLogger("bamboo_ds")

#: Seconds at a boundary that a copy may take to catch up; it performs two iterations in any case, so it gets there.
_CATCH_UP_S = 0.05


class CopyingExecutor(StepExecutor):
    """Makes and hands out copies of roles' states."""

    # -- runtimes -----------------------------------------------------------------------------------------

    def _install_groups(self, role: Role, grid: Any, layout: Layout) -> None:
        """Give ``grid`` the groups of ``role``'s stage, under names that are equal on all members."""
        session, rank = self._job.session, layout.rank(role)
        ranks = [layout.rank(sibling) for sibling in layout.siblings(role)]
        group = session.logical_group(f"bamboo/data/{role.stage}/{layout.slice_of(role)}", ranks, rank)
        grid.dp_group, grid.dp_proc_group = ranks, group
        if layout.slices > 1:
            ranks = [layout.rank(each) for each in layout.slices_with(role)]
            group = session.logical_group(slices_name(ranks), ranks, rank)
            grid.slice_group, grid.slice_proc_group = ranks, group

    def _replica_runtime(self, role: Role) -> StageRuntime:
        """A runtime for another role, with everything that the topology determines."""
        home = self._home
        self._binding.refresh()
        layout = self._plan.world
        grid = copy.copy(home.attributes["grid"])
        grid.global_rank = layout.rank(role)
        grid.stage_id, grid.data_parallel_id = role.stage, layout.copy_of(role)
        grid.is_first_stage, grid.is_last_stage = role.stage == 0, role.stage == layout.stages - 1
        # The model-parallel group of a copy of the model is all of it: its ranks are the stages' slices.
        grid.ds_model_rank = role.stage * layout.slices + layout.slice_of(role)
        self._install_groups(role, grid, layout)
        buffers = {name: [None] * self.micro_batches for name in home.attributes["pipe_buffers"]}
        runtime = StageRuntime(role, owned=False)
        runtime.attributes = dict(home.attributes)
        runtime.attributes.update(
            stage_id=role.stage,
            prev_stage=role.stage - 1,
            next_stage=role.stage + 1,
            global_rank=layout.rank(role),
            checkpoint_mp_rank=grid.ds_model_rank,
            save_non_zero_checkpoint=layout.copy_of(role) == 0,
            data_parallel_group=grid.dp_proc_group,
            seq_data_parallel_group=grid.dp_proc_group,
            grid=grid,
            mpu=grid,
            pipe_buffers=buffers,
            num_pipe_buffers=self.micro_batches,
            loss=torch.tensor(0.0, device=self.device),
        )
        return runtime

    def _make_scheduler(self) -> Any:
        """A learning-rate scheduler for the bound replica's optimizer, made as DeepSpeed made this stage's own."""
        own = self._home.attributes["lr_scheduler"]
        if own is None:
            return None
        if self.client_lr_scheduler is None:
            return self._scheduler_from_config(self.optimizer)
        assert self._pristine is not None
        return self._pristine.clone(self.basic_optimizer)

    def _make_stage(self, runtime: StageRuntime, state: Any) -> None:
        """Give the bound ``runtime`` module, optimizer and scheduler of its role, with ``state``."""
        home = self._home
        module = build_stage_module(home.module, runtime.role.stage, self.device)
        with left_alone():
            built(module, runtime.role.stage)
        module._grid, module.global_rank = self.grid, self.global_rank
        self.__dict__["module"] = self._modules["module"] = module
        connect_ties(module, runtime.role, self._plan.world, self._job.session)
        check_structure(module, state)
        cast_module(self)
        runtime.attributes["module"] = module
        runtime.train_only(state["trains"])  # a script may freeze layers after it has built them
        for name, parameter in module.named_parameters():
            if name in state["sliced"] and not is_model_parallel_parameter(parameter):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if self._compiled_with is not None:
            module.compile(**self._compiled_with)
        module.train()
        self.param_names = {p: n for n, p in module.named_parameters()}
        basic = clone_optimizer(home.attributes["basic_optimizer"], module, state["groups"])
        self.basic_optimizer, wrapper = basic, home.attributes["optimizer"]
        if wrapper is home.attributes["basic_optimizer"]:
            self.optimizer = basic
        else:
            with self._answering(runtime, ignore):
                self.optimizer = wrap_optimizer(self, basic, wrapper)
        self.lr_scheduler = self._make_scheduler()
        self.module_forward_pre_hook = self._create_module_forward_pre_hook()
        self.module_forward_post_hook = self._create_module_forward_post_hook()
        self._binding.refresh()
        runtime.layers, runtime.optimizer = Layers(module), stage_optimizer(self, runtime)
        restore(runtime, state, self._pristine)
        self._binding.reload()

    def _build_runtime(self, role: Role, state: Any) -> StageRuntime:
        """A runtime for ``role`` with ``state``; not yet one of this member's."""
        before = self._binding.current
        self._binding.refresh()
        if role == self._home.role:
            runtime = self._home
            restore(runtime, state, self._pristine)
            if before is runtime:
                self._binding.reload()
            runtime.valid = True
            return runtime
        runtime = self._replica_runtime(role)
        self._binding.use(runtime)
        with torch.enable_grad():  # scripts evaluate without, and optimizers hook into the graph
            self._make_stage(runtime, state)
        self._binding.use(before)
        runtime.begin_iteration()
        return runtime

    def _copy_state(self, roles: Iterable[Role]) -> None:
        """Copy the full state of ``roles`` from their owners to their shadows and learners. Collective."""
        roles = list(roles)
        self._binding.refresh()
        runtimes, member = self._binding.runtimes, self._job.session.member
        for role in roles:
            lanes = self._lanes.states(role)
            if lanes and self._plan.owner(role) == member:
                text, tensors = split(capture(runtimes[role]))
                header = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
                for lane in lanes:
                    self._transport.send(lane, self._sequence, (header, *tensors))
        for role in roles:
            if self._plan.shadow(role) == member or role in self._plan.learned_by(member):
                payload = self._transport.recv(self._lanes.state(role, member), self._sequence)
                assert isinstance(payload, tuple)
                state = join(bytes(payload[0].tolist()).decode(), payload[1:])
                learner = self._learners.get(role)
                if learner is not None:
                    learner.fetch.cancel()
                    learner.runtime = self._build_runtime(role, state)
                    self._learned(learner)
                elif role in runtimes:
                    restore(runtimes[role], state, self._pristine)
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
        alike = plan.world.siblings(role)
        siblings = [r for r in self._binding.runtimes.values() if r.role in alike and r.role != role]
        if plan.world.sharded:
            siblings = []
        source = next((r for r in siblings if r.owned or r.valid), None)
        if source is None:
            raise FatalLoss([(role.pipeline, role.stage)], plan.lost, self._job.newest_checkpoint(plan))
        logger.warning("role %s goes on from the state of role %s", role, source.role)
        self._binding.refresh()
        text, tensors = split(capture(source))
        # An optimizer keeps the tensors of a state that it loads.
        runtime = self._build_runtime(role, join(text, [t.clone() for t in tensors]))
        if source.reduced is not None:
            runtime.reduced, runtime.measured = [g.clone() for g in source.reduced], source.measured
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
                self._learners[role] = Learner(role, source, begin_fetch(*source, self._job.channel.secret))

    def _cancel_copies(self) -> None:
        for learner in self._learners.values():
            learner.fetch.cancel()
            if learner.runtime not in (None, self._home):
                learner.runtime.optimizer.release()
        self._learners.clear()

    def _advance_copies(self) -> None:
        """At a boundary: offer the snapshots that are due, catch up with copies that have arrived."""
        self._binding.refresh()
        for learner in self._learners.values():
            learner.standings[self._sequence] = Standing.of(self._home)
        for role in self._snapshots.wanted():
            key = snapshot_key(self._plan.epoch, self._plan.world.rank(role))
            self._snapshots.offer(role, key, capture(self._binding.runtimes[role]), self._sequence)
        for learner in list(self._learners.values()):
            try:
                self._advance_copy(learner)
            except TransferError as error:
                logger.warning("copying role %s failed and begins again: %s", learner.role, error)
                learner.fetch = begin_fetch(*learner.source, self._job.channel.secret)

    def _advance_copy(self, learner: Learner) -> None:
        if learner.runtime is None:
            found = arrived(learner)
            if found is None:
                return
            sequence, state = found
            learner.forget(sequence)
            learner.runtime = self._build_runtime(learner.role, state)
            learner.follows = learner.standing(sequence) == Standing.of(learner.runtime)
        begin, count = time.monotonic(), 0
        whole = learner.runtime is self._home  # the script looks at it
        while learner.kept and (whole or count < 2 or time.monotonic() - begin < _CATCH_UP_S):
            self._repeat(learner, learner.runtime, learner.kept.popleft())
            count += 1
        if not learner.kept:
            self._learned(learner)

    def _learned(self, learner: Learner) -> None:
        """The copy is complete: from now on it is a replica."""
        role, runtime = learner.role, learner.runtime
        assert runtime is not None
        self._binding.runtimes[role] = runtime
        runtime.owned, runtime.valid, runtime.stale = False, True, self._plan.world.sharded
        del self._learners[role]
        logger.info("the replica of role %s is complete", role)
        self._job.channel.event(
            "replica_built",
            epoch=self._plan.epoch,
            step=self._committed_steps,
            role=[role.pipeline, role.stage],
            seconds=time.monotonic() - learner.begun,
            bytes=sum(t.nbytes for t in runtime.tensors()),
        )
        self._report_standing()

    def _repeat(self, learner: Learner, runtime: StageRuntime, kept: Kept) -> None:
        """Perform the optimizer step of an iteration that the others have done already."""
        if learner.follows:
            kept.before.give(runtime, self._pristine)
        before, committed = self._binding.current, self._committed
        runtime.reduced, runtime.received_layers = kept.reduced, kept.layers
        if kept.trained:
            runtime.train_only(kept.trained)
        self._committed = kept.committed
        self._binding.use(runtime)
        self._apply_reduced(runtime)
        self._step_quietly()
        self._binding.use(before)
        self._committed = committed
        runtime.reduced = runtime.received_layers = None
        if learner.follows:
            learner.standings[kept.sequence].give(runtime, self._pristine)

    def _report_standing(self) -> None:
        """Tell the control plane which epoch this member has entered and which replicas it holds."""
        ranks = [self._plan.world.rank(r.role) for r in self._binding.replicas() if r.valid]
        self._job.channel.standing(self._plan.epoch, ranks, self._snapshots.place)

    def _advance_home(self) -> None:
        """Count an iteration on the home runtime if its role is computed by others."""
        if self._home.role not in self._binding.runtimes:
            self._count_home_step(self._skipped())

    def _skipped(self) -> bool:
        """Whether the optimizers leave out the step of the committed iteration."""
        assert self._committed is not None
        return self._home.optimizer.skips and self._committed.skipped()

    def _count_home_step(self, skipped: bool) -> None:
        before = self._binding.current
        self._binding.use(self._home)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            take_step(self.lr_scheduler, self.train_batch_size())
        self._step_applied = not skipped
        self._binding.use(before)
