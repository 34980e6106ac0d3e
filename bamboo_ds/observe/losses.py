"""Losses of members, and how survivors recovered: the one place where events are grouped into losses.

::

    member_lost ...    plan              recovered, recovered, ...      plan with all shadows
    who, why           heirs, how many   detection, plan, rebuild,      replicas are back
                       are left          redone work of each survivor
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import events as ev
from .grid import Grid
from .view import LOSSES, MOVES, LossDetail, LossView, LostMember, Moved, SurvivorView

_SECONDS = ("detection_seconds", "plan_seconds", "rebuild_seconds", "pause_seconds", "redo_seconds")


@dataclass
class _Loss:
    """Members that were lost together.

    Attributes:
        waits_for: members that have to tell of their recovery.
        bare: some role has no replica since.
        first_step: newest step when the first one was committed without the members.
    """

    view: LossView
    waits_for: frozenset[str] = frozenset()
    survivors: dict[str, SurvivorView] = field(default_factory=dict)
    bare: bool = False
    first_step: int | None = None

    def answered_by(self, plan: ev.PlanWritten) -> bool:
        """Whether ``plan`` is the first one without the members."""
        return self.view.epoch is None and not {each.id for each in self.view.members} & set(plan.members)

    def note(self, **fields: object) -> None:
        """Replaces fields of the view."""
        self.view = self.view.model_copy(update=fields)


class Losses:
    """The losses of a job since it was started.

    Args:
        bounded: only the newest ones are kept.

    Attributes:
        reasons: lost members by the reason of the loss.
        takeovers: roles that were taken over.
        pause_seconds: sum over epochs that members recovered in, of each the longest pause of a survivor.
        longest_pause: of any survivor, or ``None``.
        passes_redone: of all survivors of all losses.
    """

    def __init__(self, bounded: bool = True) -> None:
        self._losses: deque[_Loss] = deque(maxlen=LOSSES if bounded else None)
        self._count = 0
        self.reasons: Counter[str] = Counter()
        self.takeovers = self.passes_redone = 0
        self.pause_seconds = 0.0
        self.longest_pause: float | None = None
        self._paused: tuple[int, float] = 0, 0.0  # the newest epoch that survivors have told of, and the longest pause
        self._told: set[str | None] = set()  # who has told of it

    @property
    def views(self) -> tuple[LossView, ...]:
        """The newest losses, oldest first."""
        return tuple(loss.view for loss in self._losses)

    @property
    def newest(self) -> LossView | None:
        """The newest loss."""
        return self._losses[-1].view if self._losses else None

    @property
    def recovering(self) -> bool:
        """Whether survivors of the newest loss are not known to go on."""
        return bool(self._losses) and not (self._losses[-1].view.recovered or self._losses[-1].view.fatal)

    def detail(self, number: int) -> LossDetail | None:
        """A loss with its survivors; ``None`` if it is no longer, or not, known."""
        for loss in self._losses:
            if loss.view.number == number:
                survivors = sorted(loss.survivors.values(), key=lambda each: -each.pause_seconds)
                return LossDetail(loss=loss.view, survivors=tuple(survivors))
        return None

    def lose(self, event: ev.MemberLost, lost: LostMember, before: int) -> bool:
        """Takes a lost member, of whom no event has told before; returns whether it begins a new loss."""
        self.reasons[event.reason] += 1
        if self._losses and self._losses[-1].view.epoch is None:
            self._losses[-1].note(members=(*self._losses[-1].view.members, lost))
            return False
        self._count += 1
        view = LossView(number=self._count, time=event.time.timestamp(), members=(lost,), before=before)
        self._losses.append(_Loss(view))
        return True

    def follow(self, plan: ev.PlanWritten, grid: Grid, moved: Sequence[Moved]) -> LossView | None:
        """Takes a plan and what it moves; returns the loss that it answers, if any."""
        loss = self._losses[-1] if self._losses else None
        if loss is not None and not loss.answered_by(plan):
            loss = None
        if loss is not None:
            loss.waits_for, loss.bare = frozenset(plan.members), not grid.complete
            left, some = len(plan.members), tuple(moved[:MOVES])
            loss.note(epoch=plan.epoch, left=left, moved=some, moved_count=len(moved))
            self.takeovers += len(moved)
        if grid.complete:
            for each in self._losses:
                if each.bare:
                    each.bare = False
                    each.note(replicas_back_seconds=max(0.0, plan.time.timestamp() - each.view.time))
        return None if loss is None else loss.view

    def recover(self, event: ev.Recovered, name: str) -> None:
        """Takes a survivor's account."""
        if event.epoch > self._paused[0]:
            self._paused = event.epoch, 0.0
            self._told = set()
        if event.epoch == self._paused[0]:
            self.pause_seconds += max(0.0, event.pause_seconds - self._paused[1])
            self._paused = event.epoch, max(event.pause_seconds, self._paused[1])
        self.longest_pause = max(event.pause_seconds, self.longest_pause or 0.0)
        if event.member in self._told:
            return
        self._told.add(event.member)
        self.passes_redone += event.forwards_redone + event.backwards_redone
        loss = self._losses[-1] if self._losses else None
        if loss is None or event.member is None or loss.view.epoch is None or loss.view.epoch > event.epoch:
            return
        if loss.view.step not in (None, event.step):
            return  # nobody was lost: it was another plan that has interrupted a later step
        told = event.model_dump(include=SurvivorView.model_fields.keys() - {"id", "name", "time"})
        mine = SurvivorView(id=event.member, name=name, time=event.time.timestamp(), **told)
        loss.survivors[event.member] = mine
        seen = loss.view
        both = {each: (getattr(seen, each), getattr(mine, each)) for each in _SECONDS}
        longest = {each: max((v for v in pair if v is not None), default=None) for each, pair in both.items()}
        loss.note(
            **longest,
            step=event.step,
            survivors=len(loss.survivors),
            forwards_redone=seen.forwards_redone + event.forwards_redone,
            backwards_redone=seen.backwards_redone + event.backwards_redone,
            recovered=seen.recovered or loss.survivors.keys() >= loss.waits_for,
        )

    def take_over(self, event: ev.TakeoverDone) -> None:
        """Takes that an heir computes by the plan."""
        loss = self._losses[-1] if self._losses else None
        if loss is not None and loss.view.epoch == event.epoch and event.seconds is not None:
            loss.note(takeover_seconds=max(event.seconds, loss.view.takeover_seconds or 0.0))

    def step(self, event: ev.Step) -> None:
        """Takes a step: survivors that a loss has not disturbed do not tell of a recovery."""
        loss = self._losses[-1] if self._losses else None
        if loss is None or loss.view.recovered or loss.view.epoch is None or event.epoch < loss.view.epoch:
            return
        later = loss.first_step is not None and event.step > loss.first_step
        loss.first_step = event.step if loss.first_step is None else loss.first_step
        loss.note(step=event.step if loss.view.step is None else loss.view.step, recovered=later)

    def end(self, fatal: bool = False) -> None:
        """The newest loss is over, one way or the other."""
        if self._losses:
            self._losses[-1].note(fatal=fatal or self._losses[-1].view.fatal, recovered=not fatal)
        for each in self._losses:
            each.bare = False
