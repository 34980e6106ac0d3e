"""An agent's main thread does what threads and signals post, and waits for nothing else."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from bamboo_ds.control.agent.mailbox import Mailbox
from bamboo_ds.control.agent.reexec import HANDLED_SIGNALS


@pytest.fixture
def handlers() -> Iterator[None]:
    """The process's own answers to signals are back after the test."""
    before = {signum: signal.getsignal(signum) for signum in HANDLED_SIGNALS}
    descriptor = signal.set_wakeup_fd(-1)
    yield
    signal.set_wakeup_fd(descriptor)
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("timeout_s", [None, 1e9, float("inf")])
def test_it_waits_until_something_is_posted(timeout_s: float | None) -> None:
    """However long it may wait: the kernel takes no timeout of more than some weeks."""
    mailbox, done = Mailbox(), []
    poster = threading.Timer(0.05, lambda: mailbox.post(lambda: done.append(threading.current_thread())))
    poster.start()
    assert mailbox.handle_next(timeout_s) and done == [threading.main_thread()]
    poster.join()
    assert not mailbox.handle_next(0.0)


def test_wake_ups_of_what_was_done_before_cut_no_wait_short() -> None:
    mailbox, done = Mailbox(), []
    for number in range(3):
        mailbox.post(lambda number=number: done.append(number))
    while len(done) < 3:
        assert mailbox.handle_next(0.0)
    began = time.monotonic()
    assert not mailbox.handle_next(0.1) and time.monotonic() - began >= 0.1
    assert done == [0, 1, 2]


def test_a_signal_ends_a_wait(handlers: None) -> None:
    mailbox, seen = Mailbox(), []
    mailbox.take_signals(lambda signum, at: seen.append(signum))
    sender = threading.Timer(0.05, signal.raise_signal, [signal.SIGTERM])
    sender.start()
    assert mailbox.handle_until(lambda: bool(seen), 10.0)
    assert seen == [signal.SIGTERM]
    sender.join()
