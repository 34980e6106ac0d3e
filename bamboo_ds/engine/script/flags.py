"""Settings and kernels of a process, which decide how tensors are computed: members must have the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as torch_modules

from ...config import BLOCK
from ...devices.accelerators import HOST
from ...errors import ConfigError

#: Key under which members answer with the settings of the job.
FLAGS = "flags/"
#: Settings of libraries, by module of ``torch.backends`` (or below) and attribute.
_BACKENDS = (
    ("cuda.matmul", "allow_tf32"),
    ("cuda.matmul", "fp32_precision"),
    ("cuda.matmul", "allow_fp16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_bf16_reduced_precision_reduction"),
    ("cuda.matmul", "allow_fp16_accumulation"),
    ("cudnn", "enabled"),
    ("cudnn", "benchmark"),
    ("cudnn", "deterministic"),
    ("cudnn", "allow_tf32"),
    ("cudnn", "fp32_precision"),
    ("cudnn.conv", "fp32_precision"),
    ("mkldnn", "enabled"),
    ("mkldnn", "deterministic"),
    ("mkldnn", "allow_tf32"),
    ("mkldnn.matmul", "fp32_precision"),
    ("quantized", "engine"),
)
#: Variables that libraries read.
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "MKL_CBWR",
    "MKL_DYNAMIC",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
#: With which cuBLAS gives the same bits each time.
_CUBLAS = (":4096:8", ":16:8")
#: Of DeepSpeed's activation checkpointing.
_CHECKPOINTING = ("PARTITION_ACTIVATIONS", "CPU_CHECKPOINT", "CONTIGUOUS_CHECKPOINTING", "num_layers")


def flags_here(device: torch.device) -> dict[str, str]:
    """This process's settings as text, by the names by which a script sets them.

    Args:
        device: on which the process computes.
    """
    flags: dict[str, Any] = {
        "torch.set_default_dtype": torch.get_default_dtype(),
        "torch.set_default_device": torch.get_default_device(),
        "torch.set_float32_matmul_precision": _read(torch.get_float32_matmul_precision),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.use_deterministic_algorithms(warn_only)": torch.is_deterministic_algorithms_warn_only_enabled(),
        "torch.set_flush_denormal": not torch.tensor(5e-324, dtype=torch.float64).mul(1.0).item(),
    }
    if device.type != HOST.type:
        # Each process has a device of its own as its default device.
        flags["torch.set_default_device"] = torch.get_default_device().type
    else:
        flags["torch.set_num_threads (OMP_NUM_THREADS)"] = torch.get_num_threads()
    for path, name in _BACKENDS:
        flags[f"torch.backends.{path}.{name}"] = _read(partial(_attribute, path, name))
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        enabled = getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None)
        flags[f"torch.backends.cuda.enable_{kind}_sdp"] = enabled() if enabled is not None else None
    flags.update(_kernels(device))
    checkpointing = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    for name in _CHECKPOINTING:
        flags[f"deepspeed.checkpointing.configure: {name}"] = getattr(checkpointing, name, None)
    for name, hooks in sorted(vars(torch_modules).items()):
        if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict):
            flags[f"torch.nn.modules.module.{name}"] = sorted(_called(hook) for hook in hooks.values())
    flags.update((name, os.environ.get(name)) for name in _VARIABLES)
    return {name: str(value) for name, value in flags.items()}


def _kernels(device: torch.device) -> dict[str, Any]:
    """Facts that decide which kernels compute on ``device``: members with others compute other bits."""
    facts: dict[str, Any] = {
        "the version of torch": torch.__version__,
        "the version of CUDA (torch.version.cuda)": torch.version.cuda,
        "the version of cuDNN (torch.backends.cudnn.version)": torch.backends.cudnn.version(),
    }
    if device.type == "cuda":
        properties = torch.get_device_module(device).get_device_properties(device)
        facts["the device's model"] = properties.name
        facts["the device's number of multiprocessors"] = properties.multi_processor_count
    return facts


def _attribute(path: str, name: str) -> Any:
    part: Any = torch.backends
    for each in path.split("."):
        part = getattr(part, each, None)
    return getattr(part, name, None)


def _read(setting: Callable[[], Any]) -> Any:
    """The value, or why torch does not tell it: its new and old ways of setting it were mixed."""
    try:
        return setting()
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _called(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def uncertain(device: torch.device, flags: Mapping[str, str]) -> list[str]:
    """Settings by which a script may have passes that are done again give the same bits, by the names that it uses.

    Args:
        device: on which the process computes. On CPUs torch's kernels give the same bits each time.
        flags: what :func:`flags_here` gives.
    """
    if device.type == HOST.type:
        return []
    asked = flags["torch.use_deterministic_algorithms"] == "True"
    only_warned = flags["torch.use_deterministic_algorithms(warn_only)"] == "True"
    missing = []
    if not asked or only_warned:
        missing.append("torch.use_deterministic_algorithms(True)" + (" without warn_only" if asked else ""))
        missing += [
            f"torch.backends.cuda.enable_{kind}_sdp(False) (or the line before: backward passes of attention)"
            for kind in ("flash", "mem_efficient", "cudnn")
            if flags[f"torch.backends.cuda.enable_{kind}_sdp"] == "True"
        ]
    if flags["torch.backends.cudnn.benchmark"] == "True":
        missing.append("torch.backends.cudnn.benchmark = False")
    if not asked and flags["torch.backends.cudnn.deterministic"] != "True":
        missing.append("torch.backends.cudnn.deterministic = True")
    if flags["CUBLAS_WORKSPACE_CONFIG"] not in _CUBLAS:
        missing.append(f"CUBLAS_WORKSPACE_CONFIG={_CUBLAS[0]} in the environment")
    return missing


def compare_flags(flags: Mapping[str, Mapping[str, str]], first: str) -> None:
    """Compares what :func:`flags_here` gives on several members with that of the member ``first``.

    Raises:
        ConfigError: names each setting that differs, and the values.
    """
    different = [
        f"{name} is {value} on {first} and {theirs.get(name)} on {member}"
        for member, theirs in flags.items()
        for name, value in flags[first].items()
        if theirs.get(name) != value
    ]
    if different:
        raise ConfigError(
            f"the members of this job compute with different settings: {'; '.join(different)}. A stage that another "
            f'member takes over would be computed in another way. With "{BLOCK}" set them alike on all ranks and '
            "hosts, in the script or in the environment, and use hosts of one kind"
        )
