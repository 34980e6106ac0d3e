"""The part that all simulated jobs share: nodes that come and go, steps, checkpoints, and the events that they emit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from random import Random
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..observe import events as ev
from .market import Market
from .profile import Profile
from .terms import Terms

if TYPE_CHECKING:
    import simpy

#: Emitted of the steps between two changes: the median of the latest nine tells how long an ordinary one takes.
_EMITTED = 5
#: Relative slack when times are compared.
_SLACK = 1e-9
_BEGIN = datetime(2000, 1, 1, tzinfo=timezone.utc)

Run = Generator[Any, Any, Any]


def import_simpy() -> Any:
    """The package ``simpy``; raises :class:`ConfigError` if it is not installed."""
    try:
        import simpy
    except ImportError as error:
        raise ConfigError("bamboo simulate needs simpy: pip install 'bamboo_ds[simulate]'") from error
    return simpy


@dataclass
class Checkpoint:
    """A complete checkpoint: last step in it, and the samples up to there."""

    step: int = 0
    samples: float = 0.0
    path: str | None = None


@dataclass
class SimulatedOutcome:
    """The outcome of a simulated job.

    Attributes:
        samples: of committed steps, without those that were lost with a restart, or with a job that does not train at
            the end.
        events: of the whole job, in their order.
        outside_s: node-seconds before a node was admitted, or while the job had no place for it.
        pauses: by how many seconds each interrupted step took longer than one of the plan before.
        refused: plans that were not used, since members have not the memory for them.
        idle: why the job did not train at all, if so.
        restarts: of all workers, from a checkpoint or to take nodes in.
        plans: changes of plan.
        copied_gb: states that were copied between members.
    """

    samples: float = 0.0
    events: list[ev.Event] = field(default_factory=list)
    outside_s: float = 0.0
    pauses: list[float] = field(default_factory=list)
    refused: int = 0
    idle: str | None = None
    restarts: int = 0
    plans: int = 0
    copied_gb: float = 0.0


class SimulatedTraining(ABC):
    """A job on the nodes of a market. Subclasses say what happens when nodes come and go.

    Args:
        market: the nodes that the job rents.
        profile: of the model.
        terms: what is assumed.
        seed: of the order in which nodes of the begin become members.

    Attributes:
        ready: nodes with a worker, in the order of their slots, by slot; those that are gone are not among them.
        gone: when nodes went, by name.
        iteration_s: of an undisturbed iteration now; the next one takes ``more_s`` more.
        step: committed steps.
        epoch, members: of the plan in force.
        speeds: the fastest iteration so far by the number of members, in seconds for a global batch.
    """

    def __init__(self, market: Market, profile: Profile, terms: Terms, seed: int) -> None:
        self._simpy = import_simpy()
        self.env: simpy.Environment = self._simpy.Environment()
        self.market, self.profile, self.terms = market, profile, terms
        self.outcome = SimulatedOutcome()
        self.ready: dict[str, int] = {}
        self.gone: dict[str, float] = {}
        self.iteration_s = self.more_s = 0.0
        self.batch: float = profile.global_batch
        self.step, self.epoch = 0, 0
        self.members: tuple[str, ...] = ()
        self.saved = Checkpoint()
        self.speeds: dict[int, float] = {}
        self._outside: dict[str, float] = {}  # since when
        self._slots = 0
        self._news: simpy.Event | None = None
        self._segment: tuple[float, float] | None = None  # begin, and seconds of the first iteration
        self._step_began = 0.0
        self._checkpoint_due = float("inf")
        self._saving: tuple[simpy.Process, Sequence[str]] | None = None  # the newest save, and who writes it
        self._moments = list(market.moments)
        first = self._moments.pop(0)[1] if self._moments and self._moments[0][0] == 0 else []
        if not market.ordered:
            Random(seed).shuffle(first)
        for node in first:
            self._arrive(node)
            self._register(node)

    def simulate(self) -> SimulatedOutcome:
        """Runs to the end of the market."""
        self._process = self.env.process(self.run())
        self.env.process(self._watch())
        self.env.run(until=self.market.seconds)
        self._commit_segment()
        if self.outcome.idle is not None:
            self.outcome.samples = self.saved.samples  # nothing else is left
        self._emit(ev.RunFinished, exit_code=0, run_seconds=self.market.seconds)
        for since in self._outside.values():
            self.outcome.outside_s += self.market.seconds - since
        return self.outcome

    def run(self) -> Run:
        """Starts, then trains, from boundary to boundary or from loss to loss."""
        yield from self._gather(first=True)
        while True:
            try:
                yield from self._boundary()
                yield from self._train()
            except self._simpy.Interrupt:
                yield from self._recover()

    def _gather(self, first: bool = False) -> Run:
        """Starts, or starts again, on the members that there are as soon as they are enough."""
        while True:
            if not first:
                yield from self._restart()
            self.outcome.idle = self._lacking()
            if self.outcome.idle is None:
                break
            yield from self._wait()
        if first:
            self._emit(ev.RunStarted, members=max(1, len(self.ready)), command=[self.profile.name])
        else:
            self._restore()
        self._go()
        self._checkpoint_due = self.env.now + self._interval_s()

    @abstractmethod
    def _restart(self) -> Run:
        """Waits for a restart, to its end."""

    @abstractmethod
    def _lacking(self) -> str | None:
        """The reason why the job cannot train on the members that there are, or ``None``."""

    @abstractmethod
    def _go(self) -> None:
        """Trains on the members that there are from now on."""

    @abstractmethod
    def _boundary(self) -> Run:
        """Does what is due between two iterations: a checkpoint, and the admission of members."""

    @abstractmethod
    def _recover(self) -> Run:
        """Goes on after the loss of a member, in an iteration or between two."""

    # -- nodes --------------------------------------------------------------------------------------------

    def _arrive(self, node: str) -> None:
        self._outside[node] = self.env.now

    def _register(self, node: str) -> None:
        self.ready[node] = self._slots
        self._slots += 1

    def _watch(self) -> Run:
        for at_s, come, go in self._moments:
            yield self.env.timeout(at_s - self.env.now)
            lost = False
            for node in go:
                self.gone[node] = self.env.now
                self.ready.pop(node, None)
                if node in self._outside:
                    self.outcome.outside_s += self.env.now - self._outside.pop(node)
                lost |= self._concerns(node)
            for node in come:
                self._arrive(node)
                self.env.process(self._start(node, self.env.now))
            if lost:
                self._process.interrupt()

    def _start(self, node: str, arrived: float) -> Run:
        yield self.env.timeout(self.terms.start_s)
        if node not in self.gone and self._outside.get(node) == arrived:
            self._register(node)
            self.tell()

    def tell(self) -> None:
        """Tells of a change that the job looks at with the next boundary."""
        if self._news is not None and not self._news.triggered:
            self._news.succeed()

    def _concerns(self, node: str) -> bool:
        """Whether the loss of a node interrupts the job."""
        return node in self.members

    def _absent(self) -> list[str]:
        return [member for member in self.members if member in self.gone]

    def _enter(self, members: Sequence[str]) -> None:
        """These are the members from now on; others that live are outside."""
        now, before = self.env.now, set(self.members)
        for node in members:
            if node in self._outside:
                self.outcome.outside_s += now - self._outside.pop(node)
        for node in before.difference(members):
            if node not in self.gone:
                self._outside[node] = now
                self._emit(ev.MemberLeft, member_id=node, reason="leave", detail="it has no place", seconds=0.0)
        self.members = tuple(members)

    # -- waiting ------------------------------------------------------------------------------------------

    def _hold(self, seconds: float, whole: bool = True) -> Run:
        """Waits; returns whether a member was lost meanwhile, which ends it unless it is to be the ``whole`` time."""
        until, struck = self.env.now + seconds, False
        while self.env.now < until and (whole or not struck):
            try:
                yield self.env.timeout(until - self.env.now)
            except self._simpy.Interrupt:
                struck = True
        return struck

    def _start_again(self, seconds: float, count: int | None = None) -> Run:
        """Waits for a restart of the first ``count`` of the members at hand; the loss of one of them begins it anew."""
        begun = self.env.now
        while (left := begun + seconds - self.env.now) > 0:
            starting = list(self.ready)[:count]
            yield from self._hold(left)
            begun = max([begun, *(self.gone[node] for node in starting if node in self.gone)])

    def _wait(self) -> Run:
        """Waits for news, without training; losses are news."""
        self._news = self.env.event()
        with suppress(self._simpy.Interrupt):
            yield self._news
        self._news = None

    # -- steps --------------------------------------------------------------------------------------------

    @property
    def soon(self) -> bool:
        """Whether the job is to look at the next boundary in any case."""
        return False

    def _train(self) -> Run:
        """Does whole iterations until there is news or a checkpoint is due, to the next boundary.

        Raises:
            simpy.Interrupt: a member was lost. What was committed before is; :meth:`_within` tells of the rest.
        """
        env, first_s = self.env, self.iteration_s + self.more_s
        self._step_began = env.now
        self._segment = env.now, first_s
        self._news = env.event()
        if self.soon:
            self._news.succeed()
        wait = self._checkpoint_due - env.now
        yield self._news if wait == float("inf") else self._news | env.timeout(max(wait, first_s))
        self._news = None
        done, within = self._within()
        if not done or within > self.iteration_s * _SLACK:
            yield env.timeout((self.iteration_s if done else first_s) - within)
        self._commit_segment()

    def _within(self) -> tuple[int, float]:
        """Whole iterations since training went on, and the seconds since the last one."""
        if self._segment is None:
            return 0, 0.0
        begin, first = self._segment
        passed = self.env.now - begin
        if passed < first * (1 - _SLACK):
            return 0, passed
        # What is left of an interrupted iteration may be nothing.
        count = int((passed - first) / self.iteration_s * (1 + _SLACK) + _SLACK) if self.iteration_s else 0
        return 1 + count, max(0.0, passed - first - count * self.iteration_s)

    def _commit_segment(self) -> int:
        """The iterations that have ended since training went on are done; returns how many."""
        if self._segment is None:
            return 0
        begin, first = self._segment
        count, _ = self._within()
        self._segment = None
        self.more_s = 0.0 if count else self.more_s
        for number in sorted({*range(min(1, count)), *range(max(0, count - _EMITTED), count)}):
            self._emit_step(number, begin + first + number * self.iteration_s)
        self.step += count
        self.outcome.samples += count * self.batch
        if count:
            self._step_began = begin + first + (count - 1) * self.iteration_s
        return count

    def _emit_step(self, number: int, end: float) -> None:
        seconds = self.iteration_s if number else end - self._step_began
        at = {"at": end, "step": self.step + number + 1, "seconds": seconds}
        self._emit(ev.Step, **at, loss=None, frc_done=0, frc_total=0, samples=round(self.batch))

    def faster(self, members: int, seconds: float) -> None:
        """An iteration of ``members`` may take so long, for a global batch."""
        self.speeds[members] = min(seconds, self.speeds.get(members, float("inf")))

    # -- checkpoints --------------------------------------------------------------------------------------

    def _interval_s(self) -> float:
        """Seconds between the begins of two checkpoints."""
        return self.terms.checkpoint_s

    @abstractmethod
    def _save(self) -> Run:
        """A checkpoint."""

    def _save_if_due(self) -> Run:
        """A checkpoint, if one is due."""
        if self.env.now >= self._checkpoint_due:
            begun = self.env.now
            yield from self._save()
            self._checkpoint_due = begun + self._interval_s()

    def _checkpoint(self, copied_s: float, written_s: float, writers: Sequence[str], whole: bool = False) -> Run:
        """Copies to host memory, which training waits for, and writes in the background.

        Training waits for an earlier save as well, unless it has failed: a writer was lost before its end.

        Args:
            copied_s, written_s: what these take.
            writers: members that write a part.
            whole: training waits for the complete checkpoint.
        """
        if self._saving is not None and self._all_live(self._saving[1]):
            yield self._saving[0]
        yield self.env.timeout(copied_s)
        saved = Checkpoint(self.step, self.outcome.samples, f"step{self.step}")
        save = self.env.process(self._complete_save(saved, self.epoch, written_s, writers, whole))
        self._saving = save, writers
        if whole:
            yield save

    def _all_live(self, members: Sequence[str]) -> bool:
        return self.gone.keys().isdisjoint(members)

    def _complete_save(
        self, saved: Checkpoint, epoch: int, seconds: float, writers: Sequence[str], waited: bool
    ) -> Run:
        restarts = self.outcome.restarts
        yield self.env.timeout(seconds)
        ended = restarts != self.outcome.restarts or not self.members
        if self._all_live(writers) and not ended and self.saved.step <= saved.step:
            self.saved = saved
            what = {"step": saved.step, "path": saved.path, "seconds": seconds, "bytes": 0, "waited": waited}
            self._emit(ev.CheckpointSaved, epoch=epoch, **what)

    def _restore(self) -> None:
        """The workers start again, from the newest checkpoint."""
        self._emit_losses(self._absent())
        self._saving = None
        self.step, self.outcome.samples = self.saved.step, self.saved.samples
        self.outcome.restarts += 1
        what = {"number": self.outcome.restarts, "slots": [], "checkpoint": self.saved.path}
        self._emit(ev.Restart, **what, step=self.step)

    # -- events -------------------------------------------------------------------------------------------

    def _emit(self, kind: Any, **fields: Any) -> None:
        """An event of the product. Its fields are known to be right, so they are not checked, which takes long.

        Args:
            kind: of event.
            fields: of it; ``at``: when, if not now.
        """
        self.outcome.events.append(self._event(kind, **fields))

    def _emit_each(self, kind: Any, members: Sequence[str], **fields: Any) -> None:
        """The same event of several members."""
        event = self._event(kind, **fields)
        self.outcome.events += [event.model_copy(update={"member": member}) for member in members]

    def _event(self, kind: Any, **fields: Any) -> Any:
        when = _BEGIN + timedelta(seconds=fields.pop("at", self.env.now))
        told = {"job": self.profile.name, "member": None, "epoch": self.epoch, **fields}
        return kind.model_construct(time=when, **told)

    def _emit_losses(self, lost: Sequence[str]) -> None:
        for member in lost:
            how = {"reason": "lease", "detail": "gone", "detection_seconds": self.env.now - self.gone[member]}
            self._emit(ev.MemberLost, member_id=member, **how)

    def _emit_plan(
        self,
        members: Sequence[str],
        owners: Sequence[str],
        shadows: Sequence[str | None] = (),
        lost: Sequence[str] = (),
        lent: Sequence[tuple[int, int, int]] = (),
        reason: str = "",
    ) -> None:
        for member in members:
            if member not in self.members:
                self._emit(ev.MemberJoined, member_id=member, host=member, rank=0)
        self._emit_losses(lost)
        whole = {"members": list(members), "owners": list(owners), "shadows": list(shadows), "lost": list(lost)}
        self._emit(ev.PlanWritten, **whole, pipelines=None, lent=list(lent), reason=reason)
