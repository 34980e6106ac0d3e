"""The form of messages: every bit arrives, and what is no message is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bamboo_ds.comm import wire
from bamboo_ds.comm.wire import payloads
from bamboo_ds.errors import ProtocolError
from tests.support.comm_worker import (
    portable,
)

pytestmark = pytest.mark.claim("concepts.md", "guides/security.md", "reference/limits.md")


def sample_payloads() -> list[payloads.Payload]:
    """Every dtype, awkward shapes and layouts, small, large and many."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(60, 70, generator=generator)
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    every = [torch.arange(-3, 4).to(dtype) for dtype in payloads.CODES if dtype != torch.complex32]
    found: list[payloads.Payload] = [
        None,
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2, dtype=torch.int64),
        base,
        base.t(),
        base[::2, 5:9],
        base[3].expand(4, 70),
        special,
        special.to(torch.bfloat16),
        torch.randn(1000, 300, generator=generator) > 0,
        torch.randn(4, 5, dtype=torch.complex64, generator=generator).conj(),
        torch.randn(300_000, generator=generator).half(),
        base.clone().requires_grad_(),
        (),
        (base,),
        tuple(every),
        (torch.tensor(True), base, torch.zeros(0), torch.randn(50_000, generator=generator), torch.arange(9)),
        tuple(torch.full((2,), float(index)) for index in range(2000)),
        torch.zeros([1] * 40),
    ]
    return found


def flat(payload: Any) -> Any:
    """Comparable: structure, dtypes, shapes, bytes."""
    if isinstance(payload, torch.Tensor):
        return portable(payload.detach().resolve_conj())
    return None if payload is None else tuple(flat(part) for part in payload)


# -- the form of messages -------------------------------------------------------------------------------------
def test_wire_keeps_every_bit() -> None:
    for number, payload in enumerate(sample_payloads()):
        frame = wire.encode(b"some key", number, payload, 7)
        assert all(0 < sum(map(len, segment)) <= wire.SEGMENT for segment in list(frame)[1:])
        stream = bytearray(b"".join(itertools.chain(*frame)))
        head = wire.decode_head(stream[: wire.HEAD])
        del stream[: wire.HEAD]
        key, parts = wire.decode_meta(head, bytes(stream[: head.extension]) if head.extension else head.meta)
        del stream[: head.extension]
        for part in parts:
            size = part.data.numel()
            part.data.copy_(torch.frombuffer(bytearray(stream[:size] or b"0"), dtype=torch.uint8)[:size])
            del stream[:size]
        assert (key, head.sequence, head.epoch, head.kind) == (b"some key", number, 7, wire.DATA) and not stream
        assert flat(payloads.assemble(head.structure, parts)) == flat(payload)
        assert flat(payloads.assemble(*payloads.copied(payload))) == flat(payload)


@pytest.mark.parametrize(
    "payload",
    [[torch.zeros(1)], (1,), "text", torch.eye(3).to_sparse(), (torch.zeros(1), None)],
    ids=["list", "number", "text", "sparse", "none-in-tuple"],
)
def test_wire_refuses_what_it_cannot_carry(payload: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot send|carries"):
        wire.encode(b"", 0, payload)


def test_wire_refuses_a_foreign_message() -> None:
    with pytest.raises(ProtocolError, match="not a message header"):
        wire.decode_head(bytearray(b"\x7f" * wire.HEAD))
    head = wire.decode_head(bytearray(wire.encode(b"key", 1, torch.zeros(2))[0][0]))
    with pytest.raises(ProtocolError, match="dtype 99"):
        wire.decode_meta(head, head.meta[:3] + (99).to_bytes(8, "little") + head.meta[11:])
