"""Faults at exact places: a worker kills or stops itself at one point of one step.

A fault is JSON: ``{"rank", "step", "at", "micro_batch", "signal", "stage", "evaluating", "healed", "after", "when",
"pause"}``. ``at`` is the name of an instruction class, with a leading dot that of a method of the engine (``.name``) or
of one of its parts (``.part.name``), with a leading ``@`` of a place in the thread that writes the checkpoint of that
step (``@stored-…``: where it goes to a store of objects), or with ``~`` of a pass (``~forward``, ``~backward``) in
which a layer of :mod:`sliced` is about to communicate.
The signal ``device`` is an error of the worker's device, which is raised there; ``flip`` goes on with one bit inverted
in a tensor of the ``copy`` (``owner``, ``replica``) of a role that this worker holds, the first one whose name contains
``tensor``. With ``healed`` it waits from ``step``
on until every stage has a shadow, the plan has lost the slot ``after`` and the file ``when`` exists; in the main thread
also until the worker has written its part of the last checkpoint, which would be lost with it. With ``when`` alone it
waits from ``step`` on for that file. With ``pause`` it first waits so many seconds, in which the others come to where
they need this worker. Before it strikes it leaves a file, so that a test can count it; in that file is the tag of the
checkpoint.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

#: What torch raises when a device fails; 2.6 has no error of its own for that.
_of_device = getattr(torch, "AcceleratorError", RuntimeError)


def install(engine: Any, faults: str, folder: str) -> None:
    """Wrap the engine's instructions and methods so that the faults meant for this worker strike."""
    rank = int(os.environ["RANK"])
    mine = [f for f in json.loads(faults) if f["rank"] == rank]
    kind = type(engine)
    handlers = dict(engine.HANDLERS)
    known = {instruction.__name__: instruction for instruction in handlers}
    for fault in mine:
        name = fault["at"]
        if name.startswith("@"):
            _install_while_writing(engine, fault, Path(folder))
        elif name.startswith("~"):
            _install_in_layers(engine, fault, Path(folder))
        elif name.startswith("."):
            part, _, method = name[1:].rpartition(".")
            owner = type(attrgetter(part)(engine._parts)) if part else kind
            setattr(owner, method, _wrapped(engine, getattr(owner, method), fault, Path(folder)))
        else:
            handlers[known[name]] = _wrapped(engine, handlers[known[name]], fault, Path(folder))
    kind.HANDLERS = handlers


def _install_while_writing(engine: Any, fault: dict[str, Any], folder: Path) -> None:
    """Strike in a file, before the role's record, before the manifest, before the rename, or before ``latest``."""
    from bamboo_ds.state import publish, writer
    from bamboo_ds.state.checkpoints import MANIFEST
    from bamboo_ds.state.storage.objects import ObjectStore

    def due(tag: str) -> bool:
        if fault.get("healed"):
            return tag.startswith("step") and int(tag[4:]) >= fault["step"] and _healed(engine, fault)
        return tag == f"step{fault['step']}"

    def before(function: Callable[..., Any], tag_of: Callable[..., str]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            tag = tag_of(*arguments)
            if due(tag) and not (folder / mark(fault)).exists():
                strike(fault, folder, tag)
            return function(*arguments)

        return run

    def in_folder(partial: Path) -> str:
        return partial.name.rpartition("~")[2]

    def named(start: str) -> Callable[..., str]:
        return lambda path, _: in_folder(path.parent) if path.name.startswith(start) else ""

    def stored(start: str) -> Callable[..., str]:
        return lambda _, record, name, text: record.tag if name.startswith(start) else ""

    place: Any = {
        "@stored-part": (ObjectStore, "note", stored(".written-")),
        "@stored-manifest": (ObjectStore, "note", stored(MANIFEST)),
        "@file": (writer.ChecksummedFile, "_append", lambda file, _: in_folder(Path(file._file.name).parent)),
        "@part": (publish, "write_atomically", named(".written-")),
        "@manifest": (publish, "write_atomically", named(MANIFEST)),
        "@rename": (publish, "publish", lambda partial, _, manifest: manifest.tag),
        "@latest": (publish, "point_latest", lambda _, name: name),
    }[fault["at"]]
    owner, name, tag_of = place
    setattr(owner, name, before(getattr(owner, name), tag_of))


def _install_in_layers(engine: Any, fault: dict[str, Any], folder: Path) -> None:
    from sliced import State

    earlier = State.before

    def before(place: str) -> None:
        earlier(place)
        part = engine._parts.binding.current.share.part
        at = part.forwards if place == "~forward" else part.backwards
        here = fault["at"] == place and fault["micro_batch"] == at and not engine._parts.progress.operation.evaluating
        if here and _due(engine, fault) and not (folder / mark(fault)).exists():
            strike(fault, folder)

    State.before = staticmethod(before)


def mark(fault: dict[str, Any]) -> str:
    """Name of the file that a fault leaves."""
    return f"fault-{fault['rank']}-{fault['step']}-{fault['at']}-{fault.get('micro_batch')}"


def in_turn(*faults: dict[str, Any]) -> list[dict[str, Any]]:
    """Each fault waits until the one before has struck and every stage has a shadow again."""
    for before, after in itertools.pairwise(({}, *faults)):
        after["healed"], after["after"] = True, before.get("rank")
    return list(faults)


def flip(engine: Any, fault: dict[str, Any]) -> str:
    """Invert one bit; returns the role and the tensor's name."""
    runtimes = engine._parts.binding.runtimes.values()
    runtime = next(each for each in runtimes if each.owned is (fault["copy"] == "owner"))
    name, tensor = next((n, t) for n, t in runtime.named_tensors() if fault["tensor"] in n)
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)
    return f"{runtime.role} {name}"


def strike(fault: dict[str, Any], folder: Path, note: str = "") -> None:
    """Leave the mark, with ``note`` in it, and die (or stop)."""
    time.sleep(fault.get("pause", 0))
    with open(folder / mark(fault), "w") as file:
        file.write(note)
        file.flush()
        os.fsync(file.fileno())
    if fault.get("signal") == "flip":
        return
    if fault.get("signal") == "device":
        raise _of_device("CUDA error: uncorrectable ECC error encountered")
    if fault.get("signal") == "hang":
        time.sleep(3600)  # the other threads go on, and with them the heartbeat
    os.kill(os.getpid(), getattr(signal, fault.get("signal", "SIGKILL")))


def _healed(engine: Any, fault: dict[str, Any]) -> bool:
    plan, after = engine._parts.epoch.plan, fault.get("after")
    return (
        None not in plan.shadows
        and not engine._parts.copies.constructions
        and not any(member.startswith(f"m{after}-") for member in plan.members)
        and os.path.exists(fault.get("when", "/"))
    )


def _due(engine: Any, fault: dict[str, Any]) -> bool:
    parts = engine._parts
    if fault.get("healed"):
        return parts.progress.steps >= fault["step"] and not parts.saves._saver.busy and _healed(engine, fault)
    if "when" in fault:
        return parts.progress.steps >= fault["step"] and os.path.exists(fault["when"])
    return bool(parts.progress.steps == fault["step"])


def _wrapped(engine: Any, handler: Callable[..., Any], fault: dict[str, Any], folder: Path) -> Callable[..., Any]:
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        at = kwargs.get("buffer_id", args[0] if args else None)
        here = (
            _due(engine, fault)
            and fault.get("micro_batch") in (None, at)
            and fault.get("stage") in (None, engine._parts.binding.current.role.stage)
            and bool(fault.get("evaluating")) == engine._parts.progress.operation.evaluating
        )
        if here and not (folder / mark(fault)).exists():
            strike(fault, folder, flip(engine, fault) if fault.get("signal") == "flip" else "")
        return handler(owner, *args, **kwargs)

    return run
