"""Where a worker is that does not get on is in its log."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

import pytest

from bamboo_ds.worker import activity as module
from bamboo_ds.worker.activity import FIRST_REPORT_S, Activity, Stalls
from bamboo_ds.worker.channel import WorkerChannel
from tests.support.etcd import wait_until

pytestmark = pytest.mark.claim("guides/elastic.md")


def elsewhere(call: Callable[[], None]) -> None:
    """Call it on another thread, while the main thread is here."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_reports_become_rarer(caplog: pytest.LogCaptureFixture) -> None:
    stalls, activity, begin = Stalls(), Activity(), 1000.0

    def half_an_hour() -> None:
        for seconds in range(1800):
            stalls.look(activity, begin + seconds)

    with activity.at_work():
        elsewhere(half_an_hour)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" s ")[0].split()[-1] for text in told] == ["60", "120", "240", "480", "960"]
    assert all("in elsewhere\n" in text and "the worker is busy" in text for text in told)


def test_nothing_is_told_of_a_worker_that_gets_on(caplog: pytest.LogCaptureFixture) -> None:
    stalls, activity, begin = Stalls(), Activity(), 1000.0

    def hours() -> None:
        for number in range(100):
            stalls.look(activity, begin + number * FIRST_REPORT_S)  # the script has the word
        for number in range(100, 200):
            with activity.at_work():
                stalls.look(activity, begin + number * FIRST_REPORT_S)

    elsewhere(hours)
    assert not caplog.records
    activity.inside, activity.waiting = True, lambda: True
    elsewhere(lambda: stalls.look(activity, begin + 200 * FIRST_REPORT_S))
    assert "waits for other members" in caplog.text


def test_a_worker_s_channel_looks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_REPORT_S", 0.05)
    agent, worker = socket.socketpair()
    with agent:
        channel = WorkerChannel(worker, member="a", job="j", rank=0, world_size=1, address="127.0.0.1")
        channel.start(lambda plan: None, lambda: None)
        try:
            with channel.activity.at_work():
                wait_until(lambda: "one instruction lasts" in caplog.text, "a report")
            assert "in test_a_worker_s_channel_looks\n" in caplog.text
        finally:
            channel.close()
