"""Where a worker is that does not get on is in its log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from bamboo_ds.control.activity import Activity
from bamboo_ds.control.stalls import FIRST_REPORT_S, Stalls


def elsewhere(call: Callable[[], None]) -> None:
    """Call it on another thread, while the main thread is here."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_reports_become_rarer(caplog: pytest.LogCaptureFixture) -> None:
    stalls, activity, begin = Stalls(), Activity(), time.monotonic()

    def half_an_hour() -> None:
        for seconds in range(1800):
            stalls.look(activity, begin + seconds)

    with activity.at_work():
        elsewhere(half_an_hour)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" s ")[0].split()[-1] for text in told] == ["60", "120", "240", "480", "960"]
    assert all("in elsewhere\n" in text and "the worker is busy" in text for text in told)


def test_nothing_is_told_of_a_worker_that_gets_on(caplog: pytest.LogCaptureFixture) -> None:
    stalls, activity, begin = Stalls(), Activity(), time.monotonic()

    def hours() -> None:
        for number in range(100):
            stalls.look(activity, begin + number * FIRST_REPORT_S)  # the script has the word
        activity.inside = True
        for number in range(100, 200):
            activity.beats += 1
            stalls.look(activity, begin + number * FIRST_REPORT_S)

    elsewhere(hours)
    assert not caplog.records
    activity.waiting = lambda: True
    elsewhere(lambda: stalls.look(activity, begin + 200 * FIRST_REPORT_S))
    assert "waits for other members" in caplog.text
