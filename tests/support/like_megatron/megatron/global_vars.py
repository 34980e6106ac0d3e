"""Arguments, timers and the writer, which the last rank alone has."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from .timers import Timers

_GLOBAL_ARGS: Any = None
_GLOBAL_TENSORBOARD_WRITER: Any = None
_GLOBAL_TIMERS: Any = None


class SummaryWriter:
    """Stands for TensorBoard's: a file of its own for each process, in one folder."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(exist_ok=True)
        self._file = open(log_dir / f"events.{os.getpid()}", "a", buffering=1)  # noqa: SIM115

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._file.write(json.dumps([name, float(value), step]) + "\n")

    def flush(self) -> None:
        self._file.flush()


def get_args() -> Any:
    return _GLOBAL_ARGS


def get_tensorboard_writer() -> Any:
    return _GLOBAL_TENSORBOARD_WRITER


def get_timers() -> Any:
    return _GLOBAL_TIMERS


def set_global_variables(args: argparse.Namespace) -> None:
    global _GLOBAL_ARGS, _GLOBAL_TIMERS
    _GLOBAL_ARGS, _GLOBAL_TIMERS = args, Timers()
    _set_tensorboard_writer(args)


def _set_tensorboard_writer(args: argparse.Namespace) -> None:
    global _GLOBAL_TENSORBOARD_WRITER
    assert _GLOBAL_TENSORBOARD_WRITER is None
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        _GLOBAL_TENSORBOARD_WRITER = SummaryWriter(args.tensorboard_dir)
