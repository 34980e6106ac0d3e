"""Collectives of an epoch's members: each member hears of all others by way of its neighbours in a tree."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ..errors import NotMet, ProtocolError
from .links import Links
from .tree import Tree
from .wire.payloads import Payload, PeerMessage, read, written

#: What a member tells those who might wait for it as it enters the epoch.
_ENTERED = b"entered"

#: Makes one payload of several, which are in the plan's order of the members that they come from first.
Merge = Callable[[list[Payload]], Payload]


class Agreement:
    """Collectives of an epoch's members, for one thread at a time.

    All raise ``EpochChanged`` when the epoch ends, ``PeerLost`` when a member is gone, and the first one ``NotMet``
    when a member has not come within the timeout.

    Args:
        links: the epoch's.
        members: all of it, in the plan's order.
        timeout: for all to come to the first collective; ``None``: any.
        awaited: called with members that have not entered the epoch, and for how many seconds they have been waited
            for: after ``tell_after_s``, then after twice as long each time.
    """

    def __init__(
        self,
        links: Links,
        members: Sequence[str],
        timeout: timedelta | None = None,
        awaited: Callable[[Sequence[str], float], None] = lambda members, seconds: None,
        tell_after_s: float = math.inf,
    ) -> None:
        self._links, self._members = links, members
        self._timeout, self._awaited, self._tell_after_s = timeout, awaited, tell_after_s
        self._tree = Tree(members, links.member)
        self._rounds = 0
        links.services[_ENTERED] = self._welcome

    def enter(self) -> None:
        """Tells the tree's parent, which waits for this member, that it has entered the epoch."""
        if self._tree.parent is not None:
            self._links.send(self._tree.parent, _ENTERED, 0, None)

    def _welcome(self, entered: PeerMessage) -> None:
        """Tells children in the tree, which hear nothing else from this parent for now, that it has entered, too."""
        if entered.source in self._tree.children:
            self._links.tell(_ENTERED, entered.source, None)

    # -- all members -------------------------------------------------------------------------------------
    def exchange(self, value: Any) -> dict[str, Any]:
        """Every member's ``value``, which JSON can carry, by member in the plan's order. Collective."""
        found: dict[str, Any] = read(self.gather("exchange", written({self._links.member: value}), _join))
        return {member: found[member] for member in self._members}

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of ``tensor`` over all members, as a new tensor. Bit-equal on all. Collective.

        For small CPU tensors of one dtype and shape. Members are summed up as they are in the tree of the plan's
        members: exact in any order where each element comes from one member and is zero on the others. ``tensor`` may
        still be on its way then, as what a channel sends: it must not be changed until all that was sent has arrived.
        """
        total = self.gather("all_reduce", tensor, _sum)
        assert isinstance(total, torch.Tensor)
        return total.clone()  # others may still get it

    def barrier(self, operation: str = "barrier") -> None:
        """Waits for all members. Collective."""
        self.gather(operation, None, lambda _: None)

    def gather(self, operation: str, payload: Payload, merge: Merge) -> Payload:
        """All members' ``payload`` merged, equal on all. Collective.

        Each member merges its own with those of its children in the tree, and passes that on.
        """
        self._links.life.check(operation)
        self._rounds += 1
        timeout = self._timeout if self._rounds == 1 else None
        return self._combine(operation, f"round/{self._rounds}".encode(), self._tree, payload, merge, timeout)

    # -- some of them ------------------------------------------------------------------------------------
    def meet(self, operation: str, key: bytes, members: Sequence[str], timeout: timedelta, flat: bool = False) -> None:
        """Waits until ``members`` meet at ``key``, which is used once in an epoch.

        Args:
            operation: for messages.
            key: see above.
            members: this one and others, in an order that is equal on all.
            timeout: for all of them to come.
            flat: the first one hears of all itself, and so can say who has not come.

        Raises:
            EpochChanged, PeerLost: the epoch ended, or one of ``members`` is gone and had not come.
            NotMet: some of them have not come within the timeout.
        """
        tree = Tree(members, self._links.member, len(members) if flat else None)
        self._combine(operation, key, tree, None, lambda _: None, timeout)

    # -- the tree ----------------------------------------------------------------------------------------
    def _combine(
        self, operation: str, key: bytes, tree: Tree, payload: Payload, merge: Merge, timeout: timedelta | None
    ) -> Payload:
        up, down = key + b"/up", key + b"/down"
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        if tree.children:
            parts = self._collect(operation, up, tree, tree.children, deadline, timeout)
            payload = merge([payload, *parts])
        if tree.parent is not None:
            self._links.send(tree.parent, up, 0, payload)
            (payload,) = self._collect(operation, down, tree, [tree.parent], deadline, timeout)
        for child in tree.children:
            self._links.send(child, down, 0, payload)
        return payload

    def _collect(
        self,
        operation: str,
        key: bytes,
        tree: Tree,
        members: Sequence[str],
        deadline: float | None,
        timeout: timedelta | None,
    ) -> list[Payload]:
        """The messages of ``members``, neighbours in ``tree``, for ``key``, in their order."""
        with self._links.changed:
            inbox = self._links.inbox(key)
            for member in members:
                missing = self._await_from(operation, inbox, member, members, deadline)
                if missing:
                    who = ", ".join(tree.told(each) for each in missing)
                    raise NotMet(f"Timed out waiting {timeout} in {operation} for {who}", missing)
            messages = {message.source: message for message in inbox}
            self._links.drop(key)
        return [messages[member].payload() for member in members]

    def _await_from(
        self, operation: str, inbox: deque[PeerMessage], member: str, members: Sequence[str], deadline: float | None
    ) -> list[str]:
        """Waits for ``member``'s message; returns those of ``members`` that have sent none if it is late.

        Tells, more and more rarely, which of them have not even entered the epoch.
        """
        begin, pause, ready = time.monotonic(), self._tell_after_s, partial(_has_from, inbox, member)
        heard = self._links.heard
        while True:
            left = math.inf if deadline is None else max(0.0, deadline - time.monotonic())
            seconds = left if member in heard else min(left, pause)
            limit = None if math.isinf(seconds) else timedelta(seconds=seconds)
            if self._links.wait(operation, ready, [member], limit):
                return []
            if seconds == left:
                return [other for other in members if not _has_from(inbox, other)]
            absent = [other for other in members if other not in heard]
            if absent:
                self._awaited(absent, time.monotonic() - begin)
            pause *= 2


def _has_from(inbox: Iterable[PeerMessage], member: str) -> bool:
    return any(message.source == member for message in inbox)


def _sum(contributions: list[Payload]) -> Payload:
    total, *others = contributions
    assert isinstance(total, torch.Tensor)
    for other in others:
        assert isinstance(other, torch.Tensor)
        if other.shape != total.shape or other.dtype != total.dtype:
            raise ProtocolError(f"all_reduce of {total.shape} {total.dtype} and {other.shape} {other.dtype}")
        total = total + other  # what this member was given stays as it is
    return total


def _join(contributions: list[Payload]) -> Payload:
    return written({member: value for each in contributions for member, value in read(each).items()})
