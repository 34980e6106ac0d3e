"""Fixtures shared by all tests."""

from __future__ import annotations

import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from bamboo_ds.observe.logs import LOGGER

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with many jobs come first: what is short is left for the end, when processes run out of files."""
    jobs = Counter(item.path for item in items if item.get_closest_marker("integration"))
    items.sort(key=lambda item: -jobs[item.path])


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command that a test calls in this process sets the package's log up for good."""
    logger = logging.getLogger(LOGGER)
    before = list(logger.handlers), logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


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
