"""Runtimes for roles that this member did not begin with: replicas, and roles cloned from another pipeline."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.utils import is_model_parallel_parameter

from ...errors import ProtocolError
from ...stages import built
from ...state import join, split
from ...topology import Role
from ..context.shared import InContext
from ..stage.answers import ignore
from ..stage.clones import begin_groups, clone_optimizer
from ..stage.layers import Layers
from ..stage.rng import left_alone
from ..stage.runtime import StageRuntime
from ..stage.schedulers import Pristine
from ..stage.work import Results
from ..stage.wrappers import stage_optimizer
from .replica import build_stage_module, capture, check_structure, restore

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class StageBuilder(InContext):
    """Builds runtimes.

    Attributes:
        compiled_with: how the script has had the modules compiled, if it has.
    """

    compiled_with: dict[str, Any] | None = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """The body compiles the bound module; what it does to it is done to the modules of all roles."""
        local = self.ds.module
        compile_local = local.compile

        def compile_and_note(**how: Any) -> None:
            self.compiled_with = how
            compile_local(**how)

        local.__dict__["compile"] = compile_and_note
        try:
            yield
        finally:
            del local.__dict__["compile"]
        if self.compiled_with is not None:
            for runtime in self.binding.runtimes.values():
                if runtime.module is not local:
                    runtime.module.compile(**self.compiled_with)

    def build(self, role: Role, state: Any, pristine: Pristine | None) -> StageRuntime:
        """A runtime for ``role`` with ``state``; not yet one of this member's.

        Args:
            role: the role.
            state: what :func:`.replica.capture` gave on its owner.
            pristine: what its scheduler is made of, if it is one that scripts have brought.

        Raises:
            ProtocolError: it is the local role, whose script has another scheduler by now.
        """
        local = self.binding.local
        self.binding.refresh()
        if role == local.role:
            if pristine is not local.pristine:
                raise ProtocolError("the script has replaced the scheduler while this member's stage was copied to it")
            self.restore(local, state)
            return local
        runtime = self._empty(role)
        runtime.pristine = pristine
        # Scripts evaluate without gradients, and optimizers hook into the graph.
        with self.binding.bound(runtime), torch.enable_grad():
            self._make_stage(runtime, state)
        runtime.begin_iteration()
        return runtime

    def restore(self, runtime: StageRuntime, state: Any) -> None:
        """Make ``runtime`` equal to ``state``. The attributes of what is bound must be up to date."""
        restore(runtime, state)
        if runtime is self.binding.current:
            self.binding.reload()

    def clone(self, source: StageRuntime, role: Role) -> StageRuntime:
        """A runtime for ``role``, whose holders are all lost, from ``source``: the same stage of another pipeline.

        Parameters and optimizer state of the two are equal. What layers keep besides them is the other pipeline's.
        """
        logger.warning("role %s goes on from the state of role %s", role, source.role)
        self.binding.refresh()
        text, tensors = split(capture(source))
        # An optimizer keeps the tensors of a state that it loads.
        runtime = self.build(role, join(text, [t.clone() for t in tensors]), source.pristine)
        if source.results.reduced is not None:
            reduced = [gradient.clone() for gradient in source.results.reduced]
            runtime.results = Results(reduced=reduced, measured=source.results.measured)
        self.binding.runtimes[role] = runtime
        return runtime

    def _empty(self, role: Role) -> StageRuntime:
        """A runtime for another role, with everything that the topology determines."""
        local, layout = self.binding.local, self.layout
        grid = copy.copy(local.attributes["grid"])
        grid.global_rank = layout.rank(role)
        grid.stage_id, grid.data_parallel_id = role.stage, layout.copy_of(role)
        grid.is_first_stage, grid.is_last_stage = role.stage == 0, role.stage == layout.stages - 1
        # The model-parallel group of a copy of the model is all of it: its ranks are the stages' slices.
        grid.ds_model_rank = role.stage * layout.slices + layout.slice_of(role)
        self.groups.install(role, grid)
        buffers = {name: [None] * self.ds.micro_batches for name in local.attributes["pipe_buffers"]}
        runtime = StageRuntime(role, owned=False, blocks=layout.blocks_of(role.stage))
        runtime.attributes = dict(local.attributes)
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
            num_pipe_buffers=self.ds.micro_batches,
            loss=torch.tensor(0.0, device=self.ds.device),
        )
        return runtime

    def _make_stage(self, runtime: StageRuntime, state: Any) -> None:
        """Give the bound ``runtime`` module, optimizer and scheduler of its role, with ``state``."""
        ds, local = self.ds, self.binding.local
        module = build_stage_module(local.module, runtime.role.stage, ds.device)
        with left_alone(ds.device):
            built(module, runtime.role.stage)
        module._grid, module.global_rank = ds.grid, ds.global_rank
        ds.put_module(module)
        self.groups.connect_ties(module, runtime.role)
        check_structure(module, state)
        ds.cast_module()
        runtime.attributes["module"] = module
        runtime.train_only(state["trains"])  # a script may freeze layers after it has built them
        for name, parameter in module.named_parameters():
            if name in state["sliced"] and not is_model_parallel_parameter(parameter):
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        if self.compiled_with is not None:
            module.compile(**self.compiled_with)
        module.train()
        ds.param_names = {p: n for n, p in module.named_parameters()}
        own, wrapper = local.attributes["basic_optimizer"], local.attributes["optimizer"]
        ds.basic_optimizer = ds.optimizer = None
        if own is not None:
            basic = ds.basic_optimizer = clone_optimizer(own, module, state["groups"])
            if wrapper is own:
                ds.optimizer = basic
            else:
                with self.groups.acting_for(runtime.role, ignore):
                    ds.optimizer = ds.wrap_optimizer(basic, wrapper)
            begin_groups(basic, state["optimizer"]["inner"]["param_groups"])
        ds.lr_scheduler = self._make_scheduler(state, runtime.pristine)
        ds.make_forward_hooks()
        self.binding.refresh()
        runtime.layers, runtime.optimizer = Layers(module), stage_optimizer(ds, self.groups, runtime)
        self.restore(runtime, state)

    def _make_scheduler(self, state: Any, pristine: Pristine | None) -> Any:
        """A learning-rate scheduler for the bound replica's optimizer, made as the one that ``state`` is of."""
        if state["scheduler"] is None:
            return None
        if pristine is None:
            return self.ds.scheduler_from_config()
        return pristine.clone(self.ds.basic_optimizer, self.ds.optimizer)
