"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .support.jobs import Result, run_bamboo, run_stock, write_config

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and children inherit that: nobody could press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """Undisturbed runs, each made once: ``reference(stages, pipelines, micro_batches, *arguments, own=False)``.

    Stock DeepSpeed; with ``own`` our own run without a failure, for models with random layers.
    """
    made: dict[Any, Result] = {}

    def get(
        stages: int, pipelines: int, micro_batches: int, *arguments: str, own: bool = False, **config: Any
    ) -> Result:
        key = (stages, pipelines, micro_batches, arguments, own, repr(sorted(config.items())))
        if key not in made:
            folder: Path = tmp_path_factory.mktemp("reference")
            file = write_config(folder, {} if own else None, micro_batches, **config)
            run = run_bamboo if own else run_stock
            result = run(folder, stages * pipelines, ["--stages", str(stages), *arguments], file)
            assert result.exit_code == 0, result.output[-4000:]
            made[key] = result
        return made[key]

    return get
