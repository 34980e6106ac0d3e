"""A device for machines that have none, ``far``: see far_device.cpp. It is compiled once for each torch.

A process that has it cannot be without it again.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from bamboo_ds.variables import ENV_MEMBER

NAME = "far"
#: Environment variable that gives the workers of test jobs this device; its value is :func:`install`'s argument.
SEED = "BAMBOO_TEST_FAR_DEVICE"

_SOURCE = Path(__file__).with_name("far_device.cpp")


def compiler() -> str | None:
    """What compiles it; ``None``: there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def library() -> Path:
    """The compiled device, which is made if it is not there yet."""
    found = torch.__version__ + _SOURCE.read_text()
    place = Path(os.environ.get("TORCH_EXTENSIONS_DIR", sysconfig.get_paths()["purelib"]))
    made = place / f"far-{hashlib.sha256(found.encode()).hexdigest()[:16]}.so"
    if made.exists():
        return made
    place.mkdir(parents=True, exist_ok=True)
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait for who is first, or take its place if it dies
        if not made.exists():
            _compile(made)
    return made


def _compile(made: Path) -> None:
    mine, root = made.with_suffix(".new"), Path(torch.__file__).parent
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    words = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", "-std=c++20", "-O1", "-w"]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root / 'lib'}"]
    command = [str(compiler()), "-shared", "-fPIC", *words, *include, str(_SOURCE), "-o", str(mine), *libraries]
    subprocess.run(command, check=True)
    mine.rename(made)


class FarAccelerator(CPU_Accelerator):
    """DeepSpeed's accelerator of that device.

    Attributes:
        spinning: events that a thread would keep a processor busy to wait for.
    """

    spinning = 0

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, "far-collectives"

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return False

    def resolves_data_dependency(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{NAME}:0"

    def synchronize(self, device_index: int | None = None) -> None:
        torch.accelerator.synchronize()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.ops.far.generator()

    def Stream(self, *args: Any, **kwargs: Any) -> torch.Stream:  # type: ignore[override]
        return torch.Stream(device=self.current_device_name())

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # type: ignore[override]
        self.spinning += not blocking
        return torch.Event(device=self.current_device_name(), enable_timing=enable_timing)

    def stream(self, stream: torch.Stream) -> Any:
        return stream

    def current_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def default_stream(self, device_index: int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream()

    def pin_memory(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor.pin_memory()

    def pin_empty(self, *size: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    def memory_allocated(self, device_index: int | None = None) -> int:
        return counts()["allocated"]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return counts()["peak"]

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        torch.ops.far.forget_peak()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return counts()["allocated"]

    def total_memory(self, device_index: int | None = None) -> int:
        return min(counts()["limit"], 1 << 40)

    def available_memory(self, device_index: int | None = None) -> int:
        return self.total_memory() - counts()["allocated"]

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.ops.far.generator().set_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.ops.far.generator().get_state()

    def manual_seed(self, seed: int) -> None:
        torch.ops.far.generator().manual_seed(seed + 1)  # other numbers than the host's

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)


def _tensors(dtype: torch.dtype) -> property:
    """How DeepSpeed makes tensors of a type on the device."""
    return property(lambda self: functools.partial(torch.tensor, dtype=dtype, device=self.current_device_name()))


for _name, _dtype in {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}.items():
    setattr(FarAccelerator, _name, _tensors(_dtype))


def _module(own: FarAccelerator) -> ModuleType:
    """What torch asks as ``torch.far``."""
    made = ModuleType(f"torch.{NAME}")
    told: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "synchronize": own.synchronize,
        "get_device_name": lambda number=0: f"{NAME} {number} of a test",
        "mem_get_info": lambda number=0: (own.available_memory(), own.total_memory()),
        "memory_allocated": own.memory_allocated,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "is_autocast_enabled": lambda: False,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": own.manual_seed,
        "manual_seed_all": own.manual_seed_all,
        "get_rng_state": own.get_rng_state,
        "set_rng_state": own.set_rng_state,
        "default_stream": own.default_stream,
        "current_stream": own.current_stream,
        "stream": own.stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
    }
    vars(made).update(told)
    return made


def install(seed: int | None = None) -> FarAccelerator:
    """Give this process the device, for torch and DeepSpeed.

    Args:
        seed: of the moments by which copies are late; ``None``: none is.
    """
    torch.ops.load_library(str(library()))
    own = FarAccelerator()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(own))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if seed is not None:
        torch.ops.far.late(seed)
    real_accelerator.ds_accelerator = own
    torch.nn.Module._apply = _keeping_marks(torch.nn.Module._apply)  # type: ignore[method-assign]
    return own


def _keeping_marks(apply: Any) -> Any:
    """Parameters that move to a GPU stay the objects that they are, with what scripts have set on them.

    Those that move to this device are replaced by new ones.
    """

    @functools.wraps(apply)
    def applied(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        before = dict(module._parameters)
        result: torch.nn.Module = apply(module, function, recurse)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter is not before[name]:
                vars(parameter).update(vars(before[name]))
        return result

    return applied


def install_in_job() -> None:
    """:func:`install` in a worker of a job of this package that has :data:`SEED`.

    A worker that ends leaves a file ``far-PID`` in the job's folder: its :func:`counts`.
    """
    if SEED not in os.environ or ENV_MEMBER not in os.environ:
        return
    install(int(os.environ[SEED]))
    folder = Path(os.environ["BAMBOO_TEST_JOB"])

    @atexit.register
    def tell() -> None:
        torch.accelerator.synchronize()
        (folder / f"far-{os.getpid()}").write_text(json.dumps(counts()))


def counts() -> dict[str, int]:
    """Copies that were late, and those of them that were lost; how often the host has waited for what it computes, and
    for copies to it; bytes, the last ones of late copies from or to memory that is not page-locked."""
    names = ("late", "lost", "waits", "loads", "allocated", "peak", "limit", "pageable")
    return dict(zip(names, torch.ops.far.counts(), strict=True))


if __name__ == "__main__":
    print(library(), file=sys.stderr)
