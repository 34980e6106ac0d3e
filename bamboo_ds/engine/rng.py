"""Random numbers of forward passes, reproducible wherever a pass runs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..topology import Role


def forward_seed(seed: int, step: int, role: Role, micro_batch: int) -> int:
    """Seed of one forward pass; equal for a role's owner and its shadow, different for any other pass."""
    key = struct.pack("<qqqqq", seed, step, role.pipeline, role.stage, micro_batch)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


@contextmanager
def keyed_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Run the body with torch's default generators seeded by ``seed``; restore their states afterwards.

    So a forward pass draws the same dropout masks on whichever member it runs, activation checkpointing
    replays them (it records the generator's state inside the body), and the script's own stream of random
    numbers is left alone. Covers the CPU's and, for a CUDA ``device``, that device's generator.
    """
    cpu = torch.default_generator
    before = cpu.get_state()
    cuda = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
    cuda_before = cuda.get_state() if cuda is not None else None
    cpu.manual_seed(seed)
    if cuda is not None:
        cuda.manual_seed(seed)
    try:
        yield
    finally:
        cpu.set_state(before)
        if cuda is not None and cuda_before is not None:
            cuda.set_state(cuda_before)
