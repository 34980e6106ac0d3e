"""The job's history: the results of its operations, for members that come later."""

from __future__ import annotations

import base64
import json
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["train", "evaluate", "save", "load", "visit"]

#: Of an iteration: its optimizers left out their step; the ends of pipelines were compared; they were alike.
_SKIPPED, _COMPARED, _ALIKE = 1, 2, 4


@dataclass(frozen=True)
class Done:
    """One operation of the script.

    Attributes:
        kind: ``train``: an iteration, with the losses of each pipeline, and whether optimizers skipped their step;
            ``evaluate``: an evaluation, with the loss of each pipeline; ``save``, ``load``: a checkpoint, with its
            folder and tag (``None``: there was none), and of one that was loaded whether there was none, or one that
            this package has written; ``visit``: a call for each stage.
        data: the result, as JSON values.
        alike: whether the iterators of both ends of each pipeline have given the same batches; ``None``: that was not
            compared.
    """

    kind: Kind
    data: Any
    alike: bool | None = None


class History:
    """All operations since the script began, in order; equal on all members. Appending is the main thread's alone.

    An iteration takes eight bytes for each loss and one more, in memory; where it travels or is in a checkpoint, a
    third more.

    Args:
        slices: tensor slices, each of which has losses of its own; those of the first count.
    """

    #: What keys begin with under which members answer with what was done from some number on.
    PREFIX = "history/"

    def __init__(self, slices: int = 1) -> None:
        self._slices = slices
        self._count = 0
        #: Numbers of pipelines, and of losses of each, in the columns below: those of the first iteration.
        self._shape: tuple[int, int] | None = None
        self._losses, self._flags = array("d"), array("b")
        #: Operations that are not in the columns, by number, and their numbers.
        self._others: dict[int, Done] = {}
        self._numbers: list[int] = []
        self._alike: dict[Kind, bool] = {}
        #: Number of iterations among them.
        self.steps = 0
        self._saved_into: str | None = None
        self._loaded_from: str | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Done:
        if not 0 <= number < self._count:
            raise IndexError(number)
        return self._others.get(number) or self._iteration(self._row(number))

    def _row(self, number: int) -> int:
        """The number of iterations of the columns before operation ``number``."""
        return number - bisect_left(self._numbers, number)

    def _iteration(self, row: int) -> Done:
        assert self._shape is not None
        (pipelines, each), flags = self._shape, self._flags[row]
        begins = range(row * pipelines * each, (row + 1) * pipelines * each, each)
        losses = [self._losses[begin : begin + each].tolist() for begin in begins]
        alike = bool(flags & _ALIKE) if flags & _COMPARED else None
        return Done("train", {"losses": losses, "skipped": bool(flags & _SKIPPED)}, alike)

    def add(self, kind: Kind, data: Any, alike: bool | None = None) -> None:
        """Notes an operation; see :class:`Done`."""
        if kind == "save":
            self._saved_into = data["folder"]
        elif kind == "load" and data.get("ours"):
            self._loaded_from = data["folder"]
        self._others[self._count] = Done(kind, data, alike)
        self._numbers.append(self._count)
        self._note(kind, alike)

    def add_iteration(self, losses: Sequence[Sequence[float]], skipped: bool, alike: bool | None = None) -> None:
        """Notes an iteration: its losses by pipeline, and whether the optimizers left out their step."""
        shape = len(losses), len(losses[0])
        self._shape = self._shape or shape
        if self._shape != shape or any(len(row) != shape[1] for row in losses):
            self.add("train", {"losses": [list(row) for row in losses], "skipped": skipped}, alike)
            return
        for row in losses:
            self._losses.extend(row)
        self._flags.append(_SKIPPED * skipped + _COMPARED * (alike is not None) + _ALIKE * bool(alike))
        self._note("train", alike)

    def _note(self, kind: Kind, alike: bool | None) -> None:
        self.steps += kind == "train"
        if alike is not None:
            self._alike[kind] = alike and self._alike.get(kind, True)
        self._count += 1

    def alike(self, kind: Kind) -> bool | None:
        """Whether the ends of pipelines have given the same in all operations of ``kind`` that were compared."""
        return self._alike.get(kind)

    @property
    def place(self) -> str | None:
        """The folder that the script saves into, as far as its calls tell.

        That of its last save; before the first one that of its last load, if nothing was there or what this package
        has written: else the folder is not the script's, but that of what it begins with.
        """
        return self._saved_into or self._loaded_from

    @property
    def differs(self) -> bool:
        """Whether the ends of a pipeline have ever given different batches."""
        return not all(self._alike.values())

    # -- as text ------------------------------------------------------------------------------------------

    @classmethod
    def key(cls, first: int) -> str:
        """The key to ask for everything from number ``first`` on."""
        return f"{cls.PREFIX}{first}"

    def answer(self, key: str) -> str:
        """The answer to :meth:`key`; callable from any thread."""
        return self._text(int(key.removeprefix(self.PREFIX)), self._count)

    def first(self, count: int, *more: Done) -> str:
        """The first ``count`` operations, and ``more``, as :meth:`extend` takes them; callable from any thread."""
        return self._text(0, count, *more)

    def _text(self, first: int, last: int, *more: Done) -> str:
        """Operations from ``first`` to before ``last``, and ``more``: the columns, and all else by its number.

        All else is encoded one by one: a single call of json's holds the interpreter's lock, and no heartbeat goes out.
        """
        last = max(first, last)  # a member that asks may know more
        width = self._shape[0] * self._shape[1] if self._shape else 0
        begin, end = self._row(first), self._row(last)
        numbers = self._numbers[bisect_left(self._numbers, first) : bisect_left(self._numbers, last)]
        others = [(number - first, self._others[number]) for number in numbers]
        others += enumerate(more, last - first)
        columns = {
            "count": last - first + len(more),
            "shape": self._shape,
            "losses": _packed(self._losses[begin * width : end * width]),
            "flags": _packed(self._flags[begin:end]),
        }
        texts = ", ".join(json.dumps([at, done.kind, done.data, done.alike]) for at, done in others)
        return f'{json.dumps(columns)[:-1]}, "others": [{texts}]}}'

    def extend(self, answer: str) -> int:
        """Takes over what another member has answered, or what a checkpoint tells; returns how much that was."""
        columns = json.loads(answer)
        other = History()
        other._count, other._shape = columns["count"], tuple(columns["shape"]) if columns["shape"] else None
        other._others = {at: Done(*fields) for at, *fields in columns["others"]}
        other._numbers = sorted(other._others)
        other._losses, other._flags = _unpacked("d", columns["losses"]), _unpacked("b", columns["flags"])
        for number in range(len(other)):
            done = other[number]
            if done.kind == "train" and isinstance(done.data, dict):
                self.add_iteration(**done.data, alike=done.alike)
            else:
                self.add(done.kind, done.data, done.alike)
        return len(other)

    # -- questions ----------------------------------------------------------------------------------------

    def losses(self, count: int) -> list[float]:
        """Mean loss of the global batch of every iteration among the first ``count`` operations; from any thread."""
        done = (self[number] for number in range(count))
        iterations = (each.data["losses"][:: self._slices] for each in done if each.kind == "train")
        return [sum(losses[0] for losses in each) / len(each) for each in iterations]

    def count(self, kind: Kind) -> int:
        """The number of operations of ``kind``."""
        return self.steps if kind == "train" else sum(done.kind == kind for done in self._others.values())

    def save_folders(self) -> list[str]:
        """Folders that checkpoints were saved into, the last one first."""
        saves = [each for each in self._others.values() if each.kind == "save"]
        return list(dict.fromkeys(each.data["folder"] for each in reversed(saves)))

    def newest_save(self, folder: str) -> list[int]:
        """Numbers of the saves into ``folder``, the newest first."""
        others = self._others.items()
        return [at for at, done in others if done.kind == "save" and done.data["folder"] == folder][::-1]


def _packed(column: array[Any]) -> str:
    return base64.b64encode(column.tobytes()).decode()


def _unpacked(kind: str, text: str) -> array[Any]:
    column: array[Any] = array(kind)
    column.frombytes(base64.b64decode(text))
    return column
