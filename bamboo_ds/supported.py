"""The part of DeepSpeed that a bamboo job may use, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from .config import BLOCK, load_config
from .errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.module import PipelineModule

    from .topology import Layout


#: How DeepSpeed itself computes the gradients of pipelines wrongly, by version; A are the steps of accumulation, S the
#: stages. Up to 0.18.2 its engine scales the loss only where backward passes reduce gradients, which those of pipelines
#: do not. Since 0.18.3 hooks divide the gradients of every stage's outputs; in 0.19.3 those of the last stage alone
#: (#8152, #8154).
_FAULTS = (
    (
        SpecifierSet("<0.18.3"),
        "does not divide the gradients of pipelines by the steps of accumulation: with A steps they are too large by a "
        "factor of A",
    ),
    (
        SpecifierSet(">=0.18.3,<0.19.3"),
        "divides the gradients of pipelines by the steps of accumulation once per stage instead of once: with A steps "
        "and S stages those of the first stage are too small by a factor of A^(S-1), those of the last one are right",
    ),
)
#: What to do about each.
CURE_OF_FAULTS = "it is mended in DeepSpeed 0.19.3: pip install 'deepspeed>=0.19.3'"


def fault_of_deepspeed(version: str) -> str | None:
    """The error of DeepSpeed of that version in gradients of several steps of accumulation, or ``None``."""
    for versions, fault in _FAULTS:
        if versions.contains(version, prereleases=True):
            return f"DeepSpeed {version} {fault}. So it does without bamboo_ds, and jobs with it do the same"
    return None


def _enabled(config: Mapping[str, Any], name: str) -> bool:
    block = config.get(name)
    return isinstance(block, Mapping) and bool(block.get("enabled", False))


def check_config(source: Any) -> None:
    """Refuses DeepSpeed settings that bamboo_ds does not carry through a takeover yet.

    Raises:
        UnsupportedError: names the setting and what to do.
    """
    config = load_config(source)
    refused: list[tuple[str, str]] = []
    if _enabled(config, "torch_autocast"):
        refused.append(("torch_autocast.enabled", "use fp16 or bf16"))
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0) == 1:  # DeepSpeed refuses higher ones for pipelines itself
        if (zero.get("offload_optimizer") or {}).get("device", "none") != "none":
            refused.append(("zero_optimization.offload_optimizer", "remove it"))
        if not zero.get("reduce_scatter", True):
            refused.append(("zero_optimization.reduce_scatter", "set it to true"))
        if zero.get("parameter_alignment"):
            refused.append(("zero_optimization.parameter_alignment", "set it to false"))
        if zero.get("zenflow"):
            refused.append(("zero_optimization.zenflow", "remove it"))
    if str((config.get("optimizer") or {}).get("type", "")).lower() == "muon":
        refused.append(("optimizer.type", "Muon's steps need whole matrices, take another one"))
    if (config.get("compile") or {}).get("deepcompile"):
        refused.append(("compile.deepcompile", "set it to false; engine.compile() works without"))
    if config.get("sparse_gradients"):
        refused.append(("sparse_gradients", "remove it"))
    if _enabled(config, "flops_profiler"):
        refused.append(("flops_profiler.enabled", "profile without bamboo"))
    if _enabled(config, "data_efficiency"):
        refused.append(("data_efficiency.enabled", "set it to false"))
    for name in ("progressive_layer_drop", "eigenvalue"):  # 0.19.8 refuses them also where they are off
        if _enabled(config, name):
            refused.append((f"{name}.enabled", "remove it"))
    if config.get("compression_training"):
        refused.append(("compression_training", "remove it"))
    if (config.get("tensor_parallel") or {}).get("autotp_size", 0) > 1:
        refused.append(("tensor_parallel.autotp_size", "remove it"))
    if refused:
        listed = "; ".join(f'"{name}": {cure}' for name, cure in refused)
        raise UnsupportedError(
            f'these settings are not supported together with "{BLOCK}" yet: {listed} (or remove "{BLOCK}")'
        )


def check_ranks(ranks: int, stages: int | None, topology: Any) -> None:
    """Refuses a model that so many ranks cannot compute.

    Args:
        ranks: of the job.
        stages: ``num_stages`` of the ``PipelineModule``.
        topology: the ``ProcessTopology`` that it is given, which counts more than ``stages``; ``None``: it gets one.

    Raises:
        ConfigError: names the numbers of ranks that would do.
    """
    how = (
        "`-n` of bamboo run says how many, or `--ranks` where there are more ranks than members; under another "
        "launcher it is the number of processes"
    )
    if topology:
        needed = topology.world_size()
        if needed != ranks:
            axes = ", ".join(f"{axis} {topology.get_dim(axis)}" for axis in topology.get_axis_names())
            raise ConfigError(
                f"the topology of the script's PipelineModule ({axes}) needs {needed} ranks, but the job has {ranks}: "
                f"start it with {needed} ({how})"
            )
    elif stages and ranks % stages:
        fitting = [each for each in (ranks // stages * stages, (ranks // stages + 1) * stages) if each]
        raise ConfigError(
            f"the script's PipelineModule has {stages} stages (num_stages), but the job has {ranks} ranks, which is no "
            f"multiple of that: start it with {' or '.join(map(str, fitting))} ({how})"
        )


def check_schedule() -> None:
    """Refuses schedules that a script has put in the place of DeepSpeed's, as Megatron-DeepSpeed does for ZBH1.

    Raises:
        UnsupportedError: names the schedule and what to do.
    """
    from deepspeed.runtime.pipe import schedule

    found = schedule.TrainSchedule
    if found.__module__ != schedule.__name__:
        raise UnsupportedError(
            f"the script has replaced DeepSpeed's TrainSchedule by {found.__module__}.{found.__qualname__}, which "
            f'"{BLOCK}" does not support: train without it (Megatron-DeepSpeed: without --enable-zbh1-pipeline)'
        )


def check_module(module: PipelineModule, layout: Layout) -> None:
    """Refuses models that bamboo_ds does not carry through a takeover yet.

    Raises:
        UnsupportedError, ConfigError: name the property and what to do.
    """
    axes = {axis: module._topo.get_dim(axis) for axis in module._topo.get_axis_names()}
    others = {axis: size for axis, size in axes.items() if axis not in ("pipe", "data", "model") and size > 1}
    if others:
        raise UnsupportedError(f'the topology axes {others} are not supported together with "{BLOCK}" yet')
    for role in layout.roles:
        place = {"pipe": role.stage, "data": layout.copy_of(role), "model": layout.slice_of(role)}
        if module._topo.get_rank(**{axis: place.get(axis, 0) for axis in axes}) != layout.rank(role):
            raise UnsupportedError(
                f'"{BLOCK}" needs the rank order of PipeDataParallelTopology or PipeModelDataParallelTopology, the '
                f"topology orders its axes {list(axes)}"
            )


def layout_of(module: PipelineModule) -> Layout:
    """The roles of ``module``'s topology.

    Raises:
        UnsupportedError, ConfigError: see :func:`check_module`.
    """
    from .topology import Layout

    topology = module._topo
    slices = topology.get_dim("model") or 1
    layout = Layout((topology.get_dim("data") or 1) * slices, topology.get_dim("pipe"), slices=slices)
    check_module(module, layout)
    return layout
