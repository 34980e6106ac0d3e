"""Losses of members, and how survivors recovered, from events."""

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
    """Members that were lost together. It is complete when ``waits_for`` have told of their recovery."""

    view: LossView
    waits_for: frozenset[str] = frozenset()
    survivors: dict[str, SurvivorView] = field(default_factory=dict)

    def note(self, **fields: object) -> None:
        """Replace fields of the view."""
        self.view = self.view.model_copy(update=fields)

    @property
    def planned(self) -> bool:
        """Whether the plan is written that removes the members."""
        return self.view.epoch is not None


class Incidents:
    """The losses of a job since it was started.

    Attributes:
        reasons: lost members by the reason of the loss.
        takeovers: roles that were taken over.
        pause_seconds: sum over losses, of each the longest pause of a survivor.
        passes_redone: of all survivors of all losses.
    """

    def __init__(self) -> None:
        self._losses: deque[_Loss] = deque(maxlen=LOSSES)
        self._lost: set[str] = set()
        self._bare: _Loss | None = None  # since which some role has no replica
        self._count = 0
        self.reasons: Counter[str] = Counter()
        self.takeovers = self.passes_redone = 0
        self.pause_seconds = 0.0

    @property
    def views(self) -> tuple[LossView, ...]:
        """The newest losses, oldest first."""
        return tuple(loss.view for loss in self._losses)

    @property
    def recovering(self) -> bool:
        """Whether survivors of the newest loss are not known to go on."""
        return bool(self._losses) and not self._losses[-1].view.recovered

    def detail(self, number: int) -> LossDetail | None:
        """The loss of that number; ``None`` if it is no longer, or not, known."""
        for loss in self._losses:
            if loss.view.number == number:
                survivors = sorted(loss.survivors.values(), key=lambda each: -each.pause_seconds)
                return LossDetail(loss=loss.view, survivors=tuple(survivors))
        return None

    def lose(self, event: ev.MemberLost, name: str, host: str | None, before: int) -> bool:
        """Take a loss, of ``before`` members; false if it was told before."""
        if event.member_id in self._lost:
            return False
        self._lost.add(event.member_id)
        self.reasons[event.reason] += 1
        how = event.model_dump(include={"reason", "detail", "detection_seconds"})
        lost = LostMember(id=event.member_id, name=name, host=host, **how)
        if self._losses and not self._losses[-1].planned:
            self._losses[-1].note(members=(*self._losses[-1].view.members, lost))
            return True
        self._count += 1
        view = LossView(number=self._count, time=event.time.timestamp(), members=(lost,), before=before)
        self._losses.append(_Loss(view))
        return True

    def follow(self, plan: ev.PlanWritten, grid: Grid, moved: Sequence[Moved]) -> bool:
        """Take a plan and what it moves; whether it is the answer to a loss."""
        loss = self._losses[-1] if plan.lost and self._losses and not self._losses[-1].planned else None
        if loss is not None:
            loss.waits_for = frozenset(plan.members)
            left, some = len(plan.members), tuple(moved[:MOVES])
            loss.note(epoch=plan.epoch, left=left, moved=some, moved_count=len(moved))
            self.takeovers += len(moved)
        if not grid.complete:
            self._bare = self._bare or loss
        elif self._bare is not None:
            seconds = plan.time.timestamp() - self._bare.view.time
            self._bare.note(replicas_back_seconds=max(0.0, seconds))
            self._bare = None
        return loss is not None

    def recover(self, event: ev.Recovered, name: str) -> None:
        """Take what a survivor tells."""
        self.passes_redone += event.forwards_redone + event.backwards_redone
        loss = self._losses[-1] if self._losses else None
        if loss is None or event.member is None or (loss.view.epoch or 0) > event.epoch:
            return
        told = event.model_dump(include=SurvivorView.model_fields.keys() - {"id", "name", "time"})
        mine = SurvivorView(id=event.member, name=name, time=event.time.timestamp(), **told)
        loss.survivors[event.member] = mine
        seen, before = loss.view, loss.view.pause_seconds or 0.0
        both = {each: (getattr(seen, each), getattr(mine, each)) for each in _SECONDS}
        longest = {each: max((v for v in pair if v is not None), default=None) for each, pair in both.items()}
        loss.note(
            **longest,
            epoch=seen.epoch or event.epoch,
            step=event.step,
            survivors=len(loss.survivors),
            forwards_redone=seen.forwards_redone + event.forwards_redone,
            backwards_redone=seen.backwards_redone + event.backwards_redone,
            recovered=seen.recovered or (bool(loss.waits_for) and loss.survivors.keys() >= loss.waits_for),
        )
        self.pause_seconds += max(0.0, event.pause_seconds - before)

    def step(self, event: ev.Step) -> None:
        """Take a step: survivors that a loss has not disturbed do not tell of a recovery."""
        loss = self._losses[-1] if self._losses else None
        if loss is None or loss.view.recovered or not loss.planned or event.epoch < (loss.view.epoch or 0):
            return
        later = loss.view.step is not None and event.step > loss.view.step
        loss.note(step=event.step if loss.view.step is None else loss.view.step, recovered=later)

    def end(self, fatal: bool = False) -> None:
        """The newest loss is over, one way or the other."""
        if self._losses:
            self._losses[-1].note(fatal=fatal or self._losses[-1].view.fatal, recovered=not fatal)
        self._bare = None
