"""What the demo shows while it runs: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

#: Notes that the live picture holds at most, and lines of it that are no notes.
_NOTES = 14
_OTHER_LINES = 16
#: Plain output names every so many steps.
_PLAIN_EVERY = 5


@dataclass
class Grid:
    """Who owns and who shadows each stage.

    Attributes:
        members: all members ever, in the order of their slots.
        owners, shadows: by stage.
        killed: members that were killed.
    """

    members: list[str] = field(default_factory=list)
    owners: Sequence[str] = ()
    shadows: Sequence[str | None] = ()
    killed: set[str] = field(default_factory=set)

    def table(self) -> Table:
        """Members by stages."""
        table = Table(title_justify="left")
        table.add_column("member")
        for stage in range(len(self.owners)):
            table.add_column(f"stage {stage}", justify="center", min_width=9)
        for member in self.members:
            dead = member in self.killed
            name = Text(f"{member} killed", style="red strike") if dead else Text(member)
            table.add_row(name, *(self._cell(member, stage) for stage in range(len(self.owners))))
        return table

    def _cell(self, member: str, stage: int) -> Text:
        if self.owners[stage] == member:
            return Text("✗", style="red") if member in self.killed else Text("OWNER", style="bold green")
        if self.shadows and self.shadows[stage] == member:
            return Text("shadow", style="cyan")
        return Text("")

    def line(self) -> str:
        """The same in one line."""
        cells = []
        for stage, owner in enumerate(self.owners):
            shadow = self.shadows[stage] if self.shadows else None
            cells.append(f"stage {stage}: {owner}/{shadow or '-'}")
        return "owner/shadow  " + "  ".join(cells)


class View:
    """Shows the demo's course on ``console``. A context manager."""

    def __init__(self, console: Console, steps: int, plain: bool) -> None:
        self._console = console
        self._steps = steps
        self._begin = time.monotonic()
        self._phase = ""
        self._progress = Text("")
        self._step = 0
        self._notes: deque[Text] = deque(maxlen=_NOTES)
        self.grid: Grid | None = None
        self._live: Live | None = None
        if console.is_terminal and not plain:
            # Refreshed by hand: a thread of its own would make it unsafe to start processes.
            self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self.refresh()
            self._live.stop()

    def phase(self, text: str, busy: str = "starting the workers …") -> None:
        """A new part of the demo begins; ``busy`` says what it does before its first step."""
        self._phase, self._step, self._progress = text, 0, Text(busy, style="dim")
        if self._live is None:
            self._console.print(f"[{self._elapsed()}] {text}", markup=False, highlight=False)
        self.refresh()

    def step(self, step: int, loss: float, remark: str = "") -> None:
        """A step is done."""
        self._step = step
        self._progress = Text(f"step {step}/{self._steps}   loss {loss:.6f}   {remark}")
        if self._live is None and (step % _PLAIN_EVERY == 0 or step in (1, self._steps)):
            self._print(self._progress)
        self.refresh()

    def note(self, text: str, style: str = "") -> None:
        """Something worth a line has happened."""
        line = Text(text, style=style)
        self._notes.append(Text.assemble((f"{self._elapsed()} ", "dim"), line))
        if self._live is None:
            self._print(line)
        self.refresh()

    def plan(self) -> None:
        """The grid has changed."""
        if self._live is None and self.grid is not None:
            self._print(Text(self.grid.line()))
        self.refresh()

    def refresh(self) -> None:
        """Draw anew."""
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def _print(self, text: Text) -> None:
        self._console.print(f"[{self._elapsed()}]   {text.plain}", markup=False, highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._begin:5.1f} s"

    def _picture(self) -> RenderableType:
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self._steps, completed=self._step, width=60))
        parts: list[RenderableType] = [
            Text(self._phase, style="bold"),
            bar,
            self._progress,
        ]
        if self.grid is not None and self.grid.owners:
            parts += [Text(""), self.grid.table()]
        if self._notes:
            room = max(4, self._console.height - _OTHER_LINES)
            parts += [Text(""), *list(self._notes)[-room:]]
        return Panel(Group(*parts), title="bamboo demo", title_align="left", subtitle=self._elapsed())
