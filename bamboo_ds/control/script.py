"""Runs a worker's script: ``python … -m bamboo_ds.control.script SCRIPT ARGUMENTS``, or ``-m MODULE`` for ``SCRIPT``.

A worker that has ended well waits for its peers, and they wait for it; one that has not must not wait. An interpreter
keeps its exit code to itself, so the script runs in here, where each of its ends is seen: also ``raise SystemExit(3)``.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback
import zipfile
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any

from ..errors import FatalLoss, UserError

#: Whose frames do not help where an error says what to do.
_PACKAGES = {"bamboo_ds", "deepspeed", "torch"}


def main(arguments: Sequence[str]) -> None:
    """Runs the script as the interpreter would; what it raises comes out."""
    sys.excepthook = _show
    try:
        _run(arguments)
    except BaseException as error:
        job: Any = sys.modules.get("bamboo_ds.worker.job")
        if job is not None:
            job.script_ends_by(error)
        raise


def _run(arguments: Sequence[str]) -> None:
    run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]  # what `python -m` calls
    main_module: Any = ModuleType("__main__")
    sys.modules["__main__"] = main_module
    script = arguments[0]
    if script == "-m":
        sys.argv[:] = arguments[1:]
        run_as_main(arguments[1])
        return
    sys.argv[:] = arguments
    path = os.path.join(os.getcwd(), script)
    packed = os.path.isdir(script) or zipfile.is_zipfile(script)
    if packed or not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [path if packed else os.path.dirname(os.path.realpath(script))]
    if packed:
        run_as_main("__main__", False)
        return
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    main_module.__file__, main_module.__cached__ = path, None
    main_module.__loader__ = SourceFileLoader("__main__", path)
    exec(compile(source, path, "exec", dont_inherit=True), main_module.__dict__)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints ``error`` as the interpreter does, without the frames of this module and of those around it."""
    each, own = trace, None
    while each is not None:
        if each.tb_frame.f_code.co_filename == __file__:
            own = each
        each = each.tb_next
    if own is not None:
        trace = own.tb_next
        while trace is not None and trace.tb_frame.f_globals.get("__name__") == "runpy":
            trace = trace.tb_next
    if isinstance(error, UserError) and error.told_by is not None:
        sys.stderr.write(f"bamboo_ds: {kind.__name__}: {error.told_by} tells why\n")
    elif isinstance(error, (UserError, FatalLoss)):  # whose messages say it all
        shown = ["Traceback (most recent call last):\n", *_of_the_script(trace)]
        sys.stderr.write("".join([*shown, *traceback.format_exception_only(kind, error)]))
    else:
        sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _of_the_script(trace: TracebackType | None) -> list[str]:
    """The frames of ``trace`` down to where the script calls a package."""
    frames = 0
    each = trace
    while each is not None and str(each.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _PACKAGES:
        each, frames = each.tb_next, frames + 1
    return traceback.format_tb(trace, frames) if frames else traceback.format_tb(trace)


if __name__ == "__main__":
    main(sys.argv[1:])
