"""DeepSpeed's engine as the parts of this package see it: all that they read, set and call of it stands here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Literal, TypeVar

import torch
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, LoadMicroBatch, PipeInstruction

from ... import compat
from ...state.universal import Loading

_T = TypeVar("_T")


class _Of(Generic[_T]):
    """An attribute or a method of DeepSpeed's engine, under the same name if no other is given."""

    def __init__(self, name: str = "") -> None:
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, adapter: DeepSpeedAdapter, owner: type) -> _T:
        return getattr(adapter.engine, self._name)

    def __set__(self, adapter: DeepSpeedAdapter, value: _T) -> None:
        setattr(adapter.engine, self._name, value)


class DeepSpeedAdapter:
    """DeepSpeed's engine. Where it concerns a stage, it is that of the role that is bound (:mod:`.runtime`).

    Args:
        engine: DeepSpeed's. Nothing but this class and :class:`~.runtime.RuntimeBinding` reaches into it.
    """

    # What holds for the process.
    device = _Of[torch.device]()
    num_stages = _Of[int]()
    micro_batches = _Of[int]()
    is_data_parallel = _Of[bool]()
    communication_data_type = _Of[torch.dtype]()
    reduces_gradients = _Of[bool]("pipeline_enable_backward_allreduce")
    training_data = _Of[Any]()
    data_iterator = _Of[Any]()
    batch_fn = _Of[Any]()
    client_lr_scheduler = _Of[Any]()
    checkpoint_engine = _Of[Any]()
    timers = _Of[Any]()
    monitor = _Of[Any]()
    gradient_clipping = _Of[Callable[[], float]]()
    train_batch_size = _Of[Callable[[], int]]()
    micro_batch_size = _Of[Callable[[], int]]("train_micro_batch_size_per_gpu")
    set_data_iterator = _Of[Callable[[Any], None]]("set_dataiterator")
    loader_of = _Of[Callable[..., Any]]("deepspeed_io")
    # The bound role: what it is.
    module = _Of[Any]()
    optimizer = _Of[Any]()
    basic_optimizer = _Of[Any]()
    lr_scheduler = _Of[Any]()
    param_names = _Of[Any]()
    grid = _Of[Any]()
    mpu = _Of[Any]()
    global_rank = _Of[int]()
    stage_id = _Of[int]()
    is_first_stage = _Of[Callable[[], bool]]()
    is_last_stage = _Of[Callable[[], bool]]()
    # The bound role: its passes and steps.
    pipe_buffers = _Of[dict[str, list[Any]]]()
    grad_layer = _Of[Any]()
    loss = _Of[Any]()
    total_loss = _Of[Any]()
    total_additional_losses = _Of[Any]()
    fwd_outputs = _Of[list[Any]]()
    global_steps = _Of[int]()
    global_samples = _Of[int]()
    reserve_pipe_buffers = _Of[Callable[[int], None]]("_reserve_pipe_buffers")
    scaled_by_micro_batches = _Of[Callable[[torch.Tensor], torch.Tensor]]("_scale_loss_by_gas")
    reduce_outputs = _Of[Callable[..., Any]]("_reduce_outputs")
    reduce_in_buckets = _Of[Callable[..., None]]("buffered_allreduce_fallback")
    # What a call of the script returns or leaves behind.
    eval_return_logits = _Of[bool]()
    compute_loss = _Of[bool]("_compute_loss")
    outputs = _Of[Any]()
    agg_train_loss = _Of[Any]()
    agg_additional_losses = _Of[Any]()
    dp_group_loss = _Of[Any]()

    def __init__(self, engine: PipelineEngine) -> None:
        self.engine: Any = engine

    # -- settings -----------------------------------------------------------------------------------------

    @property
    def precision(self) -> Literal["fp32", "fp16", "bf16"]:
        """The precision of parameters."""
        return "fp16" if self.engine.fp16_enabled() else "bf16" if self.engine.bfloat16_enabled() else "fp32"

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether bf16 adds gradients up in fp32."""
        return self.engine._config.grad_accum_dtype in (None, "fp32")

    @property
    def zero_stage(self) -> int:
        """Stage of ZeRO."""
        return int(self.engine.zero_optimization_stage())

    # -- instructions and passes --------------------------------------------------------------------------
    # Handlers that compute are looked up in DeepSpeed's map: a script may have wrapped them there.

    def execute(self, instruction: PipeInstruction, channels: object) -> None:
        """Executes an instruction over ``channels`` as the engine's ``HANDLERS`` have it."""
        self.engine.HANDLERS[type(instruction)](self.engine, channels, **instruction.kwargs)

    def load_micro_batch(self, buffer_id: int) -> None:
        """Loads as DeepSpeed; it asks the engine's ``_next_batch`` for the batch."""
        self.engine._INSTRUCTION_MAP[LoadMicroBatch](self.engine, buffer_id=buffer_id)

    def forward_pass(self, buffer_id: int) -> None:
        """DeepSpeed's forward pass, from ``inputs`` to ``outputs`` or ``loss``."""
        self.engine._INSTRUCTION_MAP[ForwardPass](self.engine, buffer_id=buffer_id)

    def backward_pass(self, buffer_id: int) -> None:
        """DeepSpeed's backward pass, of ``loss`` or from ``grad_layer``."""
        self.engine._INSTRUCTION_MAP[BackwardPass](self.engine, buffer_id=buffer_id)

    def gradients(self) -> list[torch.Tensor]:
        """Gradients of the trainable parameters, as DeepSpeed reduces them."""
        return self.engine._get_gradients_for_reduction()[0]

    def scales(self, pipelines: int) -> tuple[float, float]:
        """The factors by which DeepSpeed multiplies gradients, before and after they are summed over ``pipelines``."""
        if not compat.averages_gradients(self.engine):
            return 1.0, 1.0
        if not self.engine.postscale_gradients():
            return 1.0 / pipelines, 1.0
        factor = float(self.engine.gradient_predivide_factor())
        return 1.0 / factor, factor / pipelines

    def train_batch(self, data_iter: Any) -> torch.Tensor:
        """Trains as DeepSpeed; it calls the engine's ``_exec_schedule`` and ``_aggregate_total_loss``."""
        return PipelineEngine.train_batch(self.engine, data_iter)

    # -- steps --------------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """DeepSpeed's step with its reports; it calls the engine's ``_take_model_step``."""
        PipelineEngine._exec_optimizer_step(self.engine)

    def quiet_step(self) -> None:
        """The same without reports."""
        self.engine._force_grad_boundary = True
        self.engine._take_model_step(None)
        self.engine._force_grad_boundary = False

    def step_settings(self) -> dict[str, Any]:
        """Settings of steps that are not bound to a role; scripts may change them between two iterations."""
        return {name: getattr(self.engine._config, name) for name in ("train_batch_size", "gradient_clipping")}

    @contextmanager
    def with_step_settings(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """In the body steps go by what :meth:`step_settings` gave. What was the same may change there."""
        own = vars(self.engine._config)
        now = {name: own[name] for name, value in settings.items() if own[name] != value}
        own.update(settings)
        try:
            yield
        finally:
            own.update(now)

    def take_model_step(self, lr_kwargs: Any) -> None:
        """The step itself: clipping (the engine's ``clip_fp32_gradients``), optimizer, scheduler, counters."""
        PipelineEngine._take_model_step(self.engine, lr_kwargs)

    def note_step(self, skipped: bool) -> None:
        """Counts a step that was done elsewhere, but for the learning-rate scheduler."""
        self.engine.global_steps += 1
        self.engine.global_samples += self.train_batch_size()
        if skipped:
            self.engine.skipped_steps += 1
        self.engine._step_applied = not skipped

    # -- stages -------------------------------------------------------------------------------------------

    def put_module(self, module: Any) -> None:
        """Makes ``module`` the one of the bound role."""
        self.engine.__dict__["module"] = self.engine._modules["module"] = module

    def cast_module(self) -> None:
        """Gives the module the precision that DeepSpeed has given to the engine's own."""
        compat.cast_module(self.engine)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, like: Any) -> Any:
        """DeepSpeed's optimizer around ``optimizer``, of the kind and with the settings of ``like``."""
        return compat.wrap_optimizer(self.engine, optimizer, like)

    def scheduler_from_config(self) -> Any:
        """A learning-rate scheduler for the bound role's optimizer, as the configuration has it."""
        return self.engine._scheduler_from_config(self.optimizer)

    def make_forward_hooks(self) -> None:
        """Makes the hooks that DeepSpeed runs around a forward pass, for the bound role."""
        self.engine.module_forward_pre_hook = self.engine._create_module_forward_pre_hook()
        self.engine.module_forward_post_hook = self.engine._create_module_forward_post_hook()

    def send_whole(self) -> None:
        """Sends boundary tensors whole: each of a role's holders must be able to go on from them alone.

        DeepSpeed's ``pipe_partitioned`` and ``grad_partitioned`` send every slice a part of a tensor that all slices
        have whole, before and after. So without them nothing is computed differently.
        """
        self.engine.is_pipe_partitioned = self.engine.is_grad_partitioned = False

    # -- checkpoints --------------------------------------------------------------------------------------

    def save_files(self, folder: str, tag: str, client_state: dict[str, Any], exclude_frozen: bool) -> None:
        """Gives the files of the bound role to the checkpoint engine."""
        info = getattr(self.engine.module, UNIVERSAL_CHECKPOINT_INFO, None)
        if callable(info):
            # A method of Megatron's modules. DeepSpeed would save it as it is where the script gives no such entry.
            client_state = {UNIVERSAL_CHECKPOINT_INFO: info(), **client_state}
        self.engine._save_checkpoint(folder, tag, client_state, exclude_frozen)
        if self.engine.save_zero_checkpoint:
            self.engine._save_zero_checkpoint(folder, tag)

    def loading(self, state: bool) -> Loading:
        """The way in which checkpoints are loaded; ``state``: with the optimizer's state."""
        universal, zero = self.engine.load_universal_checkpoint(), self.engine.zero_optimization()
        return Loading(bool(universal), bool(zero), state)

    def load_checkpoint(self, folder: str, tag: str | None, *args: Any, **kwargs: Any) -> Any:
        """Loads as DeepSpeed, for the bound role."""
        return PipelineEngine.load_checkpoint(self.engine, folder, tag, *args, **kwargs)
