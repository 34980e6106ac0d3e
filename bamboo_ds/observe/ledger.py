"""The ledger of the micro-batches that committed steps have consumed: a JSON object per line, step and pipeline.

A folder with one file per member, ``<member>.jsonl``. A line is written once the step has committed, by the owner of
the pipeline's first stage. After a loss it may be there twice, from two members, with equal contents (``member``,
``epoch`` and ``time`` aside). A file's last line may be cut off, when its member died while writing it: then it is in
another file. :mod:`.audit` verifies it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from ..generations import Lineage, is_over, supersede
from .event_base import Utc

logger = logging.getLogger("bamboo_ds.observe.ledger")

#: Fields that tell who wrote a line, not what was consumed.
_WRITER_FIELDS = {"member", "epoch", "time"}


class LedgerLine(BaseModel):
    """Micro-batches that one pipeline has consumed in one step. Lists are by micro-batch.

    Attributes:
        run: names a start of the job's workers; one that was started again has another.
        step: committed iterations of the job, from 1 on; one that is started again goes on from its checkpoint's.
        global_step: DeepSpeed's ``global_steps`` after the step: a checkpoint that is loaded sets it back.
        pipeline, pipelines: which one of how many.
        inputs, labels: CRC-32, eight hexadecimal digits, of the data that the first and the last stage have loaded.
        position: number of the first micro-batch among all of the pipeline's in this run; with ``training_data`` only,
            as the following.
        samples: size of the dataset.
        passes: which pass over the dataset.
        indices: of the samples.
        member, epoch, time: writer of the line, and when it was written.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal[1] = Field(default=1, alias="schema")
    run: str
    step: int = Field(ge=1)
    global_step: int = Field(ge=0)
    pipeline: int = Field(ge=0)
    pipelines: int = Field(ge=1)
    inputs: list[str] = Field(min_length=1)
    labels: list[str]
    position: int | None = Field(default=None, ge=0)
    samples: int | None = Field(default=None, ge=1)
    passes: list[int] | None = None
    indices: list[list[int]] | None = None
    member: str
    epoch: int
    time: Utc = Field(default_factory=lambda: datetime.now(timezone.utc))

    @model_validator(mode="after")
    def _complete(self) -> Self:
        lists = [self.labels, self.passes, self.indices]
        if any(each is not None and len(each) != len(self.inputs) for each in lists):
            raise ValueError("inputs, labels, passes and indices must be equally long")
        if len({value is None for value in (self.position, self.samples, self.passes, self.indices)}) > 1:
            raise ValueError("position, samples, passes and indices go together")
        if self.pipeline >= self.pipelines:
            raise ValueError(f"there is no pipeline {self.pipeline} among {self.pipelines}")
        return self

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the pipeline."""
        return len(self.inputs)

    def contents(self) -> dict[str, Any]:
        """The consumed data, without the writer."""
        return {name: value for name, value in self if name not in _WRITER_FIELDS}

    def to_json(self) -> str:
        """One line of JSON, without the newline."""
        return self.model_dump_json(by_alias=True, exclude_none=True)


class LedgerWriter:
    """Appends one member's lines; not synchronised to the disk. A failed write is logged, and training goes on.

    Args:
        folder: of the ledger; made if need be.
        member: id of the member.
    """

    def __init__(self, folder: str, member: str) -> None:
        self._path = os.path.join(folder, f"{member}.jsonl")
        self._torn = self._failing = False
        self._begun: Lineage = ("", 0)

    def append(self, line: LedgerLine, lineage: Lineage = ("", 0)) -> None:
        """Write ``line``: one ``write`` on a descriptor opened with ``O_APPEND``.

        Args:
            lineage: that of the step. Once a later one writes there the line is refused, like a failed write.
        """
        data = (b"\n" if self._torn else b"") + line.to_json().encode() + b"\n"
        try:
            folder = Path(self._path).parent
            os.makedirs(folder, exist_ok=True)
            if self._begun != lineage:
                supersede(folder, lineage)
                self._begun = lineage
            if is_over(folder, lineage):
                raise PermissionError("the job has been started again without this worker, which accounts for nothing")
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(descriptor, data)
            finally:
                os.close(descriptor)
            self._torn = written < len(data)
            failure = f"only {written} of {len(data)} bytes were written" if self._torn else None
        except OSError as error:
            failure = str(error)
        if failure is not None and not self._failing:
            logger.error("step %d is missing in the ledger: %s: %s", line.step, self._path, failure)
        self._failing = failure is not None


def ledger_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files of a ledger: those named, and all ``*.jsonl`` of the folders named."""
    found: list[Path] = []
    for path in map(Path, paths):
        found += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return found


def read_ledger(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[LedgerLine], list[str]]:
    """All lines of the files and folders ``paths``, and the defects of those that cannot be read.

    The last line of a file does not count without a newline at its end.
    """
    lines, problems = [], []
    for file in ledger_files(paths):
        *complete, _ = file.read_bytes().split(b"\n")
        for number, text in enumerate(complete, 1):
            try:
                lines.append(LedgerLine.model_validate(json.loads(text)))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"]))
                problems.append(
                    f"{file}:{number} is no line of a ledger: {where + ': ' if where else ''}{first['msg']}"
                )
            except ValueError as error:
                problems.append(f"{file}:{number} is no line of a ledger: {error}")
    return lines, problems
