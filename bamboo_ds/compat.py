"""What a bamboo job may use of DeepSpeed, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .config import BLOCK, load_config
from .errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.module import PipelineModule

    from .topology import Layout


def _enabled(config: Mapping[str, Any], name: str) -> bool:
    block = config.get(name)
    return isinstance(block, Mapping) and bool(block.get("enabled", False))


def check_config(source: Any) -> None:
    """Refuse DeepSpeed settings that bamboo_ds does not carry through a takeover yet.

    Raises:
        UnsupportedError: names the setting and what to do.
    """
    config = load_config(source)
    refused: list[tuple[str, str]] = []
    for name in ("fp16", "bf16", "bfloat16", "torch_autocast"):
        if _enabled(config, name):
            refused.append((f"{name}.enabled", "train in fp32"))
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0):
        refused.append(("zero_optimization.stage", "set it to 0"))
    if config.get("sparse_gradients"):
        refused.append(("sparse_gradients", "set it to false"))
    if _enabled(config, "flops_profiler"):
        refused.append(("flops_profiler.enabled", "profile without bamboo"))
    for name in ("curriculum_learning", "data_efficiency", "progressive_layer_drop", "eigenvalue"):
        if _enabled(config, name):
            refused.append((f"{name}.enabled", "set it to false"))
    if config.get("compression_training"):
        refused.append(("compression_training", "remove it"))
    if (config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        refused.append(("tensor_parallel.autotp_size", "remove it"))
    if refused:
        listed = "; ".join(f'"{name}": {cure}' for name, cure in refused)
        raise UnsupportedError(
            f'these settings are not supported together with "{BLOCK}" yet: {listed} (or remove "{BLOCK}")'
        )


def check_module(module: PipelineModule, layout: Layout) -> None:
    """Refuse models that bamboo_ds does not carry through a takeover yet.

    Raises:
        UnsupportedError, ConfigError: name the property and what to do.
    """
    from deepspeed.runtime.pipe.module import TiedLayerSpec

    if layout.stages < 2:
        raise ConfigError(
            f'"{BLOCK}" needs at least 2 pipeline stages, the model has {layout.stages}: raise num_stages'
        )
    tied = sorted({spec.key for spec in module._layer_specs if isinstance(spec, TiedLayerSpec)})
    if tied:
        raise UnsupportedError(f'tied layers ({", ".join(tied)}) are not supported together with "{BLOCK}" yet')
    axes = {axis: module._topo.get_dim(axis) for axis in module._topo.get_axis_names()}
    others = {axis: size for axis, size in axes.items() if axis not in ("pipe", "data") and size > 1}
    if others:
        raise UnsupportedError(f'the topology axes {others} are not supported together with "{BLOCK}" yet')
    for role in layout.roles:
        if module._topo.get_rank(**{a: 0 for a in axes} | {"pipe": role.stage, "data": role.pipeline}) != layout.rank(
            role
        ):
            raise UnsupportedError(
                f'"{BLOCK}" needs the rank order of PipeDataParallelTopology, the topology orders its axes {list(axes)}'
            )
