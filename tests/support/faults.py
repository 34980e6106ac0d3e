"""Faults at exact places: a worker kills or stops itself at one point of one step.

A fault is JSON: ``{"rank", "step", "at", "micro_batch", "signal", "stage", "evaluating", "healed", "after"}``. ``at``
is the name of an instruction class, or of an engine method with a leading dot. With ``healed`` it waits from ``step``
on until every stage has a shadow and the plan has lost the slot ``after``. Before it strikes it leaves a file, so that
a test can count it.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any


def install(engine: Any, faults: str, folder: str) -> None:
    """Wrap the engine's instructions and methods so that the faults meant for this worker strike."""
    rank = int(os.environ["RANK"])
    mine = [f for f in json.loads(faults) if f["rank"] == rank]
    kind = type(engine)
    handlers = dict(engine._INSTRUCTION_MAP)
    known = {instruction.__name__: instruction for instruction in handlers}
    for fault in mine:
        name = fault["at"]
        if name.startswith("."):
            setattr(kind, name[1:], _wrapped(getattr(kind, name[1:]), fault, Path(folder)))
        else:
            handlers[known[name]] = _wrapped(handlers[known[name]], fault, Path(folder))
    kind._INSTRUCTION_MAP = handlers


def mark(fault: dict[str, Any]) -> str:
    """Name of the file that a fault leaves."""
    return f"fault-{fault['rank']}-{fault['step']}-{fault['at']}-{fault.get('micro_batch')}"


def strike(fault: dict[str, Any], folder: Path) -> None:
    """Leave the mark and die (or stop)."""
    with open(folder / mark(fault), "w") as file:
        file.write(str(os.getpid()))
        file.flush()
        os.fsync(file.fileno())
    os.kill(os.getpid(), getattr(signal, fault.get("signal", "SIGKILL")))


def _due(engine: Any, fault: dict[str, Any]) -> bool:
    if fault.get("healed"):
        plan = engine._plan
        after = fault.get("after")
        return (
            engine._committed_steps >= fault["step"]
            and None not in plan.shadows
            and not engine._learners
            and not any(member.startswith(f"m{after}-") for member in plan.members)
        )
    return bool(engine._committed_steps == fault["step"])


def _wrapped(handler: Callable[..., Any], fault: dict[str, Any], folder: Path) -> Callable[..., Any]:
    def run(engine: Any, *args: Any, **kwargs: Any) -> Any:
        at = kwargs.get("buffer_id", args[0] if args else None)
        here = (
            _due(engine, fault)
            and fault.get("micro_batch") in (None, at)
            and fault.get("stage") in (None, engine._binding.current.role.stage)
            and bool(fault.get("evaluating")) == engine._evaluating
        )
        if here and not (folder / mark(fault)).exists():
            strike(fault, folder)
        return handler(engine, *args, **kwargs)

    return run
