"""Placement of owners where members may not hold all that would be best for speed."""

from __future__ import annotations

from heapq import nsmallest
from math import inf

from .board import Board
from .partition import SLACK

#: How many places for roles are tried in a search for all of them, and how many members are told apart in it by their
#: script_ranks besides their room.
_PLACES, _TOLD_APART = 50_000, 16
#: How many roles change their owners one after another for the sake of speed.
_ROUNDS = 64
#: How many members are asked to take one, those with least to do.
_IDLEST = 64
#: Of more roles the first places are taken that are found.
_MOST = 400


def packed(board: Board, still: Board, min_gain: float) -> Board:
    """All roles at members that may hold them, the slowest of which has as little to do as is found.

    Args:
        board: where roles lie.
        still: the same with the homeless ones placed; it stays where it is within what members may hold, unless
            another one is faster by ``min_gain``. It is the result, too, where none is found that is.
    """
    first = still if still.within else _settled(board)
    if first is None:
        return still
    better = _levelled(first)
    if first is still and better.slowest > still.slowest * (1 - min_gain) * (1 + SLACK):
        return still
    return better


def _settled(board: Board) -> Board | None:
    """Roles of members that hold too much go elsewhere, as few as possible: to holders, else to the least loaded."""
    board = board.copy()
    ranks: dict[str, list[int]] = {}
    for rank, owner in enumerate(board.owners):
        if owner is not None:
            ranks.setdefault(owner, []).append(rank)
    for member in filter(board.crowded, board.roster.order):

        def price(rank: int, member: str = member) -> tuple[bool, int, int]:
            return board.holder(rank, inf, besides=member) is None, -board.size(rank), rank

        for rank in sorted(ranks.get(member, ()), key=price):
            if board.crowded(member):
                board.take(rank)
    loose = sorted(board.homeless, key=lambda rank: (-board.size(rank), rank))
    for exchanging in (False, True):
        attempt = board.copy()
        attempt.exchanging = exchanging
        if all(_put(attempt, rank) for rank in loose):
            return attempt
    if len(board.owners) > _MOST:
        return None
    found = board.copy()
    found.exchanging = True
    if _search(found, loose, 0, [_PLACES]):
        return found
    for rank, owner in enumerate(board.owners):
        if owner is not None:
            found.take(rank)
    loose = sorted(range(len(found.owners)), key=lambda rank: (-board.size(rank), rank))
    return found if _search(found, loose, 0, [_PLACES]) else None


def _put(board: Board, rank: int) -> bool:
    """Gives the role to a member with room for it: one that holds it, else that with least to do."""
    member = board.holder(rank, inf)
    if member is None:
        able = (m.id for m in board.roster.usable if board.has_room(rank, m.id))
        member = min(able, key=lambda m: (board.loads[m], board.roster.order[m]), default=None)
    if member is not None:
        board.put(rank, member)
    return member is not None


def _search(board: Board, loose: list[int], begin: int, places: list[int]) -> bool:
    """Place the roles ``loose[begin:]``, trying one place after the other; False if that fails, or takes too long."""
    if begin == len(loose):
        return True
    rank = loose[begin]
    held = board.held(rank)
    options = [m.id for m in board.roster.usable if board.has_room(rank, m.id)]
    options.sort(key=lambda m: (m not in held, board.left(m), board.loads[m]))
    tried = set()
    places[0] -= len(board.roster.usable)
    for member in options:
        # Of members with equal room one is tried.
        script_rank = board.roster.everyone[member].script_rank if len(board.roster.usable) <= _TOLD_APART else 0
        kind = board.left(member), script_rank
        if kind in tried:
            continue
        if places[0] < 0:
            return False
        tried.add(kind)
        board.put(rank, member)
        if _search(board, loose, begin + 1, places):
            return True
        board.take(rank)
    return False


def _levelled(board: Board) -> Board:
    """The same where the slowest member has passed roles on, or exchanged them, as long as that makes it faster."""
    best = board = board.copy()
    board.exchanging = False
    for _ in range(_ROUNDS):
        board = board.copy()
        slowest = max(board.roster.usable, key=lambda m: board.loads[m.id]).id
        if not _relieve(board, slowest):
            break
        best = board if board.slowest <= best.slowest * (1 + SLACK) else best
    return best


def _relieve(board: Board, slowest: str) -> bool:
    """Moves a role from ``slowest``, or exchanges it for a smaller one, so that both have less to do than it had."""
    most = board.loads[slowest] * (1 - SLACK)
    order, loads, seconds = board.roster.order, board.loads, board.seconds
    idlest = nsmallest(_IDLEST, (m for m in order if m != slowest), key=lambda m: (loads[m], order[m]))
    roles: dict[str, list[int]] = {member: [] for member in idlest}
    for rank, owner in enumerate(board.owners):
        if owner in roles:
            roles[owner].append(rank)
    options = []
    for rank in [rank for rank, owner in enumerate(board.owners) if owner == slowest]:
        for member in idlest:
            for other in (None, *roles[member]):
                given = seconds[rank] - (0.0 if other is None else seconds[other])
                after = max(loads[member] + given, loads[slowest] - given)
                if given > 0 and after < most:
                    free = other is None and member in board.held(rank)
                    options.append((after, not free, rank, -1 if other is None else other, member))
    for _, _, rank, other, member in sorted(options):
        board.take(rank)
        if other >= 0:
            board.take(other)
        if board.has_room(rank, member) and (other < 0 or board.has_room(other, slowest)):
            board.put(rank, member)
            if other >= 0:
                board.put(other, slowest)
            return True
        if other >= 0:
            board.put(other, member)
        board.put(rank, slowest)
    return False
