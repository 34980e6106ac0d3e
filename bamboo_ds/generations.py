"""Fencing of a job's earlier starts: which of them may still write into a folder shared with later ones.

A lineage (see :mod:`bamboo_ds.control.fencing`) that begins where another one has ended says so by empty files in the
folder, ``.bamboo-over~<origin>~<generation>`` for every generation before it. Files only come, so that whoever looks
afterwards finds them, in whatever order others have written. A job that was never started again leaves none.
"""

from __future__ import annotations

import os
from pathlib import Path

Lineage = tuple[str, int]

OVER = ".bamboo-over"
_SEPARATOR = "~"


def mark_of(origin: str, generation: int) -> str:
    """Name of the file that says that a later lineage than this one has begun."""
    return _SEPARATOR.join((OVER, origin, str(generation)))


def supersede(folder: Path, lineage: Lineage) -> None:
    """Stops earlier lineages of the job from writing into ``folder``, which exists; raises ``OSError``.

    Idempotent. Those that looked before may be about to write.
    """
    origin, generation = lineage
    known = set(os.listdir(folder)) if origin and generation else set()
    for number in range(generation if origin else 0):
        mark = folder / mark_of(origin, number)
        if mark.name not in known:
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def is_over(folder: Path, lineage: Lineage) -> bool:
    """Whether a later lineage has begun in ``folder``; raises ``OSError`` if that cannot be looked up."""
    origin, generation = lineage
    if not origin:
        return False
    try:
        # A listing, since network file systems remember for a while that a name does not exist.
        return mark_of(origin, generation) in os.listdir(folder)
    except FileNotFoundError:
        return False
