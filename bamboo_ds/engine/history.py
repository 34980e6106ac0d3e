"""What the job has done: the results of its operations, for members that come later."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["train", "evaluate", "save", "load"]


@dataclass(frozen=True)
class Done:
    """One operation of the script.

    Attributes:
        kind: ``train``: an iteration, with the losses of each pipeline; ``evaluate``: an evaluation, with the loss of
            each pipeline; ``save``, ``load``: a checkpoint, with its folder and tag (``None``: there was none).
        data: the result, as JSON values.
    """

    kind: Kind
    data: Any


class History:
    """All operations since the script began, in order; equal on all members. Appending is the main thread's alone."""

    #: Key under which a state server answers with what was done from some number on.
    PREFIX = "history/"

    def __init__(self) -> None:
        self._done: list[Done] = []

    def __len__(self) -> int:
        return len(self._done)

    def __getitem__(self, number: int) -> Done:
        return self._done[number]

    def add(self, kind: Kind, data: Any) -> None:
        """Note an operation."""
        self._done.append(Done(kind, data))

    @classmethod
    def key(cls, first: int) -> str:
        """The key to ask for everything from number ``first`` on."""
        return f"{cls.PREFIX}{first}"

    def answer(self, key: str) -> str:
        """The answer to :meth:`key`; callable from any thread."""
        done = self._done[int(key.removeprefix(self.PREFIX)) :]
        return json.dumps([[each.kind, each.data] for each in done])

    def extend(self, answer: str) -> int:
        """Take over what another member has answered; returns how much that was."""
        new = [Done(kind, data) for kind, data in json.loads(answer)]
        self._done += new
        return len(new)

    def newest_save(self, folder: str) -> list[int]:
        """Numbers of the saves into ``folder``, the newest first."""
        found = [i for i, done in enumerate(self._done) if done.kind == "save" and done.data["folder"] == folder]
        return found[::-1]
