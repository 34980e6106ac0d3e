"""The one thread for all sockets: a defect in what it calls is the matter of that one alone."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from bamboo_ds.comm.loop import SocketLoop

pytestmark = pytest.mark.claim("design.md")


@pytest.fixture
def loop() -> Iterator[SocketLoop]:
    made = SocketLoop()
    yield made
    made.stop()
    made.close()


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Of each the first end is watched, and the second one has said something."""
    made = [socket.socketpair() for _ in range(3)]
    for _, other in made:
        other.send(b"x")
    yield made
    for end in (end for pair in made for end in pair):
        end.close()


def test_a_handler_that_fails_keeps_no_other_from_being_called(
    loop: SocketLoop, pairs: list[tuple[socket.socket, socket.socket]], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever their order, and although it fails every time."""
    failed, called, enough = threading.Event(), [0, 0, 0], threading.Event()

    def fail(events: int) -> None:
        failed.set()
        raise RuntimeError("a defect")

    def note(which: int) -> None:
        called[which] += 1
        if called[0] >= 3 and called[2] >= 3:
            enough.set()

    loop.watch(pairs[0][0], select.EPOLLIN, lambda _: note(0))
    loop.watch(pairs[1][0], select.EPOLLIN, fail)
    loop.watch(pairs[2][0], select.EPOLLIN, lambda _: note(2))
    loop.start()
    assert enough.wait(10), called
    assert failed.is_set() and "a defect" in caplog.text


def test_a_timer_that_fails_keeps_no_other_and_no_socket_from_being_attended_to(
    loop: SocketLoop, pairs: list[tuple[socket.socket, socket.socket]], caplog: pytest.LogCaptureFixture
) -> None:
    asked, ready = threading.Event(), threading.Event()

    def fail() -> float | None:
        raise RuntimeError("a defect")

    def ask() -> float | None:
        asked.set()
        return None

    loop.timers += [fail, ask]
    loop.watch(pairs[0][0], select.EPOLLIN, lambda _: ready.set())
    loop.start()
    assert asked.wait(10) and ready.wait(10)
    assert "a defect" in caplog.text


def test_what_a_descriptor_was_ready_for_before_it_was_another_one_is_forgotten(
    loop: SocketLoop, pairs: list[tuple[socket.socket, socket.socket]]
) -> None:
    """Of two that are ready, the first closes the other and opens a new one, which gets its number."""
    (one, _), (two, _), (new, say) = pairs
    new.recv(1)
    replaced, spoken, called = threading.Event(), threading.Event(), threading.Event()
    early: list[int] = []
    opened: list[socket.socket] = []

    def replace(other: socket.socket) -> None:
        number = other.fileno()
        for each in (one, two):
            loop.forget(each)
        other.close()
        os.dup2(new.fileno(), number)
        opened.append(socket.socket(fileno=number))
        loop.watch(opened[0], select.EPOLLIN, answer)
        replaced.set()

    def answer(events: int) -> None:
        if not spoken.is_set():
            early.append(events)
        opened[0].recv(1)
        called.set()

    loop.watch(one, select.EPOLLIN, lambda _: replace(two))
    loop.watch(two, select.EPOLLIN, lambda _: replace(one))
    loop.start()
    assert replaced.wait(10)
    next_turn = threading.Event()
    loop.timers.append(next_turn.set)
    loop.wake()
    assert next_turn.wait(10)
    spoken.set()
    say.send(b"x")
    assert called.wait(10) and not early
    opened[0].close()
