"""Timelines: what the main threads of workers did, instruction by instruction, in a file per member beside the events.

The first line of a file is a :class:`Head`, every other one a span::

    [step, "ForwardPass", pipeline, stage, block, micro-batch, begin, seconds, marks]

``begin`` is of the host's monotonic clock, which all processes of a host share; the head has that clock and UTC as they
were at one moment. Members of one running kernel are put on one scale by that clock; several hosts by UTC, so that
their tracks are shifted against each other by as much as their clocks differ.
"""

from __future__ import annotations

import glob
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ProtocolError
from ..processes import boot_id

#: A file that has become so large makes room for a new one; the one before that is removed. Bytes.
LARGEST_FILE = 32 * 2**20
_SUFFIX = ".timeline.jsonl"
_OLDER = ".1"


class Kind(str, Enum):
    """The kind of a span: an instruction of :mod:`bamboo_ds.schedule` by its name, or something else."""

    ITERATION = "Iteration"
    LOAD = "LoadMicroBatch"
    FORWARD = "ForwardPass"
    BACKWARD = "BackwardPass"
    REDUNDANT_FORWARD = "RedundantForward"
    REDUNDANT_BACKWARD = "RedundantBackward"
    SEND_ACTIVATION = "SendActivation"
    RECV_ACTIVATION = "RecvActivation"
    SEND_GRAD = "SendGrad"
    RECV_GRAD = "RecvGrad"
    RESEND_ACTIVATION = "ResendActivation"
    RESEND_GRAD = "ResendGrad"
    SEND_CHANGES = "SendChanges"
    RECV_CHANGES = "RecvChanges"
    SEND_PART = "SendPart"
    RECV_PART = "RecvPart"
    REDUCE_TIED = "ReduceTiedGrads"
    REDUCE = "ReduceGrads"
    SEND_SUMS = "SendSums"
    SEND_REPLICA = "SendReplica"
    RECV_REPLICA = "RecvReplica"
    COMMIT = "Commit"
    STEP = "OptimizerStep"
    STEP_REPLICA = "StepReplica"
    #: An iteration that the check of the first steps does again.
    REHEARSE = "Rehearse"
    #: From the interruption to the plan of the next epoch.
    AWAIT_PLAN = "AwaitPlan"
    #: New connections, and roles as the plan has them.
    REBUILD = "Rebuild"
    #: All members tell how far they are, and conclude how to go on.
    AGREE = "Agree"
    #: A micro-batch of ``eval_batch``.
    EVALUATE = "Evaluate"
    #: The copy to host memory, and the write where it is waited for.
    SAVE = "SaveCheckpoint"
    #: State that is copied between members while the job waits.
    COPY = "CopyState"


#: Of a recovery, or of the change of plan between two operations.
PAUSES = frozenset({Kind.AWAIT_PLAN, Kind.REBUILD, Kind.AGREE})
PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD})
REDUNDANT = frozenset({Kind.REDUNDANT_FORWARD, Kind.REDUNDANT_BACKWARD})


class Span(NamedTuple):
    """An activity of a main thread; times in seconds on the host's monotonic clock.

    Attributes:
        step: number of the iteration, as events count.
        role: the role that it is of, (pipeline, stage).
        part: first block of the part of the stage that a pass computes.
        redone: a pass whose result the neighbours had got from a lost member already.
        cut: a loss interrupted it.
    """

    kind: Kind
    step: int
    begin: float
    end: float
    role: tuple[int, int] | None = None
    part: int = 0
    micro_batch: int | None = None
    redone: bool = False
    cut: bool = False

    def to_json(self) -> str:
        """One line, without the newline."""
        pipeline, stage = self.role or (None, None)
        marks = "r" * self.redone + "c" * self.cut
        times = round(self.begin, 7), round(self.end - self.begin, 7)
        values = [self.step, self.kind.value, pipeline, stage, self.part, self.micro_batch, *times, marks]
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | bytes) -> Span:
        """The span of one line; raises ``ValueError`` for anything else."""
        values = json.loads(line)
        if not (isinstance(values, list) and len(values) == 9):
            raise ValueError("a span has nine values")
        step, kind, pipeline, stage, part, micro_batch, begin, seconds, marks = values
        role = None if pipeline is None else (int(pipeline), int(stage))
        redone, cut = "r" in marks, "c" in marks
        return cls(Kind(kind), int(step), begin, begin + seconds, role, part, micro_batch, redone, cut)


class Head(BaseModel):
    """The first line of a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeline: int = Field(1, description="version of the format")
    job: str
    member: str
    rank: int = Field(description="RANK of the worker")
    host: str
    boot: str = Field(description="identifies the running kernel, whose processes share the monotonic clock")
    monotonic: float = Field(description="the monotonic clock when the file was begun, in seconds")
    utc: float = Field(description="UTC at the same moment, in seconds since 1970")

    @classmethod
    def now(cls, job: str, member: str, rank: int) -> Head:
        """The head of a file that is begun now on this host."""
        places = {"host": socket.gethostname(), "boot": boot_id()}
        return cls(job=job, member=member, rank=rank, **places, monotonic=time.monotonic(), utc=time.time())


def path_for(events: str | Path, member: str) -> Path:
    """The file of a member's timeline, beside the job's file of events."""
    events = Path(events)
    return events.with_name(f"{events.stem}.{member}{_SUFFIX}")


class SpanFile:
    """Appends spans to the file of a member, which is made with the first of them and readable for its owner alone.

    At most twice ``largest`` bytes are kept, those of the newest spans.
    """

    def __init__(self, path: Path, job: str, member: str, rank: int, largest: int = LARGEST_FILE) -> None:
        self.path, self._largest = path, largest
        self._who = job, member, rank
        self._fd: int | None = None
        self._size = 0

    def write(self, spans: Iterable[Span]) -> None:
        """Appends ``spans``; raises ``OSError``."""
        lines = "".join(f"{span.to_json()}\n" for span in spans).encode()
        if not lines:
            return
        if self._fd is not None and self._size + len(lines) > self._largest:
            self.close()
            os.replace(self.path, f"{self.path}{_OLDER}")
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._size = os.fstat(self._fd).st_size
            lines = Head.now(*self._who).model_dump_json().encode() + b"\n" + lines
        written = os.write(self._fd, lines)
        self._size += written
        if written != len(lines):
            raise OSError(f"{self.path}: wrote {written} of {len(lines)} bytes (disk full?)")

    def close(self) -> None:
        """Closes the file. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


@dataclass
class Timeline:
    """The spans of a member's worker.

    Attributes:
        offset: what brings a time of its spans to seconds since 1970.
    """

    head: Head
    offset: float
    spans: list[Span] = field(default_factory=list)

    @property
    def member(self) -> str:
        """Its member."""
        return self.head.member

    def utc(self, seconds: float) -> float:
        """A time of a span in seconds since 1970."""
        return seconds + self.offset


def read_timelines(events: str | Path) -> list[Timeline]:
    """The timelines beside a file of events, in the order of ranks and of their first spans.

    Raises:
        OSError: a file cannot be read.
        ProtocolError: a line is none of a timeline; a last line that is cut short is passed over.
    """
    events = Path(events)
    start = str(events.with_name(f"{events.stem}."))
    files = glob.glob(f"{glob.escape(start)}*{_SUFFIX}") + glob.glob(f"{glob.escape(start)}*{_SUFFIX}{_OLDER}")
    # A name with a dot is that of another file of events. The older of two files comes first.
    mine = [file for file in files if "." not in file[len(start) :].partition(_SUFFIX)[0]]
    found: dict[str, Timeline] = {}
    clocks: dict[str, float] = {}
    for path in sorted(mine, key=lambda file: (file.removesuffix(_OLDER), not file.endswith(_OLDER))):
        for part in _read(path):
            # One scale for a kernel, whose UTC may have been set meanwhile.
            offset = clocks.setdefault(part.head.boot, part.offset)
            known = found.setdefault(part.member, Timeline(part.head, offset))
            known.spans += part.spans
    for timeline in found.values():
        timeline.spans.sort(key=lambda span: (span.begin, -span.end))
    timelines = [timeline for timeline in found.values() if timeline.spans]
    return sorted(timelines, key=lambda each: (each.head.rank, each.utc(each.spans[0].begin)))


def _read(path: str) -> Iterator[Timeline]:
    """Parts of a file, each with a head of its own."""
    part: Timeline | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                if line.startswith(b"["):
                    if part is None:
                        raise ValueError("the file begins without a head")
                    part.spans.append(Span.from_json(line))
                else:
                    if part is not None:
                        yield part
                    head = Head.model_validate_json(line)
                    part = Timeline(head, head.utc - head.monotonic)
            except (ValidationError, ValueError, TypeError) as error:
                raise ProtocolError(f"{path}:{number}: no line of a timeline: {_short(error)}") from error
    if part is not None:
        yield part


def _short(error: Any) -> str:
    return str(error).splitlines()[0]
