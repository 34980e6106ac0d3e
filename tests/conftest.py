"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator

import pytest
from hypothesis import settings

import bamboo_ds.store.connection  # noqa: F401 - it decides how gRPC treats forks, which tests that import gRPC must not
from bamboo_ds.observe.logs import LOGGER

from .support import times
from .support.jobs import Result
from .support.references import References

# Examples take longer beside jobs.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# With it, each of the many processes would compile the package for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: nobody could press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Fixtures that start processes.
_STARTERS = {"etcd", "own_etcd", "store", "start", "reference", "make_hosts", "trio"}
#: Seconds that a test with processes is taken for that nobody has measured.
_UNKNOWN_S = 5.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts processes is distributed test by test, the rest file by file; of both the longest comes first."""
    known = times.durations()
    starters: set[pytest.Item] = set()
    files: dict[str, float] = defaultdict(float)
    for item in items:
        if _STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.integration)
        if item.get_closest_marker("integration") is not None:
            starters.add(item)
        else:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
            files[item.path.name] += known.get(item.nodeid, 0.0)

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        starts, file = item in starters, item.path.name
        return not starts, -(known.get(item.nodeid, _UNKNOWN_S) if starts else files[file]), file

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Spare the collector what has been imported: simulated jobs make much garbage beside all of torch."""
    gc.collect()
    gc.freeze()


_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_may_start = True


def _watch(event: str, _: tuple[object, ...]) -> None:
    if not _may_start and event in _PROCESS_EVENTS:
        raise AssertionError("this test starts a process: mark it with pytest.mark.integration")


sys.addaudithook(_watch)


_processors = times.processors()


def pytest_sessionfinish() -> None:
    """Note what all that ran meanwhile has left of the processors' time."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        wall, busy, idle = (now - then for now, then in zip(times.processors(), _processors, strict=True))
        times.note("processors: busy", wall, busy)
        times.note("processors: idle, as all wait", wall, idle)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Time the test; refuse processes in tests that are not said to start any."""
    global _may_start
    begin, _may_start = time.monotonic(), item.get_closest_marker("integration") is not None
    try:
        return (yield)
    finally:
        _may_start = True
        times.note(times.TEST, time.monotonic() - begin, test=item.nodeid)


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command that a test calls in this process sets the package's log up for good."""
    logger = logging.getLogger(LOGGER)
    before = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture(scope="session", autouse=True)
def logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Events of jobs whose tests name no file for them are not in the working directory."""
    os.environ["BAMBOO_LOGS"] = str(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Undisturbed runs, each made once: ``reference(stages, pipelines, micro_batches, *arguments, own=False)``.

    Stock DeepSpeed; with ``own`` our own run without a failure, for models with random layers. Of ``script``.
    """
    base = tmp_path_factory.getbasetemp()
    # All processes of pytest-xdist share them.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "references"
    folder.mkdir(exist_ok=True)
    return References(folder).get
