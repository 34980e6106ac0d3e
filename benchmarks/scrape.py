"""Scrapes a job's metrics while it runs, and compares them with its events at the end. See ``soak.py --scrape``."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import console
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from bamboo_ds.control.web.access import token_of
from bamboo_ds.observe.events import read_events
from bamboo_ds.observe.goodput import account
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.secret import find

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
#: Categories that hold what is not known better yet: they may shrink when it is.
REST = {Category.OTHER.value, Category.STANDBY.value}
#: Relative difference of badput, which depends on when the newest step was seen.
BADPUT = 0.01


def free_address() -> str:
    """Where nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


class Scraper:
    """Scrapes once a second, from whoever leads."""

    def __init__(self, address: str, job: str, events: Path) -> None:
        self._address, self._job, self._events = address, job, events
        self._end = threading.Event()
        self._before: Samples = {}
        self.done = self.refused = 0
        self.problems: list[str] = []
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def scrape(self) -> Samples:
        """The samples; raises ``OSError`` where nobody listens, ``ValueError`` where the text is not Prometheus's."""
        connection = http.client.HTTPConnection(self._address, timeout=10.0)
        try:
            token = token_of(find(self._job), self._job)
            connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {text[:200]}")
        families = text_string_to_metric_families(text)
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}

    def _run(self) -> None:
        while not self._end.wait(1.0):
            try:
                found = self.scrape()
            except (OSError, http.client.HTTPException):  # the leader is lost, and the next one is coming
                self.refused += 1
                continue
            except ValueError as error:
                self.problems.append(f"a scrape is not valid: {error}")
                continue
            self.done += 1
            for key, was in self._before.items():
                counts = key[0].endswith(("_total", "_count", "_sum", "_bucket"))
                if counts and dict(key[1]).get("type") not in REST and found.get(key, -1.0) < was - 1e-6:
                    self.problems.append(f"{key} went back from {was} to {found.get(key)}")
            self._before = found

    @contextmanager
    def running(self) -> Iterator[Scraper]:
        """Scrape in the background."""
        self._thread.start()
        try:
            yield self
        finally:
            self._end.set()
            self._thread.join()

    def compare(self) -> list[str]:
        """Scrape for the last time and compare with the events that the file had then; prints a table.

        The job goes on meanwhile: the scrape must agree with the file as it was at one of the moments between.
        """
        lines = self._events.read_bytes().count(b"\n")
        found = self.scrape()
        records = [json.loads(line) for line in self._events.read_bytes().rpartition(b"\n")[0].splitlines()]
        moments = range(lines, len(records) + 1)
        best = min(moments, key=lambda moment: len(_differences(found, counted(records[:moment]))))
        expected = counted(records[:best])
        table = Table("counter", "labels", "events", "scrape", title=f"{self._events}, {best} lines")
        for (name, labels), number in sorted(expected.items()):
            table.add_row(name, ", ".join(f"{k}={v}" for k, v in labels), f"{number:g}", f"{found.get((name, labels))}")
        problems = [f"scraped {found.get(key)} of {key}, events say {expected.get(key)}" for key in
                    _differences(found, expected)]  # fmt: skip
        problems += self._badput(found, best, table)
        console.print(table)
        console.print(f"scrapes: {self.done}; nobody listened: {self.refused}")
        return problems + self.problems

    def _badput(self, found: Samples, lines: int, table: Table) -> list[str]:
        events = [event for event, _ in zip(read_events(self._events), range(lines), strict=False)]
        last = max(number for number, event in enumerate(events) if event.event == "step")
        report, problems = account(events[: last + 1]), []
        for category, seconds in report.categories.items():
            if category is Category.PRODUCTIVE:
                continue
            got = found.get(("bamboo_badput_seconds_total", (("type", category.value),)), 0.0)
            table.add_row("bamboo_badput_seconds_total", f"type={category.value}", f"{seconds:.3f}", f"{got:.3f}")
            if category.value not in REST and abs(got - seconds) > BADPUT * report.seconds:
                problems.append(f"scraped {got} s of {category.value}, events say {seconds} s")
        return problems


def counted(records: list[dict[str, Any]]) -> Samples:
    """The counters as the lines of the file say, one by one, without the package's own folding."""
    found: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
    number: int | None = None
    lost, saved = set[str](), set[tuple[str, int]]()

    def add(name: str, amount: float = 1.0, **labels: str) -> None:
        found[name, tuple(sorted(labels.items()))] += amount  # type: ignore[assignment]

    for record in records:
        kind = record["event"]
        if kind == "restart":
            number = None
        elif kind == "step" and record["step"] != number:
            steps = 1 if number is None or record["step"] < number else record["step"] - number
            number = record["step"]
            add("bamboo_steps_committed_total", steps)
            add("bamboo_samples_total", steps * record["samples"])
            add("bamboo_step_seconds_count")
            add("bamboo_step_seconds_sum", record["seconds"])
        elif kind == "member_lost" and record["member_id"] not in lost:
            lost.add(record["member_id"])
            add("bamboo_losses_total", reason=record["reason"])
        elif kind == "notice":
            add("bamboo_notices_total", source=record["source"])
        elif kind == "recovered":
            for phase in ("detection", "plan", "rebuild", "redo", "pause"):
                if record[f"{phase}_seconds"] is not None:
                    add("bamboo_pause_seconds_count", phase=phase)
                    add("bamboo_pause_seconds_sum", record[f"{phase}_seconds"], phase=phase)
        elif kind == "checkpoint_saved" and (record["path"], record["step"]) not in saved:
            saved.add((record["path"], record["step"]))
            add("bamboo_checkpoint_seconds_count")
            add("bamboo_checkpoint_seconds_sum", record["seconds"])
    return dict(found)


def _differences(found: Samples, expected: Samples) -> list[Any]:
    """Counters of which the scrape says something else; one that is absent from the events is 0."""
    kinds = {name for name, _ in expected} | {"bamboo_losses_total", "bamboo_notices_total"}
    keys = {key for key in found if key[0] in kinds} | expected.keys()
    return sorted(
        key for key in keys if abs(found.get(key, 0.0) - expected.get(key, 0.0)) > 1e-6 * abs(found.get(key, 0.0))
    )
