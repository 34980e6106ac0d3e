"""Files of logs: of bounded size, with times, read as one by ``bamboo logs``."""

from __future__ import annotations

import errno
import logging
import os
import select
import threading
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from bamboo_ds.cli.main import cli
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe import logs
from bamboo_ds.observe.logfiles import (
    Following,
    Lines,
    LogFile,
    LogSource,
    files,
    last_lines,
    merged,
    stamped,
    worker_log,
)

pytestmark = pytest.mark.claim("guides/logs.md")

NOON = datetime(2026, 5, 4, 12, 0, 0, 5000)


def text_of(entries: list[tuple[bytes, LogSource, bytes]]) -> list[str]:
    return [f"{source.name}:{line[24:].decode()}".rstrip("\n") for _, source, line in entries]


def test_a_file_is_for_its_owner_and_of_bounded_size(tmp_path: Path) -> None:
    path = worker_log(tmp_path / "logs", 3)
    with_lines = [stamped([b"line %d" % i], NOON) for i in range(10)]
    file = LogFile(path, largest=3 * len(with_lines[0]) + 1)
    follower = Following(LogSource(3, False), path)
    found = []
    for number, line in enumerate(with_lines):
        file.append(line)
        if number in (1, 5):
            found += list(follower.read())
    file.close()
    found += list(follower.read())
    follower.close()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert path.read_bytes() == with_lines[9]
    assert Path(f"{path}.1").read_bytes() == b"".join(with_lines[6:9])
    assert text_of(found) == [f"3:line {i}" for i in range(6)] + [f"3:line {i}" for i in range(6, 10)]
    again = Following(LogSource(3, False), path)
    assert text_of(list(again.read())) == [f"3:line {i}" for i in range(6, 10)], "what is there, in order"
    again.close()
    assert last_lines(path, 5) == ["line 9"] and last_lines(tmp_path / "none", 5) == []


def test_a_file_that_could_not_be_begun_anew_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "worker-0.log"
    file = LogFile(path, largest=10)
    file.append(b"12345678\n")
    with monkeypatch.context() as patch:
        patch.setattr(file, "_open", lambda: os.open(tmp_path, os.O_WRONLY))
        for _ in range(2):
            file.append(b"lost\n")
    file.append(b"again\n")
    file.close()
    assert len(caplog.records) == 1 and "Is a directory" in caplog.text
    assert path.read_bytes() == b"again\n" and Path(f"{path}.1").read_bytes() == b"12345678\n"


def test_who_logs_does_not_wait_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(logs.LOGGER)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logs, "_FLUSH_S", 40.0)
    os.mkfifo(tmp_path / "log")
    reading = os.open(tmp_path / "log", os.O_RDONLY | os.O_NONBLOCK)
    file = LogFile(tmp_path / "log")
    threads = threading.active_count()
    logs.to_file(file)
    logger.info("%s", -1)
    assert threading.active_count() == threads  # an agent has its worker to fork
    logs.begin_files()

    def say() -> None:
        for number in range(200):
            logger.info("%s %d", "x" * 1000, number)

    saying = threading.Thread(target=say, daemon=True)  # more than the pipe takes
    saying.start()
    saying.join(10.0)
    assert not saying.is_alive()
    found = b""
    while found.count(b"\n") < 201:
        assert select.select([reading], [], [], 40.0)[0]
        found += os.read(reading, 1 << 20)
    logger.handlers[0].flush()
    assert [int(line.split()[-1]) for line in found.splitlines()] == list(range(-1, 200))
    file.close()
    os.close(reading)


def test_a_log_without_room_complains_once(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger(logs.LOGGER)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(logger, "propagate", False)
    logs.configure()
    file = LogFile("/dev/full")
    logs.to_file(file)
    for number in range(3):
        logger.warning("record %d", number)
    for handler in logger.handlers:
        handler.flush()
    file.close()
    told = capfd.readouterr().err
    assert sorted(line.partition("] ")[2] for line in told.splitlines()) == [
        "bamboo_ds.observe: /dev/full lacks what could not be written: [Errno 28] No space left on device",
        "bamboo_ds: record 0",
        "bamboo_ds: record 1",
        "bamboo_ds: record 2",
    ], told


def test_lines_of_several_files_are_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("2026-05-04 12:00:01.000 a\n2026-05-04 12:00:03.000 c\n")
    (tmp_path / "agent-10.log").write_text("2026-05-04 12:00:02.000 b\nTraceback\n2026-05-04 12:00:04.000 d\ncut sh")
    (tmp_path / "events.jsonl").write_text("{}\n")
    followed = [Following(source, path) for source, path in files(tmp_path).items()]
    assert [line for _, _, line in merged(followed)] == [
        b"2026-05-04 12:00:01.000 a\n",
        b"2026-05-04 12:00:02.000 b\n",
        b"Traceback\n",
        b"2026-05-04 12:00:03.000 c\n",
        b"2026-05-04 12:00:04.000 d\n",
    ]
    for each in followed:
        each.close()


def test_progress_bars_do_not_pile_up() -> None:
    lines = Lines()
    for percent in range(100):
        assert not lines.feed(b"\r%3d%% " % percent + b"#" * 1000)
    assert len(lines.rest) < 2000
    assert lines.feed(b"\rdone\r\nnext\nres") == [b"done\r", b"next"]
    assert stamped([b"done\r"], NOON) == b"2026-05-04 12:00:00.005 done\n"
    assert lines.feed(b"") == [b"res"] and not lines.rest
    assert lines.feed(b"x" * 90_000) == [b"x" * 90_000]


def test_bamboo_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "logs" / "gpt"
    folder.mkdir(parents=True)
    for name, line in (("worker-0", "one"), ("worker-2", "two"), ("agent-2", "three")):
        (folder / f"{name}.log").write_text(f"2026-05-04 12:00:00.000 {line}\n")
    told = {
        (): "[0] 2026-05-04 12:00:00.000 one\n[2] 2026-05-04 12:00:00.000 two\n",
        ("--member", "m2-e373aeb4"): "[2] 2026-05-04 12:00:00.000 two\n",
        ("--member", "0", "--color"): "\x1b[36m[0]\x1b[0m 2026-05-04 12:00:00.000 one\n",
        (
            "--member",
            "m2",
            "--agents",
            "-f",
        ): "[agent 2] 2026-05-04 12:00:00.000 three\n[2] 2026-05-04 12:00:00.000 two\n",
    }
    for arguments, expected in told.items():
        done = CliRunner().invoke(cli, ["logs", "--job", "gpt", "--logs", str(tmp_path / "logs"), *arguments])
        assert done.output == expected, arguments
    for arguments, words in (
        (["--job", "gpt", "--member", "x"], "--member 'x': write a member as"),
        (["--job", "gpt", "--member", "7"], "no member of --member 7 has written"),
        (["--job", "other"], "name it with --logs"),
        ([], "no job runs here; name one that has ended with --job"),
    ):
        error = CliRunner().invoke(cli, ["logs", "--logs", str(tmp_path / "logs"), *arguments]).exception
        assert isinstance(error, ConfigError) and words in str(error)


def test_bamboo_logs_into_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of who reads them is nothing about the logs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "worker-0.log").write_text("2026-05-04 12:00:00.000 one\n")

    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("bamboo_ds.cli.logs.click.echo", broken)
    found = CliRunner().invoke(cli, ["logs", "--job", "gpt", "--logs", str(tmp_path)])
    assert found.exit_code == 1 and not isinstance(found.exception, ConfigError)
