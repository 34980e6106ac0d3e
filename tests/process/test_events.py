"""Events and logs: what is written, by several processes at once, can be read back strictly."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest

from bamboo_ds.observe import events
from bamboo_ds.observe.events import EventWriter, read_events

pytestmark = pytest.mark.claim("concepts.md", "reference/cli.md", "reference/events.md")


def _write(path: Path, member: str, count: int) -> None:
    with EventWriter(path) as writer:
        threads = [threading.Thread(target=_emit, args=(writer, f"{member}.{t}", count)) for t in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _emit(writer: EventWriter, member: str, count: int) -> None:
    for step in range(count):
        text = "x" * (100 + 4000 * (step % 3))  # also longer than what a pipe would keep together
        writer.emit(events.ReplicaVerified(job="gpt", member=member, epoch=1, step=step, role=(0, 0), checksum=text))


@pytest.mark.integration
def test_several_processes_append_to_one_file(tmp_path: Path) -> None:
    path, count = tmp_path / "events.jsonl", 150
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=(path, f"m{number}", count)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert path.stat().st_mode & 0o777 == 0o600
    found: dict[str | None, list[int]] = {}
    for event in read_events(path):
        assert isinstance(event, events.ReplicaVerified)
        found.setdefault(event.member, []).append(event.step)
    assert found == {f"m{p}.{t}": list(range(count)) for p in range(3) for t in range(2)}
