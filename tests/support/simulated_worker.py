"""What the parts of an engine know of their worker and its surroundings, on a simulated network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from bamboo_ds.config import BambooConfig
from bamboo_ds.control.registry.records import WorkerState
from bamboo_ds.engine.checkpoints.saving import SaveRequest
from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.context.records import Progress
from bamboo_ds.engine.iteration.block_times import BlockTimes
from bamboo_ds.engine.iteration.measures import IdleTimes
from bamboo_ds.engine.script.flags import FLAGS
from bamboo_ds.engine.stage.runtime import RuntimeBinding
from bamboo_ds.errors import EpochChanged, FatalLoss, Left, TransferError
from bamboo_ds.state import join
from bamboo_ds.topology import LONG_S, BlockSeconds, Layout, Plan, Role

from .simulated_network import Attachment

if TYPE_CHECKING:
    from .simulated_engine import Member, World


class Saves:
    """What a member saves, as :class:`bamboo_ds.engine.checkpoints.saving.Saves` collects it.

    Attributes:
        collected: by tag, the state of every role that the member had at its last attempt.
        nonce, busy, writes, completed, begun, written_s: see there.

    Args:
        member: whose.
        own: the job has a place for checkpoints of its own.
    """

    nonce, busy, writes, completed, begun, written_s = "n", False, False, "", 0.0, 0.0

    def __init__(self, member: str, own: bool) -> None:
        self._member, self._own = member, own
        self.collected: dict[str, dict[Role, dict[str, torch.Tensor]]] = {}

    def own_folder(self) -> Path | None:
        return Path("own") if self._own else None

    def save_id(self, epoch: int, sequence: int) -> str:
        return f"{epoch}-{sequence}"

    def collect(self, request: SaveRequest, plan: Plan, binding: RuntimeBinding, progress: Progress) -> bool:
        assert not request.own or request.tag not in self.collected, "each is taken once"
        self.collected[request.tag] = {}
        for runtime in binding.owned():
            if plan.owner(runtime.role) == self._member:
                binding.use(runtime)
                request.save()
        return True

    def nothing(self, *_: Any) -> None:
        """Files are not written here."""

    write = forget = wait = poll = follow = drop_own = nothing

    def give_up(self, path: Path, step: int, error: Exception) -> None:
        raise error


@dataclass(frozen=True)
class Group:
    """The ranks that reduce something together, as ``member`` sees them."""

    member: Member
    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the owners of the ranks."""
        session = self.member.session
        tensor.copy_(session.network.sum(session.current, self.name, self._owners, tensor.clone()))

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """What the owner of each rank gives. Each owns one of them."""
        session, owners = self.member.session, self._owners
        assert len(owners) == self.size
        self.member.gathered += 1
        found: list[Any] = session.network.all_gather(session.current, self.name, owners, tuple(tensors))
        return [list(each) for each in found]

    @property
    def _owners(self) -> list[str]:
        plan = self.member.session.current.plan
        return list(dict.fromkeys(plan.owners[rank] for rank in self.ranks))


class Callers:
    """See :class:`bamboo_ds.comm.attachment.Attachment`."""

    passing = False

    def acting_for(self, rank: int, answer: Any) -> Any:
        return nullcontext()

    def among_nobody(self, what: Any) -> AbstractContextManager[None]:
        return nullcontext()


class Session:
    """The part of a session that parts know."""

    timeout = timedelta(seconds=1)

    def __init__(self, member: str, world: World) -> None:
        self.member, self.network, self._world = member, world.network, world
        self.epoch = self._ended = 0
        self._entered: Attachment | None = None
        #: For whom the process groups of a worker are called, which there are none of.
        self.attachment = Callers()

    @property
    def current(self) -> Attachment:
        assert self._entered is not None
        return self._entered

    @property
    def aborted(self) -> str | None:
        return self.current.aborted

    def abort(self, reason: str, epoch: int | None = None, orderly: bool = False) -> None:
        self._ended = max(self._ended, self.epoch if epoch is None else epoch)
        if self._entered is not None and self.epoch <= self._ended:
            self.network.abort(self._entered, reason)

    def conclude(self) -> None:
        if self._entered is not None:
            self._entered.conclude()

    def attach(self, plan: Plan) -> None:
        if self._entered is not None:
            self.network.abort(self._entered, f"epoch {plan.epoch} follows")
        self.epoch = plan.epoch
        self._entered = None
        self._entered = self.network.attach(plan, self.member, lambda: self._ended >= plan.epoch)

    def fetch(self, member: str, place: str, key: str, timeout_s: float) -> Fetching:
        return Fetching(self._world, member, key)

    def confirm(self, operation: str) -> None:
        pass


class Job:
    """What a worker knows of its job. ``known``: the newest plan."""

    settings = BambooConfig()

    def __init__(self, world: World, session: Session, plan: Plan, rank: int, joiner: bool) -> None:
        self.world, self.session, self.known = world, session, plan
        self.lost_at: float | None = None
        self.replaying = self.dismissed = self._iterating = False
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.channel: Any = SimpleNamespace(
            need_every_rank=lambda: world.every_rank.add(session.member),
            activity=SimpleNamespace(at_work=nullcontext, beats=0, busy=False, hang_after_s=0.0, telling={}),
            spans=None,
            event=lambda kind, **facts: self.events.append((kind, facts)),
            report_state=self._report_state,
            member=session.member,
            ahead=0,
            joiner=joiner,
            rank=rank,
            await_boundary=self._await_boundary,
            wait_plan=lambda after, timeout_s: self.next_plan(after),
            wait_peers=lambda timeout_s: [(member, "") for member in world.states],
        )

    def _report_state(self, state: WorkerState) -> None:
        self.world.states[state.id] = state

    def _await_boundary(self, after: int, timeout_s: float) -> None:
        for _ in range(self.world.random.choice((0, 10, 100))):
            if self.known.epoch > after:
                break
            self.world.turns.wait()
        self.world.awaited.append(self.known.epoch > after)

    def enter(self, plan: Plan) -> None:
        if plan.lost_roles:
            stages = [(role.pipeline, role.stage) for role in map(plan.world.role, plan.lost_roles)]
            raise FatalLoss(stages, plan.lost, None)
        if self.dismissed or self.session.member not in plan.members:
            raise Left(f"{self.session.member} has left")
        self.session.attach(plan)
        if self.known.epoch > plan.epoch:
            self.session.abort(f"plan of epoch {self.known.epoch} arrived", epoch=self.known.epoch - 1)
            raise EpochChanged(f"epoch {plan.epoch} ended while it was entered")

    def next_plan(self, after: int) -> Plan:
        waits = self.channel.joiner and not self.session.epoch

        def there() -> bool:
            if self.dismissed:
                return True
            if waits and not self.known.lost_roles:
                return self.session.member in self.known.members
            return self.known.epoch > after

        self.world.turns.wait(there)
        return self.known

    def push(self, plan: Plan) -> None:
        """A plan arrives."""
        self.known = plan
        self._heed()

    def _heed(self) -> None:
        interrupts = self.known.interrupts(self._iterating)
        if interrupts and self.known.epoch > self.session.epoch:
            self.session.abort(f"plan of epoch {self.known.epoch} arrived", epoch=self.known.epoch - 1)

    @contextmanager
    def iterating(self) -> Iterator[None]:
        self._iterating = True
        self._heed()
        try:
            yield
        finally:
            self._iterating = False

    def dismiss(self) -> None:
        """The job has ended before this member was admitted."""
        self.dismissed = True
        self.session.abort("the job has ended", epoch=self.known.epoch)

    def await_fence(self) -> None:
        pass

    def boundary(self, writing: bool) -> int:
        return self.known.epoch

    def progressed(self, steps: int) -> None:
        pass

    def newest_checkpoint(self, plan: Plan) -> None:
        pass


class DrawnIdleTimes(IdleTimes):
    """Whether a redundant pass fits into a bubble is drawn."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random

    def fits(self, place: Any, elapsed: float, duration: float | None) -> bool:
        return self._random.random() < 0.5


class DrawnBlockTimes(BlockTimes):
    """Times that are drawn now and then, so that the leader divides stages anew; never in the last iterations.

    Args:
        long: iterations take so long that nobody waits for their ends.
    """

    def __init__(self, layout: Layout, iterations: int, random: Random, long: bool) -> None:
        super().__init__(False)
        self._layout, self._left, self._random, self._long = layout, iterations - 4, random, long

    @property
    def iteration_s(self) -> float:
        return LONG_S if self._long else 0.0

    def end_iteration(self, seconds: float) -> bool:
        self._left -= 1
        if not self._layout.blocks or self._left < 0 or self._random.random() < 0.5:
            return False
        blocks = [(stage, block) for stage, count in enumerate(self._layout.blocks) for block in range(count)]
        mine = sorted(self._random.sample(blocks, len(blocks) // 2))
        slow = self._random.choice((1, 1, 1, 3))
        times = [self._random.randint(1, 4) for _ in mine]
        self._told = tuple(BlockSeconds(*block, time, time * slow) for block, time in zip(mine, times, strict=True))
        return True

    def told(self) -> tuple[BlockSeconds, ...]:
        return self._told


class StragglersBlockTimes(BlockTimes):
    """Times of a member all of whose blocks take three times as long from some iteration on, until another one."""

    def __init__(self, layout: Layout, slow: range) -> None:
        super().__init__(False)
        self._layout, self._slow, self._done = layout, slow, 0

    def end_iteration(self, seconds: float) -> bool:
        self._done += 1
        before, now = (3 if done in self._slow else 1 for done in (self._done - 1, self._done))
        blocks = [(stage, block) for stage, count in enumerate(self._layout.blocks) for block in range(count)]
        self._told = tuple(BlockSeconds(*block, 1, now) for block in blocks)
        return self._done == 1 or before != now

    def told(self) -> tuple[BlockSeconds, ...]:
        return self._told


class Offers:
    """What a member offers to others, as :class:`bamboo_ds.comm.bulk.offers.Offers`.

    Attributes:
        early: how many snapshots it has offered when their plan began, not after the operation that it began with.
    """

    def __init__(self, world: World, member: str) -> None:
        self._world, self._member = world, member
        self.early = 0
        self.offered: dict[str, tuple[str, list[torch.Tensor]]] = {}

    def offer(self, key: str, text: str, tensors: list[torch.Tensor]) -> None:
        assert key not in self.offered, f"{key} is offered again"
        self.offered[key] = text, tensors
        self.early += join(text, tensors)["moment"][0] < self._world.members[self._member].progress.sequence

    def withdraw(self, key: str) -> None:
        del self.offered[key]

    def close(self) -> None:
        self.offered.clear()


class Fetching:
    """A copy, as :class:`bamboo_ds.comm.bulk.copying.Fetch`. It ends at some time, as long as its source lives.

    It begins with what is offered first, and fails where that is withdrawn.
    """

    def __init__(self, world: World, member: str, key: str) -> None:
        self._key, self._member, self._world = key, member, world
        self._chance = world.random.choice((0.2, 0.9))
        self._begun: Any = None
        self._found: Any = None

    def done(self) -> bool:
        if self._found is None and self._member not in self._world.network.dead:
            offered = self._world.members[self._member].offers.offered.get(self._key)
            self._begun = self._begun or offered
            if self._begun is not offered:
                return True
            self._found = offered if self._world.random.random() < self._chance else None
        return self._found is not None

    @property
    def complete(self) -> bool:
        return self.done() and self._found is not None

    def result(self) -> Any:
        if self._key.startswith((History.PREFIX, FLAGS)):
            return self._world.answer(self._member, self._key), []
        if self._found is None:
            raise TransferError(f"{self._key} was withdrawn")
        text, tensors = self._found
        return text, [tensor.clone() for tensor in tensors]

    def cancel(self) -> None:
        """Nobody waits for it."""
