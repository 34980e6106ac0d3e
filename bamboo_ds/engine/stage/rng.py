"""Random numbers of passes and optimizer steps, reproducible wherever these run."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy
import torch

from ...devices.accelerators import HOST, accelerator, numbered
from ...topology import Role

#: Modules that track random number states by name, DeepSpeed's and Megatron's; each has its tracker as a global.
_TRACKING = (
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron.core.tensor_parallel.random",
    "megatron.mpu.random",
)


#: Generators that a layer may have of its own.
GENERATORS = (torch.Generator, random.Random, numpy.random.RandomState, numpy.random.Generator)


class Drawing(str, Enum):
    """The uses of random numbers; the value is a part of the key."""

    FORWARD = ""
    BACKWARD = "backward"
    STEP = "step"
    EVALUATION = "evaluation"


def drawing_seed(drawing: Drawing, seed: int, step: int, role: Role, micro_batch: int = 0, block: int = 0) -> int:
    """Seed of one pass or step; equal for a role's owner and its shadow, different for any other.

    In a forward pass every block of the stage has a seed of its own.

    ``seed`` is torch's: any number of 64 bits where the script has set none.
    """
    place = struct.pack("<Qqqqq", seed % 2**64, step, role.pipeline, role.stage, micro_batch)
    return _hashed(place + (f"block {block}" if block else drawing.value).encode())


def _hashed(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def keyed_generators(seed: int, device: torch.device, number: int = 0, others: bool = True) -> Iterator[None]:
    """Runs the body with torch's default generators seeded by ``seed``; restores their states afterwards.

    So a forward pass draws the same dropout masks on whichever member it runs, activation checkpointing
    replays them (it records the generator's state inside the body), and the script's own stream of random
    numbers is left alone. Covers torch's CPU generator and that of another ``device``, the states that
    DeepSpeed's and Megatron's ``get_cuda_rng_tracker`` have by name, and with ``others`` Python's and NumPy's, which
    takes twenty times as long.

    With the same ``seed`` tensor slices draw the same numbers from the default generators, for what all of them
    compute, and by their ``number`` different ones from the named states; as they do under Megatron.
    """
    with restored(default_generators(device, others)), _trackers_restored():
        seed_generators(seed, device, number, others)
        yield


def seed_generators(seed: int, device: torch.device, number: int = 0, others: bool = True) -> None:
    """Seed the generators that :func:`keyed_generators` names."""
    for generator in default_generators(device, others):
        _seed(generator, seed)
    for tracker in _trackers():
        names = list(tracker.get_states())
        if names:
            tracker.set_states({name: _state(seed, f"{name}/{number}" if number else name, device) for name in names})


def default_generators(device: torch.device, others: bool = False) -> list[Any]:
    """torch's default generators of the CPU and of another ``device``, and with ``others`` Python's and NumPy's."""
    own = [] if device.type == HOST.type else [accelerator().default_generator(numbered(device).index)]
    return [torch.default_generator, *own, *((random, numpy.random) if others else ())]


def _trackers() -> list[Any]:
    found = [getattr(sys.modules.get(name), "_CUDA_RNG_STATE_TRACKER", None) for name in _TRACKING]
    return [tracker for tracker in found if tracker is not None]


@contextmanager
def _trackers_restored() -> Iterator[None]:
    tracked = [(tracker, states) for tracker in _trackers() if (states := tracker.get_states())]
    try:
        yield
    finally:
        for tracker, states in tracked:
            tracker.set_states(states)


def _state(seed: int, name: str, device: torch.device) -> torch.Tensor:
    """State of the generator ``name`` in the pass that ``seed`` belongs to."""
    generator = torch.Generator(device)
    return generator.manual_seed(_hashed(struct.pack("<q", seed) + name.encode())).get_state()


@contextmanager
def left_alone(device: torch.device) -> Iterator[None]:
    """Restores the states of torch's default generators, Python's and NumPy's, and those that are tracked, after it."""
    with restored(default_generators(device, others=True)), _trackers_restored():
        yield


@contextmanager
def keyed_attributes(generators: Sequence[tuple[str, Any]], seed: int) -> Iterator[None]:
    """Runs the body with ``generators``, named ones, seeded by ``seed`` and their names; restores their states."""
    with restored([generator for _, generator in generators]):
        seed_attributes(generators, seed)
        yield


def seed_attributes(generators: Sequence[tuple[str, Any]], seed: int) -> None:
    """Seed ``generators`` by ``seed`` and their names."""
    for name, generator in generators:
        _seed(generator, _hashed(struct.pack("<q", seed) + name.encode()))


@contextmanager
def restored(generators: Sequence[Any]) -> Iterator[None]:
    """Restores the states of ``generators`` after the body; modules such as ``random`` may be among them."""
    states = [_state_of(generator) for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed if hasattr(generator, "getstate") else seed & 0xFFFFFFFF)


@contextmanager
def seeded_layers(module: Any, before: int | None = None) -> Iterator[None]:
    """Runs a pass of a ``PipelineModule`` in the body, which seeds each of its layers if its ``seed_layers`` is on.

    DeepSpeed makes the seed from the number of the forward pass, and seeds the generators of Python and NumPy, too;
    these are restored, since a redundant pass runs at any time.

    Args:
        before: forward passes before this one, had all passes of the role run here; ``None`` in a backward pass.
    """
    if not module.seed_layers:
        yield
        return
    if before is not None:
        module.micro_offset = before
    with restored((random, numpy.random)):
        yield
