"""Faults at exact places: a worker kills or stops itself before one instruction of one step.

A fault is written as JSON: ``{"rank", "step", "instruction", "micro_batch", "signal"}``. Before it strikes it
leaves a file, so that a test can count it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def install(engine: Any, faults: str, folder: str) -> None:
    """Wrap the engine's instructions so that the faults meant for this worker strike."""
    rank = int(os.environ["RANK"])
    mine = [f for f in json.loads(faults) if f["rank"] == rank]
    if not mine:
        return
    handlers = dict(engine._INSTRUCTION_MAP)
    for kind, handler in handlers.items():
        wanted = [f for f in mine if f["instruction"] == kind.__name__]
        if wanted:
            handlers[kind] = _wrapped(handler, wanted, Path(folder))
    type(engine)._INSTRUCTION_MAP = handlers


def strike(fault: dict[str, Any], folder: Path) -> None:
    """Leave the mark and die (or stop)."""
    name = f"fault-{fault['rank']}-{fault['step']}-{fault['instruction']}-{fault.get('micro_batch')}"
    with open(folder / name, "w") as file:
        file.write(str(os.getpid()))
        file.flush()
        os.fsync(file.fileno())
    os.kill(os.getpid(), getattr(signal, fault.get("signal", "SIGKILL")))


def _wrapped(handler: Callable[..., None], faults: list[dict[str, Any]], folder: Path) -> Callable[..., None]:
    def run(engine: Any, *args: Any, **kwargs: Any) -> None:
        for fault in faults:
            at = kwargs.get("buffer_id", args[0] if args else None)
            role = engine._binding.current.role
            if engine._committed_steps != fault["step"] or fault.get("micro_batch") not in (None, at):
                continue
            if fault.get("stage") not in (None, role.stage):
                continue
            if fault.get("after"):
                handler(engine, *args, **kwargs)
            if not list(folder.glob(f"fault-{fault['rank']}-{fault['step']}-*")):
                strike(fault, folder)
        handler(engine, *args, **kwargs)

    return run
