"""Whether a job has consumed every sample once, from what its events tell of each step (``observe.checksums``). Pure.

A step is identified by the start of the workers that it belongs to, and its number. The *history* counts in the end:
the steps whose updates are in the final weights, by DeepSpeed's ``global_step``. Loading a checkpoint sets that back;
the steps after it are done again and replace those that they repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from .event_base import Consumed
from .events import Event, Recovered, Restart, RunStarted, Step


class Consumption:
    """Takes events in any order between two starts of the workers, then verifies them."""

    def __init__(self) -> None:
        self._starts: list[dict[int, Consumed]] = [{}]
        self._goes_on = [False]  # whether the start is another one of the job before it
        self._after_epoch = -1
        self._contradictions: list[str] = []

    def watching(self, events: Iterable[Event]) -> Iterator[Event]:
        """The same ``events``, each taken before it is passed on."""
        for event in events:
            self.add(event)
            yield event

    def add(self, event: Event) -> None:
        """Takes an event. What workers tell that a restart has replaced does not count."""
        if isinstance(event, RunStarted | Restart):
            self._starts.append({})
            self._goes_on.append(isinstance(event, Restart))
            self._after_epoch = event.epoch if isinstance(event, Restart) else -1
        elif isinstance(event, Step | Recovered) and event.consumed is not None and event.epoch > self._after_epoch:
            known = self._starts[-1].setdefault(event.consumed.step, event.consumed)
            if known != event.consumed:
                told = f"{_contents(known)} and {_contents(event.consumed)}"
                self._contradictions.append(f"step {known.step} is told twice, to have consumed {told}")

    @property
    def starts(self) -> list[dict[int, Consumed]]:
        """The consumption of each start of the workers that has told of a step, by step."""
        return [start for start in self._starts if start]

    def history(self) -> dict[int, Consumed]:
        """The steps that count, by global step."""
        found: dict[int, Consumed] = {}
        for start in self._starts:
            for step in sorted(start):
                while found and next(reversed(found)) >= start[step].global_step:
                    found.popitem()
                found[start[step].global_step] = start[step]
        return found

    def problems(self) -> list[str]:
        """The problems; none: every step is there, and no sample is consumed twice."""
        found = list(self._contradictions)
        for start, goes_on in zip(self._starts, self._goes_on, strict=True):
            # A job that was started again goes on counting where the checkpoint was saved; the history has no gap.
            first = min(start, default=1) if goes_on else 1
            missing = sorted(set(range(first, max(start, default=0))) - start.keys())
            found += [f"nothing tells what step {step} has consumed" for step in missing]
            for step in sorted(start.keys() & {step + 1 for step in start}):
                found += _gaps(start[step - 1], start[step])
        for before, after in pairwise(self.history().values()):
            if after.global_step != before.global_step + 1:
                found.append(f"global step {after.global_step} follows global step {before.global_step}")
            found += _repetitions(before, after)
        return found

    def alike(self) -> int:
        """Steps of the history with the contents of an earlier one, as in a later pass over the data."""
        history = self.history()
        return len(history) - len({each.checksum for each in history.values()})


def _gaps(before: Consumed, after: Consumed) -> list[str]:
    """Gaps between two successive steps of one start."""
    if before.samples is None or after.samples is None or before.samples[1] == after.samples[0]:
        return []
    return [f"step {after.step} begins with sample {after.samples[0]}, expected {before.samples[1]}"]


def _repetitions(before: Consumed, after: Consumed) -> list[str]:
    """Repetitions in two successive steps of the history."""
    if before.samples is None or after.samples is None or before.samples[1] <= after.samples[0]:
        return []
    samples = f"samples {after.samples[0]} to {before.samples[1] - 1}"
    return [f"{samples} are consumed by global step {before.global_step} and again by {after.global_step}"]


def _contents(consumed: Consumed) -> str:
    samples = "" if consumed.samples is None else f" of samples {consumed.samples[0]} to {consumed.samples[1] - 1}"
    return f"{consumed.checksum}{samples}"
