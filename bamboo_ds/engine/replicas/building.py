"""Runtimes for roles that this member did not begin with: replicas, and roles cloned from another pipeline."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.timer import NoopTimer
from torch import nn

from ...bare import bare
from ...comm.attachment import INSTALLER
from ...config import RedundancyMode
from ...devices import staging
from ...devices.accelerators import HOST, on_host
from ...errors import ProtocolError
from ...stages import built
from ...state import join, split
from ...topology import Plan, Role
from ..context.shared import InContext
from ..stage.answers import ignore
from ..stage.chunks import unchunked
from ..stage.clones import PristineOptimizer, begin_groups, unstepped
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
        compiled_with: the way in which the script has had the modules compiled, if it has.
    """

    compiled_with: dict[str, Any] | None = None
    _pristine: PristineOptimizer | None = field(default=None, init=False)
    _told: tuple[list[Role], bool, str | None] | None = field(default=None, init=False)
    #: Why the device had no room for replicas in the epoch of this number.
    _full: tuple[int, str] | None = field(default=None, init=False)

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

    @property
    def parks(self) -> bool:
        """Whether replicas that compute nothing are in host memory, where all are made."""
        return staging.current() is not None and self.resident is None

    @property
    def resident(self) -> str | None:
        """The reason why replicas stay on this member's device; ``None`` if they can wait in host memory."""
        if not self.settings.redundancy.park:
            return "redundancy.park is false"
        if self.mode.eager_forward and self.mode is not RedundancyMode.AUTO:
            return f"in redundancy.mode {self.mode.value} they compute"
        optimizer = self.binding.local.optimizer
        if any(master.dtype != torch.float32 for master in optimizer.masters()):
            return "masters are in lower precision, in which devices may round otherwise"
        return None if optimizer.inner is None else unchunked(optimizer.inner)

    def build(self, role: Role, state: Any, pristine: Pristine | None, parked: bool = False) -> StageRuntime:
        """A runtime for ``role`` with ``state``; not yet one of this member's.

        Args:
            state: what :func:`.replica.capture` gave on its owner.
            pristine: what its scheduler is made of, if it is one that scripts have brought.
            parked: in host memory; the local one never is.

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
        runtime.pristine, runtime.parked = pristine, parked
        with self._making(runtime):
            self._make_module(runtime, state)  # by constructors of the script, which may ask for the device
            self._give_optimizer(runtime, state)
            self.ds.make_forward_hooks()
            runtime.layers = Layers(runtime.module)
            self.restore(runtime, state)
        runtime.begin_iteration()
        return runtime

    @contextmanager
    def _making(self, runtime: StageRuntime) -> Iterator[None]:
        """The body makes parts of ``runtime``, which is bound in it."""
        # Scripts evaluate without gradients, and optimizers hook into the graph.
        with self.binding.bound(runtime), torch.inference_mode(False), torch.enable_grad():
            yield

    @contextmanager
    def at_home(self, runtime: StageRuntime) -> Iterator[None]:
        """In the body DeepSpeed's own code computes where the tensors of ``runtime`` are, which is bound."""
        if not runtime.parked:
            yield
            return
        timers, self.ds.timers = self.ds.timers, NoopTimer()  # these are the device's
        try:
            with on_host():
                yield
        finally:
            self.ds.timers = timers

    def move(self, runtime: StageRuntime, parked: bool) -> None:
        """Moves a runtime between host memory and the device; for its owner and for passes it has to be there.

        It has begun no passes, or they are forgotten. What members have sent for its step stays where it is.

        Raises:
            torch.OutOfMemoryError: the device has no room for it, so that it stays parked.
        """
        if runtime.parked is parked:
            return
        runtime.catch_up()
        self.binding.refresh()
        state, verification = capture(runtime), runtime.verification
        with self._making(runtime):
            runtime.optimizer.clear()
            runtime.optimizer.release()
        try:
            self._move(runtime, state, parked)
        except Exception:
            self._move(runtime, state, not parked)
            raise
        finally:
            runtime.verification = verification

    def _move(self, runtime: StageRuntime, state: Any, parked: bool) -> None:
        runtime.parked = parked
        with self._making(runtime):
            relocate(runtime.module, runtime.device(self.ds.device))
            runtime.layers.follow_parameters()
            self.groups.connect_ties(runtime.module, runtime.role)
            self._give_optimizer(runtime, state)
            self.restore(runtime, state)

    def _give_optimizer(self, runtime: StageRuntime, state: Any) -> None:
        """Makes the optimizer of the bound ``runtime`` where its tensors are to be."""
        with self.at_home(runtime):
            self._make_optimizer(runtime, state)
        if self._rests(runtime):
            runtime.optimizer.rest()

    def _rests(self, runtime: StageRuntime) -> bool:
        """Whether the optimizer of a role, which is on the device, is in host memory between steps."""
        return self._tight and not runtime.parked and runtime is not self.binding.local

    @property
    def _tight(self) -> bool:
        """Whether optimizers of this member's roles, but for the local one's, rest while these are on the device."""
        return self.parks and self.epoch.member in dict(self.epoch.plan.tight)

    def make_room(self) -> None:
        """Brings optimizers to host memory, or back to the device, as the plan in force has it."""
        for runtime in self.binding.runtimes.values():
            if self._rests(runtime) is not runtime.optimizer.resting:
                with self._making(runtime):
                    self._rouse(runtime) if runtime.optimizer.resting else runtime.optimizer.rest()

    def _rouse(self, runtime: StageRuntime) -> None:
        try:
            runtime.optimizer.rouse()
        except torch.OutOfMemoryError as error:
            logger.warning("the optimizer of role %s stays in host memory: %s", runtime.role, error)
            runtime.optimizer.rest()

    def park(self, plan: Plan) -> None:
        """Parks the replicas that have computed nothing in this iteration, and under ``plan`` do not.

        But for the local one, which is the script's own.
        """
        for runtime in self._foreign() if self.parks else ():
            computes = self._ahead(plan, runtime.role) or plan.lending(runtime.role) is not None
            if not computes and not runtime.share.begun:
                self.move(runtime, parked=True)

    def place(self, plan: Plan) -> None:
        """Has replicas where they are to be under ``plan``: parked, or on the device; tells it where that changes.

        Those that the device has no room for stay parked until the next plan.
        """
        foreign = self._foreign()
        self.make_room()
        if staging.current() is None:
            return
        self.park(plan)
        resident = self.resident
        for runtime in foreign:
            if resident is not None:
                self.move(runtime, parked=False)
            elif self._ahead(plan, runtime.role):
                self._bring(runtime, plan)
        resting = [role for role, runtime in self.binding.runtimes.items() if runtime.optimizer.resting]
        if foreign or resting or (self._told is not None and self._told[0]):
            self._tell_placed(foreign, resting, *self._placed(plan, resident))

    def _foreign(self) -> list[StageRuntime]:
        return [runtime for runtime in self.binding.replicas() if runtime is not self.binding.local]

    def _ahead(self, plan: Plan, role: Role) -> bool:
        """Whether the replica of ``role`` computes ahead of a loss, as there is room for it."""
        member = self.epoch.member
        able = self.mode.eager_forward and member not in plan.parked
        return able and plan.shadow(role) == member and (self._full is None or self._full[0] != plan.epoch)

    def _bring(self, runtime: StageRuntime, plan: Plan) -> None:
        reason = ""
        try:
            self.move(runtime, parked=False)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        # Here, where the traceback does not hold what has been moved any more.
        if reason:
            self._full = plan.epoch, reason
            self.park(plan)

    def _placed(self, plan: Plan, resident: str | None) -> tuple[bool, str | None]:
        """Whether replicas that compute nothing are parked, and why they are where they are."""
        if resident is not None:
            return False, resident
        if self.mode is not RedundancyMode.AUTO:
            return True, None
        if any(stage.redundant is None for stage in plan.memory):
            return True, "what redundant passes keep is not known yet"
        if self._full is not None and self._full[0] == plan.epoch:
            return True, self._full[1]
        parked = self.epoch.member in plan.parked
        return parked, f"there is {'no ' if parked else ''}room for what redundant passes keep"

    def _tell_placed(self, found: list[StageRuntime], resting: list[Role], parked: bool, reason: str | None) -> None:
        if self._told == (resting, parked, reason):
            return
        self._told = resting, parked, reason
        where = "parked" if parked else "on the device"
        logger.info("replicas that compute nothing are %s", f"{where}: {reason}" if reason else where)
        if resting:
            names = ", ".join(map(str, resting))
            logger.info("optimizers of %s are in host memory between steps: there is no room for them", names)
        self.job.channel.event(
            "replicas_placed",
            step=self.progress.steps,
            parked=parked,
            reason=reason,
            bytes=sum(t.nbytes for runtime in found for t in runtime.tensors() if t.device.type == HOST.type),
            resting=[(role.pipeline, role.stage) for role in resting],
        )

    def restore(self, runtime: StageRuntime, state: Any) -> None:
        """Makes ``runtime`` equal to ``state``. The attributes of what is bound must be up to date."""
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
        # An optimizer keeps the tensors of a state that it loads, and there may be no room for others on the device.
        copies = [bare(t).to(HOST if self._tight else bare(t).device, copy=True) for t in tensors]
        runtime = self.build(role, join(text, copies), source.pristine)
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

    def _make_module(self, runtime: StageRuntime, state: Any) -> None:
        """Gives the bound ``runtime`` the module of its role, like the one that ``state`` is of."""
        ds, local = self.ds, self.binding.local
        module = build_stage_module(local.module, runtime.role.stage, runtime.device(ds.device))
        with left_alone(ds.device), self.groups.alone(INSTALLER):
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

    def _make_optimizer(self, runtime: StageRuntime, state: Any) -> None:
        """Gives the bound ``runtime`` an optimizer and a scheduler over its module, made as those of ``state``."""
        ds, local, module = self.ds, self.binding.local, runtime.module
        ds.param_names = {p: n for n, p in module.named_parameters()}
        own, wrapper = local.attributes["basic_optimizer"], local.attributes["optimizer"]
        ds.basic_optimizer = ds.optimizer = None
        if own is not None:
            # DeepSpeed takes those that are trainable now, as of the owner when that was made.
            held = {name for names in state["groups"] for name in names}
            for name, parameter in module.named_parameters():
                parameter.requires_grad = parameter.requires_grad or name in held
            basic = ds.basic_optimizer = self.note_optimizer(own).clone(module, state["groups"])
            if wrapper is own:
                ds.optimizer = basic
            else:
                with self.groups.acting_for(runtime.role, ignore), unstepped(basic):
                    ds.optimizer = ds.wrap_optimizer(basic, wrapper)
            begin_groups(basic, state["optimizer"]["inner"]["param_groups"])
            runtime.train_only(state["trains"])
        ds.lr_scheduler = self._make_scheduler(state, runtime.pristine)
        self.binding.refresh()
        runtime.optimizer = stage_optimizer(ds, self.groups, runtime)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> PristineOptimizer:
        """Notes the template of replicas' optimizers: this member's own, as it is when it is first noted."""
        if self._pristine is None or self._pristine.original is not optimizer:
            self._pristine = PristineOptimizer(optimizer)
        return self._pristine

    def _make_scheduler(self, state: Any, pristine: Pristine | None) -> Any:
        """A learning-rate scheduler for the bound replica's optimizer, made as the one that ``state`` is of."""
        if state["scheduler"] is None:
            return None
        if pristine is None:
            return self.ds.scheduler_from_config()
        return pristine.clone(self.ds.basic_optimizer, self.ds.optimizer)


def relocate(module: nn.Module, device: torch.device) -> None:
    """Moves ``module`` to ``device``, with the marks and the hooks that a script has put on its parameters.

    Between host memory and most devices parameters stay the objects that they are; on others torch makes new ones.
    """
    before = dict(module.named_parameters(remove_duplicate=False))
    module.to(device)
    moved: dict[int, nn.Parameter] = {}  # by the original: one that layers share stays one
    for name, original in before.items():
        path, _, attribute = name.rpartition(".")
        holder = module.get_submodule(path)
        parameter = moved.setdefault(id(original), getattr(holder, attribute))
        if parameter is original:
            continue
        setattr(holder, attribute, parameter)
        vars(parameter).update(vars(original))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if getattr(original, hooks):
                setattr(parameter, hooks, getattr(original, hooks))
