"""A script under a worker's eyes runs as under the interpreter alone, and each of its ends is seen."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from bamboo_ds.control.agent.command import observed
from bamboo_ds.errors import EXIT_FATAL_LOSS, EpochChanged
from bamboo_ds.worker.exit import ScriptExit

pytestmark = pytest.mark.claim("reference/settings.md")

STUB = ("-m", "bamboo_ds.control.script")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("train.py", "-m", "x")),
        (("-u",), ("-m", "package.train", "--a")),
        (("-uB", "-W", "ignore", "-Xdev", "-X", "utf8"), ("train.py",)),
    ],
)
def test_python_is_observed(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    for python in (sys.executable, "python3"):
        assert observed((python, *before, *after)) == (python, *before, *STUB, *after)


@pytest.mark.parametrize(
    "command", [("bash", "train.sh"), ("python", "-c", "pass"), ("python", "-um", "x"), ("python", "-"), ("python",)]
)
def test_what_is_no_script_runs_as_it_is(command: tuple[str, ...]) -> None:
    assert observed(command) == command


def test_an_error_while_torch_makes_its_groups_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, bool]] = []
    codes: list[int] = []
    channel: Any = SimpleNamespace(exit_notice=lambda why, failed: told.append((why, failed)), close=lambda: None)
    session: Any = None
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr("os._exit", codes.append)
    exit_ = ScriptExit(channel, session, lambda: None, lambda: None)
    for error in (RuntimeError("a port is taken"), EpochChanged("a loss")):
        with pytest.raises(RuntimeError), exit_.unhooked():
            raise error
        sys.excepthook(type(error), error, None)
    assert told == [("RuntimeError: a port is taken", True), ("EpochChanged: a loss", False)]
    assert codes == [EXIT_FATAL_LOSS]


def test_a_thread_that_leaves_ends_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((sys, "exit"), (sys, "excepthook"), (builtins, "exit"), (builtins, "quit")):
        monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)
    nothing: Any = None
    seen = ScriptExit(nothing, nothing, lambda: None, lambda: None)
    seen.watch()
    atexit.unregister(seen._finish)

    def leave() -> None:
        with contextlib.suppress(SystemExit):
            sys.exit(3)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert seen._exit_code is None
    with pytest.raises(SystemExit):
        sys.exit(3)
    assert seen._exit_code == 3
