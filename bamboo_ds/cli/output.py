"""Output of commands: tables, and lists of commands."""

from __future__ import annotations

import os

import click
from rich.console import Console
from rich.text import Text

#: Columns of what is no terminal: nothing is cut in a file or a pipe.
_WIDE = 1000


class Commands(click.Group):
    """A group whose help has the whole first sentence of each command."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        shown = [(name, self.commands[name].get_short_help_str(limit=1000)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(shown)


def console() -> Console:
    """The standard output. Without a terminal tables are as wide as their contents, unless ``COLUMNS`` is set."""
    found = Console()
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(width=_WIDE)


def printable(text: str, style: str = "") -> Text:
    """``text`` of a job as it is: neither rich's markup nor a terminal's control characters have an effect."""
    shown = (each if each.isprintable() or each == "\n" else "\N{REPLACEMENT CHARACTER}" for each in text)
    return Text("".join(shown), style)
