"""The view of process groups on this process's session: its epoch, and the rank that they are called for.

torch calls a backend's constructor with nothing of ours, so the attachment is one of the process (:func:`current`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from ..errors import EpochChanged
from .calls.script import ScriptCollectives, ThreadContext
from .epoch import Epoch
from .keyvalue import TorchStore

#: Answers a collective: the logical ranks of the group, torch's name of the operation, its arguments.
Answer = Callable[[tuple[int, ...], str, tuple[Any, ...]], None]

_current: Attachment | None = None


def current() -> Attachment:
    """The attachment of this process; raises ``RuntimeError`` if it has no session."""
    if _current is None:
        raise RuntimeError("the bamboo backend needs a Session: start the job with 'bamboo run'")
    return _current


def publish(attachment: Attachment | None) -> None:
    """Makes ``attachment`` that of this process; raises ``RuntimeError`` if there is one already."""
    global _current
    if _current is not None and attachment is not None:
        raise RuntimeError("this process has a Session already; close it first")
    _current = attachment


def slices_name(ranks: Sequence[int]) -> str:
    """Name for :meth:`Session.logical_group` of the slices of a stage, whose logical ranks are ``ranks``."""
    return f"bamboo/slices/{ranks[0]}"


def group_key(name: str, ranks: Sequence[int]) -> str:
    """Key of the group ``name`` of ``ranks``, equal on all of its members."""
    return f"{name}/{'.'.join(map(str, ranks))}"


class Acting(NamedTuple):
    """A thread that acts for a logical rank, see :meth:`Attachment.acting_for`."""

    thread: int
    rank: int
    answer: Answer


class Alone(NamedTuple):
    """Code of the script that the engine runs on members at different times, so that it must not wait for others.

    Attributes:
        where: it communicates, for errors.
        cure: what to do instead.
    """

    where: str
    cure: str


#: What gives batches.
DRAW = Alone(
    "while it gives a batch",
    "A member that draws the batches of a lost rank is alone, so an iterator or batch_fn must not wait for other "
    "ranks. Let the iterators of the first and of the last stage read the same batches, each by itself (what is random "
    "from a generator that is seeded with the batch's number)",
)
#: What is told of changes of the plan.
LISTENER = Alone(
    "in a function given to bamboo_ds.on_plan_change",
    "Members call it in the middle of a recovery, each when it is that far: note what has changed there, and "
    "communicate between two calls of the engine",
)
#: What installs something on a stage.
INSTALLER = Alone(
    "in a function given to bamboo_ds.on_stage_built",
    "It is called for copies of a stage as well, which members build at different times: communicate before "
    "deepspeed.initialize",
)


class Founders(NamedTuple):
    """Processes among which a thread communicates, see :meth:`Attachment.among_founders`."""

    thread: int
    of_rank: Mapping[int, str]
    on_use: Callable[[], None]


@dataclass(frozen=True)
class SliceGroup:
    """The slices of a stage among which layers communicate now, see :meth:`Attachment.among_slices`."""

    own: tuple[int, ...]
    ranks: tuple[int, ...]
    passing: bool = False

    @property
    def key(self) -> str:
        """Key of the group, equal on all of its members whatever handles they use."""
        return group_key(slices_name(self.ranks), self.ranks)


class Attachment:
    """The epoch that this process is attached to. See :func:`publish`.

    Args:
        timeout: default timeout of operations.

    Attributes:
        epoch: the newest that is, or is being, attached; ``None`` before the first.
        reason: of its absence.
        detached: whether collectives are no-ops.
        passing: whether the main thread computes a pass whose layers are whole.
        alone: code of the script that the main thread runs and that must not communicate, or ``None``.
        on_host: whether collectives run through host memory, wherever their tensors are.
        slices: the groups that handles of slice groups stand for now; ``None``: their own.
        script: the script's own collectives, once there is an engine that recovers for them.
        torch_store: what torch.distributed's groups use as their store.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.epoch: Epoch | None = None
        self.reason = "no epoch is attached yet"
        self.detached = True
        self.passing = self.on_host = False
        self.alone: Alone | None = None
        self.slices: SliceGroup | None = None
        self.script: ScriptCollectives | None = None
        self.torch_store = TorchStore(self._ask, "torch/", timeout)
        self._acting: Acting | None = None
        self._founders: Founders | None = None

    @property
    def entered(self) -> Epoch:
        """The newest epoch, which may have ended; raises ``EpochChanged`` if there is none."""
        if self.epoch is None:
            raise EpochChanged(self.reason)
        return self.epoch

    @property
    def current(self) -> Epoch:
        """The attached epoch; raises ``EpochChanged`` if there is none, or if it is aborted."""
        epoch = self.entered
        epoch.life.check("operation")
        return epoch

    def _ask(self, request: dict[str, Any], timeout: timedelta) -> Any:
        """Puts a request to the store of the epoch that is current: its keys do not outlive the epoch."""
        epoch = self.current
        return epoch.reached_at(epoch.plan.members[0])(request, timeout)

    # -- callers of groups --------------------------------------------------------------------------------
    @property
    def context(self) -> ThreadContext:
        """The caller: the engine, the script, or a script whose calls are replayed."""
        return "engine" if self.script is None else self.script.context

    @property
    def acting(self) -> Acting | None:
        """The rank that the calling thread acts for, if not for its own."""
        acting = self._acting
        return acting if acting is not None and acting.thread == threading.get_ident() else None

    @property
    def founders(self) -> Founders | None:
        """The only processes that the calling thread communicates with, if so; autograd's threads do as the caller."""
        founders, thread = self._founders, threading.current_thread()
        if founders is None or founders.thread == thread.ident or isinstance(thread, threading._DummyThread):
            return founders
        return None

    @property
    def in_pass(self) -> bool:
        """Whether the calling thread computes a pass that has no collectives; autograd's threads do as the main one."""
        thread = threading.current_thread()
        return self.passing and (thread is threading.main_thread() or isinstance(thread, threading._DummyThread))

    @property
    def script_alone(self) -> Alone | None:
        """Code of the script that the calling thread runs and that must not communicate, if any."""
        return self.alone if threading.current_thread() is threading.main_thread() else None

    def among_nobody(self, what: Alone) -> AbstractContextManager[None]:
        """In the body the main thread runs ``what`` of the script, which must not wait for other ranks."""
        return self._during("alone", what)

    @contextmanager
    def _during(self, name: str, value: object) -> Iterator[None]:
        """In the body the attribute ``name`` is ``value``."""
        before = getattr(self, name)
        setattr(self, name, value)
        try:
            yield
        finally:
            setattr(self, name, before)

    def acting_for(self, rank: int, answer: Answer) -> AbstractContextManager[None]:
        """In the body the calling thread acts for another rank, alone.

        ``torch.distributed.get_rank()`` is ``rank``, and collectives are not run but answered.

        Args:
            rank: logical rank.
            answer: called for every collective.
        """
        return self._during("_acting", Acting(threading.get_ident(), rank, answer))

    def among_founders(self, of_rank: Mapping[int, str], on_use: Callable[[], None]) -> AbstractContextManager[None]:
        """In the body every group of the calling thread is one of certain processes, and a loss is an error.

        No process stands in for a rank: operations of groups with a process that is gone raise ``EpochChanged``.

        Args:
            of_rank: the process of each rank.
            on_use: called before each operation of a group of several ranks.
        """
        return self._during("_founders", Founders(threading.get_ident(), of_rank, on_use))

    def through_host(self) -> AbstractContextManager[None]:
        """In the body collectives run through host memory, wherever their tensors are.

        No communicator of devices is made, which would take seconds, and could not be aborted while it is.
        """
        return self._during("on_host", True)

    def among_slices(
        self, own: Sequence[int], ranks: Sequence[int], passing: bool = False
    ) -> AbstractContextManager[None]:
        """In the body, the layers of another stage may run in this process.

        Layers that are cut into slices communicate in a group that they take from wherever their script has it, which
        is the group of the stage that this process began as. In the body every handle of that group is one of the
        group of the stage whose layers run; so is every handle of the latter. Holds for all threads (autograd has its
        own).

        Args:
            own: logical ranks of the slices of the stage that the process began as.
            ranks: those of the stage whose layers run, in the same order.
            passing: they run in a pass. Only the device uses what they get there, so that the host waits for none of
                it (:meth:`~.groups.Groups.confirm` does in the end).
        """
        return self._during("slices", SliceGroup(tuple(own), tuple(ranks), passing))
