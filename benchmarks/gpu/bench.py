"""What the commands of this folder share: a device or the label of a run without one, a limit of time, and results.

Importing it puts ``benchmarks/`` before this folder, which has modules of the same names: ``import recovery`` finds
that of ``benchmarks/``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from deepspeed.accelerator import get_accelerator
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import JobFailed, console, fresh, save_json

EMULATED = "EMULATED on the CPU: not a run on a GPU"
MIB = 2**20


class NoGpu(click.ClickException):
    """There is no GPU, and nothing else is to be tried."""

    exit_code = 2


class TimeOver(JobFailed):
    """The limit of time leaves no room for more."""


@dataclass
class Experiment:
    """One run of a command.

    Attributes:
        name: of the command; its JSON is ``gpu-<name>.json``.
        out: folder of results.
        gpu: whether the device is one.
        device: its name, or that it is emulated, for all output.
        minutes: limit of time.
        problems: what was not as it should be.
    """

    name: str
    out: Path
    gpu: bool
    device: str
    minutes: float
    problems: list[str] = field(default_factory=list)
    _begin: float = field(default_factory=time.monotonic)
    _content: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, name: str, allow_cpu: bool, out: Path, minutes: float) -> Experiment:
        """Look for a device, and tell of it.

        Raises:
            NoGpu: there is none, and ``allow_cpu`` is not given.
        """
        kind = get_accelerator().device_name()
        gpu = kind != "cpu" and bool(get_accelerator().is_available())
        if not gpu and not allow_cpu:
            raise NoGpu(
                f"torch {torch.__version__} sees no GPU (DeepSpeed's accelerator is {kind}), and nothing else is a run "
                "on one. --allow-cpu runs the same with tiny sizes on the processors, to try this program itself"
            )
        device = torch.get_device_module(kind).get_device_name(0) if gpu else EMULATED
        console.print(f"[bold]{device}[/bold], torch {torch.__version__}, CUDA {torch.version.cuda}")
        return cls(name, out.resolve(), gpu, device, minutes)

    @property
    def kind(self) -> str:
        """Torch's name of the device's type, without a number."""
        return str(get_accelerator().device_name()) if self.gpu else "cpu"

    def left_s(self) -> float:
        """Seconds until the limit of time."""
        return self._begin + 60 * self.minutes - time.monotonic()

    def timeout_s(self, what: str, least_s: float = 5.0) -> float:
        """Seconds that ``what`` may take; raises :class:`TimeOver` if these are fewer than ``least_s``."""
        left = self.left_s()
        if left < least_s:
            raise TimeOver(f"{what}: left out, {self.minutes:g} minutes are over")
        return left

    def folder(self, name: str) -> Path:
        """An empty folder for a job."""
        return fresh(self.out / "jobs" / f"gpu-{self.name}-{name}")

    def say(self, text: str) -> None:
        """A line with the device's name."""
        console.print(f"{self.device}: {text}", markup=False, highlight=False)

    def blame(self, problem: str) -> None:
        """Something is not as it should be; the command goes on, and fails at its end."""
        self.problems.append(problem)
        self.say(problem)

    def save(self, tell: bool = False, **content: Any) -> None:
        """Write the JSON, with all ``content`` so far; after every result, so that an early end leaves those."""
        self._content |= content
        head = {"title": f"{self.device}: {self.name}", "device": self.device, "emulated": not self.gpu}
        file = self.out / f"gpu-{self.name}.json"
        save_json(file, {**head, "problems": self.problems, **self._content}, tell=tell)

    def show(self, table: Table) -> None:
        """Print ``table`` with the device's name."""
        table.title = f"{self.device}: {table.title}"
        console.print(table)

    def end(self, table: Table, **content: Any) -> None:
        """Show ``table``, and write the JSON."""
        self.show(table)
        self.save(tell=True, **content)


def table(title: str, *columns: str) -> Table:
    """An empty table; columns after the first are numbers, unless their names begin with a blank."""
    result = Table(title=title)
    for number, column in enumerate(columns):
        result.add_column(escape(column.strip()), justify="left" if number == 0 or column.startswith(" ") else "right")
    return result


def experiment(name: str, minutes: float = 9.0) -> Callable[[Callable[..., None]], click.Command]:
    """Make a function of an :class:`Experiment`, and of further options, a command; ``minutes``: its usual limit.

    The command fails if there were problems, after its results are written.
    """

    def wrap(function: Callable[..., None]) -> click.Command:
        def main(allow_cpu: bool, out: Path, minutes: float, **options: Any) -> None:
            run = Experiment.begin(name, allow_cpu, out, minutes)
            try:
                function(run, **options)
            except JobFailed as error:
                run.blame(error.message)
                run.save(tell=True)
            if run.problems:
                problems = "; ".join(problem.splitlines()[0] for problem in run.problems)
                raise JobFailed(f"{run.device}: not all is as it should be: {problems}")

        main.__doc__ = function.__doc__
        options = [
            click.option(
                "--allow-cpu", is_flag=True, help="Without a GPU: tiny sizes on the CPU, labelled as emulated."
            ),
            click.option("--minutes", type=click.FloatRange(min=0), default=minutes, show_default=True, help="Limit."),
            click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="out", show_default=True),
        ]
        # What the decorators above the function's name have left there.
        main.__click_params__ = list(getattr(function, "__click_params__", []))  # type: ignore[attr-defined]
        for option in options:
            main = option(main)
        return click.command(name)(main)

    return wrap
