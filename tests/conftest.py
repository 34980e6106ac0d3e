"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import bamboo_ds.store.connection  # noqa: F401 - it decides how gRPC treats forks, which tests that import gRPC must not
from bamboo_ds.observe.logs import LOGGER

from .support.comm_worker import stop_fork_server
from .support.control import start
from .support.fixtures import etcd, own_etcd, store
from .support.hosts import make_hosts
from .support.jobs import Result
from .support.leaks import no_leaks
from .support.nccl import session
from .support.references import References

__all__ = ["etcd", "make_hosts", "own_etcd", "start", "store"]  # fixtures

# Examples take longer beside jobs.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

# The collector would look at all that test modules import again and again.
gc.disable()

# With it, each of the many processes would compile the package for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: nobody could press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Fixtures that start processes.
_STARTERS = {"etcd", "fork_server", "own_etcd", "store", "start", "reference", "make_hosts", "trio"}
#: Layers of tests that start no process.
_WITHOUT = {"unit", "model"}
#: Seconds that tests took when ``make test-times`` measured them, for those that took longer than one.
_DURATIONS = Path(__file__).with_name("durations.json")
#: Seconds that a test with processes is taken for that nobody has measured.
_UNKNOWN_S = 5.0


def _layer(item: pytest.Item) -> str:
    """The folder of a test below ``tests``."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


@pytest.hookimpl(wrapper=True)  # pytest-xdist asks for the groups in a hook that comes before others
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
    """What starts processes comes first, then the longest. Tests whose members are forked from one server share it."""
    known: dict[str, float] = json.loads(_DURATIONS.read_text())
    groups: dict[str, float] = defaultdict(float)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if _STARTERS.intersection(fixtures):
            item.add_marker(pytest.mark.integration)
        if "fork_server" in fixtures:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
            groups[item.path.name] += known.get(item.nodeid, _UNKNOWN_S)

    misplaced = [i.nodeid for i in items if i.get_closest_marker("integration") and _layer(i) in _WITHOUT]
    assert not misplaced, f"these start processes: {misplaced}"

    if session.ON_NCCL:
        left = [item for item in items if not session.has_jobs(item)]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)

    def place(item: pytest.Item) -> tuple[bool, float, str]:
        starts, file = item.get_closest_marker("integration") is not None, item.path.name
        alone = known.get(item.nodeid, _UNKNOWN_S if starts else 0.0)
        return not starts, -(groups[file] if item.get_closest_marker("xdist_group") else alone), file

    items.sort(key=place)
    result = yield
    if getattr(config.option, "loadgroup", False):
        lost = [item.nodeid for item in items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        assert not lost, f"this pytest-xdist does not know the groups of {len(lost)} tests with this pytest"
    return result


def pytest_collection_finish() -> None:
    """Spare the collector what has been imported: simulated jobs make much garbage beside all of torch."""
    gc.enable()
    gc.collect()
    gc.freeze()


_PROCESS_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_may_start = True


def _watch(event: str, _: tuple[object, ...]) -> None:
    if not _may_start and event in _PROCESS_EVENTS:
        raise AssertionError("this test starts a process: mark it with pytest.mark.integration")


sys.addaudithook(_watch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse processes in tests that are not said to start any."""
    global _may_start
    _may_start = item.get_closest_marker("integration") is not None
    try:
        return (yield)
    finally:
        _may_start = True


_taken: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _taken[report.nodeid.partition("@")[0]] += report.duration


def pytest_sessionfinish() -> None:
    if "BAMBOO_TEST_TIMES" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        long = {test: round(seconds, 1) for test, seconds in sorted(_taken.items()) if seconds >= 1.0}
        _DURATIONS.write_text(json.dumps(long, indent=0) + "\n")


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


@pytest.fixture
def leak_gate(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, process or socket of the test is left at its end."""
    if "etcd" in request.fixturenames:
        request.getfixturevalue("etcd")  # it stays for other tests
    with no_leaks():
        yield


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What members of a :class:`~tests.support.comm_worker.Cluster` are forked from."""
    # Otherwise the folder of its socket is one in /tmp, where it stays when this process or a member is killed.
    multiprocessing.current_process()._config["tempdir"] = str(tmp_path_factory.mktemp("m"))  # type: ignore[attr-defined]
    yield
    stop_fork_server()


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
