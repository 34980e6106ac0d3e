"""The lifetime of an epoch, and the table of collectives: without other members."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import distributed as dist

from bamboo_ds.comm.c10d import registry
from bamboo_ds.comm.calls.collectives import Adapter, alone
from bamboo_ds.comm.calls.table import COLLECTIVES
from bamboo_ds.comm.lifetime import Lifetime
from bamboo_ds.errors import EpochChanged, PeerLost


def test_an_abort_ends_operations_and_orders_once() -> None:
    life, called = Lifetime(3, lambda member, reason: None), []
    life.call_on_abort(lambda: called.append("first" if life.aborted is not None else "not noted"))
    life.call_on_abort(lambda: called.append("second"))
    life.call_on_abort(lambda: called.append("taken back"))()
    assert life.abort("a test") and not life.abort("another one")
    assert called == ["first", "second"] and life.aborted == "a test"
    life.call_on_abort(lambda: called.append("late"))
    assert called == ["first", "second", "late"]
    with pytest.raises(EpochChanged, match=r"sending: epoch 3 ended \(a test\)"):
        life.check("sending")
    with pytest.raises(EpochChanged, match="waiting: epoch 3 ended"), life.calling("waiting"):
        raise AssertionError("entered")


def test_what_is_called_at_an_abort_is_called_whatever_else_fails() -> None:
    life, called = Lifetime(3, lambda member, reason: None), []
    life.call_on_abort(lambda: called.append("first"))
    life.call_on_abort(lambda: called.append(1 / 0))
    life.call_on_abort(lambda: called.append("last"))
    with pytest.raises(ZeroDivisionError):
        life.abort("a loss")
    life.await_abort()
    assert called == ["first", "last"] and life.aborted == "a loss"


def test_who_releases_an_epoch_waits_until_its_abort_is_through() -> None:
    """Another thread has aborted it, and shuts down what gloo has opened."""
    life, held, goes_on = Lifetime(3, lambda member, reason: None), threading.Event(), threading.Event()

    def interrupt() -> None:
        held.set()
        assert goes_on.wait(60)

    life.call_on_abort(interrupt)
    aborting = threading.Thread(target=life.abort, args=("a test",))
    aborting.start()
    assert held.wait(60) and not life.abort("another one")
    releasing = threading.Thread(target=life.await_abort)
    releasing.start()
    assert releasing.is_alive()
    goes_on.set()
    for thread in (aborting, releasing):
        thread.join(60)
        assert not thread.is_alive()


def test_callers_are_counted_until_they_have_left() -> None:
    life = Lifetime(3, lambda member, reason: None)

    def reduce() -> None:
        assert life.blocked == 1 and not life.quiet(0.0)
        life.abort("a test")
        raise RuntimeError("gloo's own words")

    with pytest.raises(EpochChanged, match="reducing: epoch 3 ended"), life.calling("reducing"):
        reduce()
    assert life.blocked == 0 and life.quiet(0.0)


@pytest.mark.parametrize(
    ("error", "peer", "raised", "accused"),
    [
        (RuntimeError("Connection reset by peer [10.0.0.7]:4711"), None, EpochChanged, []),
        (RuntimeError("connection refused"), "m1", PeerLost, ["m1"]),
        (RuntimeError("connection refused"), None, PeerLost, [None]),
        (RuntimeError("tensors must have the same size"), "m1", RuntimeError, []),
        (ValueError("connection refused"), "m1", ValueError, []),
    ],
)
def test_errors_are_translated(error: Exception, peer: str | None, raised: type, accused: list[str | None]) -> None:
    told: list[str | None] = []

    def explain(host: str | None, port: int | None) -> EpochChanged | None:
        return EpochChanged("it has left") if (host, port) == ("10.0.0.7", 4711) else None

    life = Lifetime(3, lambda member, reason: told.append(member), explain)
    for _ in range(2):
        assert type(life.translate(error, "reducing", peer)) is raised
    assert told == accused, "once"


def test_the_table_of_collectives_is_whole() -> None:
    for name, collective in COLLECTIVES.items():
        assert collective.name == name and hasattr(dist.ProcessGroup, name)
        assert hasattr(Adapter, f"_{collective.shape}") and hasattr(registry, collective.options)
        assert collective.single is None or COLLECTIVES[collective.single].shape == collective.shape


def test_forms_of_one_collective_compute_the_same_alone() -> None:
    part = torch.arange(3.0)
    forms = {
        "allgather": ([[torch.zeros(3) for _ in range(2)]], [part]),
        "allgather_coalesced": ([[torch.zeros(3)] for _ in range(2)], [part]),
        "_allgather_base": (torch.zeros(6), part),
        "allgather_into_tensor_coalesced": ([torch.zeros(6)], [part]),
    }
    for name, arguments in forms.items():
        written = alone(COLLECTIVES[name], (*arguments, registry.AllgatherOptions()), 1, 2).result()
        assert torch.equal(torch.cat([tensor.reshape(-1) for tensor in written]), torch.cat([part, part])), name
