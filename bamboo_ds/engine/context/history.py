"""What the job has done: the results of its operations, for members that come later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["train", "evaluate", "save", "load", "visit"]


@dataclass(frozen=True)
class Done:
    """One operation of the script.

    Attributes:
        kind: ``train``: an iteration, with the losses of each pipeline, and whether optimizers skipped their step;
            ``evaluate``: an evaluation, with the loss of each pipeline; ``save``, ``load``: a checkpoint, with its
            folder and tag (``None``: there was none); ``visit``: a call for each stage.
        data: the result, as JSON values.
        alike: whether the iterators of both ends of each pipeline have given the same batches; ``None``: that was not
            compared.
    """

    kind: Kind
    data: Any
    alike: bool | None = None


class History:
    """All operations since the script began, in order; equal on all members. Appending is the main thread's alone.

    Args:
        slices: tensor slices, each of which has losses of its own; those of the first count.
    """

    #: Key under which a state server answers with what was done from some number on.
    PREFIX = "history/"

    def __init__(self, slices: int = 1) -> None:
        self._slices = slices
        self._done: list[Done] = []
        self._alike: dict[Kind, bool] = {}
        #: Number of iterations among them.
        self.steps = 0

    def __len__(self) -> int:
        return len(self._done)

    def __getitem__(self, number: int) -> Done:
        return self._done[number]

    def add(self, kind: Kind, data: Any, alike: bool | None = None) -> None:
        """Note an operation; see :class:`Done`."""
        self._done.append(Done(kind, data, alike))
        self.steps += kind == "train"
        if alike is not None:
            self._alike[kind] = alike and self._alike.get(kind, True)

    def add_iteration(self, losses: Sequence[Sequence[float]], skipped: bool, alike: bool | None = None) -> None:
        """Note an iteration: its losses by pipeline, and whether the optimizers left out their step."""
        self.add("train", {"losses": [list(each) for each in losses], "skipped": skipped}, alike)

    def alike(self, kind: Kind) -> bool | None:
        """Whether the ends of pipelines have given the same in all operations of ``kind`` that were compared."""
        return self._alike.get(kind)

    @property
    def differs(self) -> bool:
        """Whether the ends of a pipeline have ever given different batches."""
        return not all(self._alike.values())

    @classmethod
    def key(cls, first: int) -> str:
        """The key to ask for everything from number ``first`` on."""
        return f"{cls.PREFIX}{first}"

    def answer(self, key: str) -> str:
        """The answer to :meth:`key`; callable from any thread."""
        return _as_text(self._done[int(key.removeprefix(self.PREFIX)) :])

    def extend(self, answer: str) -> int:
        """Take over what another member has answered; returns how much that was."""
        new = [Done(*each) for each in json.loads(answer)]
        for done in new:
            self.add(done.kind, done.data, done.alike)
        return len(new)

    def first(self, count: int, *more: Done) -> str:
        """The first ``count`` operations, and ``more``, as :meth:`extend` takes them; callable from any thread."""
        return _as_text([*self._done[:count], *more])

    def losses(self, count: int) -> list[float]:
        """Mean loss of the global batch of every iteration among the first ``count`` operations; from any thread."""
        iterations = [each.data["losses"][:: self._slices] for each in self._done[:count] if each.kind == "train"]
        return [sum(losses[0] for losses in each) / len(each) for each in iterations]

    def count(self, kind: Kind) -> int:
        """How many operations of ``kind`` there are."""
        return sum(done.kind == kind for done in self._done)

    def save_folders(self) -> list[str]:
        """Folders that checkpoints were saved into, the last one first."""
        return list(dict.fromkeys(each.data["folder"] for each in reversed(self._done) if each.kind == "save"))

    def newest_save(self, folder: str) -> list[int]:
        """Numbers of the saves into ``folder``, the newest first."""
        found = [i for i, done in enumerate(self._done) if done.kind == "save" and done.data["folder"] == folder]
        return found[::-1]


def _fields(done: Done) -> list[Any]:
    return [done.kind, done.data, *([] if done.alike is None else [done.alike])]


def _as_text(done: Sequence[Done]) -> str:
    """A JSON list.

    Made of one operation at a time: in one call the history of a long job would hold the interpreter's lock for
    seconds, and no heartbeat would go out.
    """
    return f"[{', '.join(json.dumps(_fields(each)) for each in done)}]"
