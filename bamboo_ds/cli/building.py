"""Runs a script up to ``deepspeed.initialize``, alone and without communication, and tells what it has built.

``python -m bamboo_ds.cli.building RESULT SCRIPT ARGUMENTS``, or ``-m MODULE`` for ``SCRIPT``; ``RANK``, ``WORLD_SIZE``
and so on are set as for a worker of rank 0. The process groups are those of a worker that has no epoch: each rank
contributes to a collective what this process does, so that a sum of ones counts the ranks. The layers of the
``PipelineModule`` are built on torch's meta device, where tensors have shapes and no memory.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ..bare import bare
from ..errors import ConfigError
from ..processes import die_with_parent
from ..topology.memory import optimizer_name

#: Seconds after which a script's operation would fail; there is nothing that one could wait for.
_WAIT_S = 60.0


@dataclass(frozen=True)
class Built:
    """The model and settings that a script has built.

    Attributes:
        problem: why a job would end here; ``None``: nothing was found.
        unknown: why the rest is not known; ``None``: it is.
        pipelines, stages, slices: of the topology.
        layers, parameters, frozen: of every stage; parameters are trainable ones, frozen are the others, of one slice.
        each: trainable parameters of every layer, one stage after the other; those that layers of a stage have tied to
            each other count with the first of them.
        optimizer: name of its class or of the configuration, as :class:`~..topology.memory.StateBytes` has it,
            or ``None``.
        precision: ``fp32``, ``fp16`` or ``bf16``.
        zero: stage of ZeRO.
        fp32_gradients: whether bf16 accumulates gradients in fp32.
        block: whether the configuration has a ``"bamboo"`` block that is enabled.
    """

    problem: str | None = None
    unknown: str | None = None
    pipelines: int = 1
    stages: int = 1
    slices: int = 1
    layers: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    each: tuple[int, ...] = ()
    optimizer: str | None = None
    precision: str = "fp32"
    zero: int = 0
    fp32_gradients: bool = True
    block: bool = False


class _NoMeta(Exception):
    """A layer cannot be built without memory."""


def main() -> None:
    """Runs the script; ends the process where the script would build its engine."""
    die_with_parent(signal.SIGKILL, os.getppid())
    result = Path(sys.argv[1])

    def end(built: Built) -> NoReturn:
        result.write_text(json.dumps(asdict(built)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    _stand_in(end)
    from ..control import script

    try:
        script.main(sys.argv[2:])
    except (NotImplementedError, RuntimeError) as error:
        if not _needs_values(error):
            raise
        end(Built(unknown=f"the script needs values of parameters, which torch's meta device has not: {error}"))


def _stand_in(end: Callable[[Built], NoReturn]) -> None:
    import deepspeed
    import deepspeed.comm.comm
    from deepspeed.runtime.pipe.module import PipelineModule

    from ..comm import attachment, backend
    from ..comm.c10d import dist
    from ..comm.calls import naming
    from ..supported import check_ranks

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiles
    original: Any = deepspeed.comm.comm.init_distributed
    original = getattr(original, "__wrapped__", original)  # without what makes a worker of this process
    begin_groups = dist.init_process_group
    attachment.publish(attachment.Attachment(timedelta(seconds=_WAIT_S)))
    backend.register()

    def init_process_group(*_: Any, **__: Any) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        begin_groups(naming.NAME, rank=rank, world_size=size, store=dist.HashStore())

    def init_distributed(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            init_process_group()
        original(*args, **kwargs)

    dist.init_process_group = init_process_group
    for module in (deepspeed, deepspeed.comm, deepspeed.comm.comm):
        module.init_distributed = init_distributed
    package: Any = sys.modules["bamboo_ds"]
    package.init_distributed = lambda config, **kwargs: init_distributed(**kwargs)
    build = PipelineModule.__init__
    signature = inspect.signature(build)

    def build_without_memory(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        try:
            check_ranks(int(os.environ["WORLD_SIZE"]), given.get("num_stages"), given.get("topology"))
            with _meta():
                build(self, *args, **kwargs)
        except ConfigError as error:
            end(Built(problem=str(error)))
        except _NoMeta as error:
            end(Built(unknown=str(error)))

    PipelineModule.__init__ = build_without_memory
    pipeline: Any = PipelineModule
    pipeline._synchronize_tied_weights = lambda self: None
    for name in ("to", "cuda", "cpu"):  # DeepSpeed calls one, and so may the script
        setattr(pipeline, name, lambda self, *_, **__: self)

    def initialize(
        args: Any = None, model: Any = None, optimizer: Any = None, config: Any = None, **others: Any
    ) -> NoReturn:
        config = config or others.get("config_params") or getattr(args, "deepspeed_config", None)
        end(_built(model, optimizer, config))

    deepspeed.initialize = initialize


def _needs_values(error: Exception) -> bool:
    """Whether torch says that a tensor of its meta device has none."""
    return re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None


@contextmanager
def _meta() -> Iterator[None]:
    """In the body layers are built on the meta device, and stay there."""
    import torch
    from deepspeed.runtime.pipe.module import LayerSpec

    build = LayerSpec.build

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return build(self, *args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if not _needs_values(error):
                raise
            raise _NoMeta(f"{self.typename.__name__} cannot be built on torch's meta device: {error}") from error

    LayerSpec.build = checked
    try:
        with torch.device("meta"):
            yield
    finally:
        LayerSpec.build = build


def _built(model: Any, optimizer: Any, source: Any) -> Built:
    from deepspeed.runtime.pipe.module import PipelineModule

    from ..config import bamboo_config, load_config
    from ..engine.replicas.refusals import check_named_optimizer
    from ..errors import BambooError
    from ..supported import check_config, check_schedule, layout_of

    if not isinstance(model, PipelineModule):
        return Built(problem="the model is no deepspeed.pipe.PipelineModule: build it as one")
    try:
        config = load_config(source) if source is not None else {}
        check_config(config)
        check_schedule()
        layout, block = layout_of(model), bamboo_config(config)
        if block is not None and optimizer is None:
            check_named_optimizer(config, block.redundancy.mode.replicas or layout.copies > 1)
    except BambooError as error:
        return Built(problem=str(error))
    parts: Any = model.parts
    with _meta():
        stages = [model._layer_specs[parts[stage] : parts[stage + 1]] for stage in range(layout.stages)]
        try:
            counts = [_parameters(specs) for specs in stages]
        except _NoMeta as error:
            return Built(unknown=str(error))
    precision = next((name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled")), "fp32")
    accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
    return Built(
        pipelines=layout.pipelines // layout.slices,
        stages=layout.stages,
        slices=layout.slices,
        layers=tuple(len(specs) for specs in stages),
        parameters=tuple(sum(trainable for trainable, _ in stage) for stage in counts),
        frozen=tuple(sum(frozen for _, frozen in stage) for stage in counts),
        each=tuple(trainable for stage in counts for trainable, _ in stage),
        optimizer=_optimizer(optimizer, config.get("optimizer") or {}),
        precision=precision,
        zero=int((config.get("zero_optimization") or {}).get("stage", 0)),
        fp32_gradients=accumulated in (None, "fp32"),
        block=block is not None,
    )


def _optimizer(given: Any, block: dict[str, Any]) -> str | None:
    name, settings = block.get("type"), [block.get("params") or {}]
    if given is not None:
        name, settings = type(given).__name__, getattr(given, "param_groups", [])
    return optimizer_name(name, settings)


def _parameters(specs: list[Any]) -> list[tuple[int, int]]:
    """Trainable and frozen parameters of each layer of a stage; those that it has tied to each other count once."""
    import torch
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    found: list[tuple[int, int]] = []
    keys = set()
    for spec in specs:
        found.append((0, 0))
        if isinstance(spec, TiedLayerSpec):
            if spec.key in keys:
                continue
            keys.add(spec.key)
        layer = spec.build() if isinstance(spec, LayerSpec) else spec
        if isinstance(layer, torch.nn.Module):
            parameters = list(torch.nn.Module.parameters(layer))
            trainable = sum(bare(each).numel() for each in parameters if each.requires_grad)
            found[-1] = trainable, sum(bare(each).numel() for each in parameters) - trainable
    return found


if __name__ == "__main__":
    main()
