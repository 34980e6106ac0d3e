"""What the demo shows while it runs: what ``bamboo top`` shows on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..observe.live import LiveJob
from .top_view import frame

#: Notes that the live picture holds at most.
_NOTES = 8
#: Seconds between two pictures.
_DRAW_S = 0.2
#: Plain output names every so many steps.
_PLAIN_EVERY = 5


class View:
    """Shows the demo's course on ``console``. A context manager.

    Attributes:
        job: what is known of the job that is shown; ``None``: nothing but its steps.
    """

    def __init__(self, console: Console, steps: int, plain: bool) -> None:
        self._console = console
        self._steps = steps
        self._begin = time.monotonic()
        self._drawn = 0.0
        self._phase = ""
        self._progress = Text("")
        self._step = 0
        self._notes: deque[Text] = deque(maxlen=_NOTES)
        self.job: LiveJob | None = None
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
            self._drawn = 0.0
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

    def refresh(self) -> None:
        """Draw anew, if the last time is a little ago."""
        if self._live is not None and time.monotonic() >= self._drawn + _DRAW_S:
            self._drawn = time.monotonic()
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
        if self.job is not None:
            view = self.job.view().model_copy(update={"story": ()})
            parts += [Text(""), frame(view, time.time(), self._console.width - 4, self._console.height - _NOTES)]
        parts += self._notes
        return Panel(Group(*parts), title="bamboo demo", title_align="left", subtitle=self._elapsed())
