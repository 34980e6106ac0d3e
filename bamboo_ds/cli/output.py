"""Where commands print tables."""

from __future__ import annotations

import os

from rich.console import Console

#: Columns of what is no terminal: nothing is cut in a file or a pipe.
_WIDE = 1000


def console() -> Console:
    """The standard output. Without a terminal tables are as wide as their contents, unless ``COLUMNS`` is set."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)
