"""Placement of owners: within what they may hold, least iteration time, fewest bytes moved, neighbours together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from .board import Board
from .loads import Loads
from .packing import packed
from .partition import SLACK, fast_enough, partition
from .question import Question


def place_owners(question: Question, min_gain: float) -> tuple[str, ...]:
    """The owner of every role, all of them usable members.

    Roles whose owners are usable stay where they are, unless moving some makes the slowest member faster by a
    share of ``min_gain``, or their owners may not hold them.
    """
    board = Board(question)
    still = _settled(board)
    best, bins = partition(board.seconds, len(board.roster.usable))
    enough = fast_enough(best, min_gain)
    if still.within and still.slowest <= enough * (1 + SLACK):
        return _owners(still)
    # Next to the best: worth a change, and leaving nothing to gain that would be worth another.
    for limit in (best, min(enough, still.slowest * (1 - min_gain))):
        moved = _levelled(board, limit)
        if moved.within and moved.slowest <= limit * (1 + SLACK):
            return _owners(moved)
    return _owners(packed(board, still, min_gain) if board.limited else _from_scratch(board, bins))


def _owners(board: Board) -> tuple[str, ...]:
    assert not board.homeless
    return tuple(str(owner) for owner in board.owners)


def _settled(board: Board) -> Board:
    """Only the homeless roles are placed; all others stay."""
    ranks = board.homeless
    if not ranks:
        return board
    _, level = _spread(board, ranks)
    limit = max(board.slowest, level)
    cheap = _placed(board, limit)
    if cheap.slowest <= limit * (1 + SLACK):
        return cheap
    fast = board.copy()
    for rank, member in _spread(board, ranks)[0].items():
        fast.put(rank, member)
    return fast


def _seated(board: Board, limit: float) -> Board:
    """Homeless roles with those of their holders that have room within ``limit``; others stay homeless."""
    board = board.copy()
    for rank in board.homeless:
        board.seat(rank, limit)
    return board


def _levelled(board: Board, limit: float) -> Board:
    """Members above ``limit`` give roles away. The result may still exceed ``limit``."""
    board = _seated(board, limit)
    finder = Loads(board.loads) if board.redundant else None
    owned: dict[str, set[int]] = {}
    for rank, owner in enumerate(board.owners):
        if owner is not None:
            owned.setdefault(owner, set()).add(rank)
    for member in board.roster.usable:
        if board.loads[member.id] > limit * (1 + SLACK):
            _shed(board, member.id, owned[member.id], limit, finder)
    return _placed(board, limit)


def _shed(board: Board, member: str, own: set[int], limit: float, finder: Loads | None) -> None:
    """Takes roles from ``member``, whose roles are ``own``, until it is within ``limit``: the cheapest ones first.

    A role costs nothing if a holder has room for it, or if it needs another copy anyway because no member can
    shadow it: the copy's holder becomes its owner and ``member`` its shadow.
    """
    roster = board.roster
    apart = finder.least(roster.domains, (roster.domains[member],)) if finder is not None else None

    script_rank = roster.everyone[member].script_rank

    def price(rank: int) -> tuple[int, int, bool, int]:
        free = board.holder(rank, limit, besides=member) is not None
        if apart is not None and not free and not board.shadowable(rank, member):
            free = board.fits(rank, apart, limit)
        together = sum(neighbour in own for neighbour in board.adjacent[rank])
        # The script's own role stays where scripts do something to their own stages.
        return (0 if free else board.weights[rank], together, rank == script_rank, -rank)

    heap = [(price(rank), rank) for rank in own]
    heapify(heap)
    loose = []
    while board.loads[member] > limit * (1 + SLACK):
        quoted, rank = heappop(heap)
        if rank not in own:
            continue
        if quoted != price(rank):  # dearer by now: its holder has no room any more
            heappush(heap, (price(rank), rank))
            continue
        own.remove(rank)
        board.take(rank)
        if not board.seat(rank, limit, besides=member):
            loose.append(rank)
        for neighbour in board.adjacent[rank]:
            if neighbour in own:  # cheaper by now: it has lost a neighbour
                heappush(heap, (price(neighbour), neighbour))
    for rank in reversed(loose):
        if board.fits(rank, member, limit):
            board.put(rank, member)


def _placed(board: Board, limit: float) -> Board:
    """All homeless roles placed: with holders that have room within ``limit``, else as evenly as possible."""
    board = _seated(board, limit)
    ranks = board.homeless
    if not ranks:
        return board
    spread, level = _spread(board, ranks)
    gathered = _gathered(board, ranks, level, limit)
    if gathered is not None:
        return gathered
    for rank, member in spread.items():
        board.put(rank, member)
    return board


def _spread(board: Board, ranks: Iterable[int]) -> tuple[dict[int, str], float]:
    """The dearest role to the least loaded member, and so on; also the highest load that this makes."""
    heap = [(load, board.roster.order[member], member) for member, load in board.loads.items()]
    heapify(heap)
    chosen, level = {}, 0.0
    for rank in sorted(ranks, key=lambda rank: (-board.seconds[rank], rank)):
        load, position, member = heap[0]
        chosen[rank] = member
        level = max(level, load + board.seconds[rank])
        heapreplace(heap, (load + board.seconds[rank], position, member))
    return chosen, level


def _gathered(board: Board, ranks: Sequence[int], level: float, limit: float) -> Board | None:
    """``ranks`` placed as evenly as ``level``, neighbours together and zones apart where possible.

    No member exceeds ``limit``, and none gets a second role while another has none. ``None`` if a role does not
    fit.
    """
    board = board.copy()
    roster, finder = board.roster, Loads(board.loads)
    script_ranks: dict[int, list[str]] = {}
    for candidate in roster.usable:
        script_ranks.setdefault(candidate.script_rank, []).append(candidate.id)
    busy = {owner for owner in board.owners if owner is not None}
    doubles = len(ranks) - (len(board.loads) - len(busy))
    for rank in ranks:
        wishes = [
            (_neighbour(board, rank, level) if doubles > 0 else None, level),
            (next((m for m in script_ranks.get(rank, ()) if m not in busy), None), level),
            # Zones are worth no second role.
            (finder.least(roster.zones, board.zones_beside(rank)), level),
        ]
        only = board.only_domain(rank) if board.redundant else None
        if only is not None:
            # The holders stay free to shadow the role: that saves a copy, for which all of ``limit`` may be used.
            wishes = [wish for wish in wishes if wish[0] and roster.domains[wish[0]] != only]
            wishes.append((finder.least(roster.domains, (only,)), limit))
        least = finder.least()
        assert least is not None
        member = next((m for m, most in wishes if m is not None and board.fits(rank, m, most)), least)
        if member in busy and least not in busy and doubles <= 0 and only is None:
            member = least
        if not board.fits(rank, member, limit):
            return None
        doubles -= member in busy
        busy.add(member)
        board.put(rank, member)
        finder.update(member, board.loads[member])
    return board


def _neighbour(board: Board, rank: int, level: float) -> str | None:
    """The owner of most neighbours of the role that has room for it within ``level``, if any."""
    found = board.neighbours(rank)
    roomy = [member for member in found if board.fits(rank, member, level)]
    return min(roomy, key=lambda m: (-found[m], board.loads[m], board.roster.order[m]), default=None)


def _from_scratch(board: Board, bins: Sequence[int]) -> Board:
    """The division ``bins`` (by rank), each bin given to the member that holds most of it."""
    held: dict[tuple[int, str], tuple[int, int]] = {}
    for rank, number in enumerate(bins):
        for member in board.held(rank):
            free, stays = held.get((number, member), (0, 0))
            stays += board.weights[rank] * (board.owners[rank] == member)
            held[number, member] = (free + board.weights[rank], stays)
    order = board.roster.order
    chosen: dict[int, str] = {}
    spare = dict.fromkeys(member.id for member in board.roster.usable)
    for number, member in sorted(held, key=lambda key: (*(-x for x in held[key]), order[key[1]], key[0])):
        if number not in chosen and member in spare:
            chosen[number] = member
            del spare[member]
    chosen.update(zip((each for each in dict.fromkeys(bins) if each not in chosen), spare, strict=False))
    fresh = board.copy()
    fresh.owners = [None] * len(bins)
    fresh.loads = dict.fromkeys(board.loads, 0.0)
    for rank, number in enumerate(bins):
        fresh.put(rank, chosen[number])
    return fresh
