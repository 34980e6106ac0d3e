"""Times of blocks on this member, for the planner (:mod:`bamboo_ds.topology.block_costs`)."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from ...topology import BlockSeconds, Role

#: Of so many of the latest iterations the median counts, so that one odd iteration changes nothing.
_ITERATIONS = 5
#: What is told is told anew when a time has changed by this factor.
_NEWS = 1.15

_Block = tuple[int, int]


class BlockTimes:
    """Seconds that the blocks of stages take here in an iteration: those of one role, where several have the stage.

    The time of a backward pass is shared among its blocks as that of the forward pass. A block's first iteration
    is not counted: memory is allocated and kernels are chosen in it.

    Args:
        on: whether times are taken. They are those of the host's clock, so passes must end where they return.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self._forward: dict[tuple[Role, int], list[float]] = defaultdict(list)
        self._backward: dict[tuple[Role, int, int], list[float]] = defaultdict(list)
        self._latest: dict[_Block, deque[float]] = {}
        self._least: dict[_Block, float] = {}
        self._computed: frozenset[_Block] = frozenset()
        self._epoch = 0
        self._told: tuple[BlockSeconds, ...] = ()
        self._iterations: deque[float] = deque(maxlen=_ITERATIONS)

    def forward(self, role: Role, block: int, seconds: float) -> None:
        """A forward pass of a block has taken ``seconds``."""
        self._forward[role, block].append(seconds)

    def backward(self, role: Role, begin: int, end: int, seconds: float) -> None:
        """A backward pass of the blocks from ``begin`` to before ``end`` has taken ``seconds``."""
        self._backward[role, begin, end].append(seconds)

    def enter(self, epoch: int) -> None:
        """Takes passes for those of ``epoch`` from now on. What was measured in another one is not of late any more."""
        if epoch != self._epoch:
            self._epoch = epoch
            for latest in self._latest.values():
                latest.clear()

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration of late; 0 before the first one is over."""
        return _rounded(median(self._iterations)) if self._iterations else 0.0

    def end_iteration(self, seconds: float) -> bool:
        """Notes the end of an iteration after ``seconds``; returns whether there is something new to tell."""
        self._iterations.append(seconds)
        by_block: dict[_Block, float] = {}
        for (role, begin, end), backwards in self._backward.items():
            blocks = [(role, block) for block in range(begin, end)]
            if not all(self._forward[block] for block in blocks):
                continue
            forwards = [median(self._forward[block]) * len(backwards) for block in blocks]
            times = 1 + median(backwards) * len(backwards) / max(sum(forwards), 1e-9)
            by_block.update(((role.stage, begin + n), forward * times) for n, forward in enumerate(forwards))
        self._forward.clear()
        self._backward.clear()
        self._computed = frozenset(by_block)
        for block, taken in by_block.items():
            if block not in self._latest:
                self._latest[block] = deque(maxlen=_ITERATIONS)
                continue
            self._latest[block].append(taken)
            if len(self._latest[block]) == _ITERATIONS:
                now = median(self._latest[block])
                self._least[block] = min(now, self._least.get(block, now))
        return self._is_news(self._known())

    def told(self) -> tuple[BlockSeconds, ...]:
        """The times to tell, which count as told from now on."""
        self._told = self._known()
        return self._told

    def _known(self) -> tuple[BlockSeconds, ...]:

        def latest(block: _Block) -> float | None:
            full = block in self._computed and len(self._latest[block]) == _ITERATIONS
            return _rounded(median(self._latest[block])) if full else None

        return tuple(
            BlockSeconds(*block, _rounded(least), latest(block)) for block, least in sorted(self._least.items())
        )

    def _is_news(self, known: tuple[BlockSeconds, ...]) -> bool:
        if [(each.stage, each.block) for each in known] != [(each.stage, each.block) for each in self._told]:
            return True
        pairs = zip(known, self._told, strict=True)
        return any(_differ(new.least, old.least) or _differ(new.latest, old.latest) for new, old in pairs)


def _differ(new: float | None, old: float | None) -> bool:
    if new is None or old is None:
        return new is not old
    return not old / _NEWS <= new <= old * _NEWS


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.3g}")
