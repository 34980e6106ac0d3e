"""The course of a job on integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from bamboo_ds.control.leader.boundary import as_told, ready_copies
from bamboo_ds.control.registry.records import WorkerState
from bamboo_ds.topology import LONG_S, Plan, holders_of, takeover

from .case import Case, Fatal, first_plan, tight
from .copies import Copies
from .instructions import Instructions
from .members import Epoch, Job, Member, Waits
from .programs import Programs, Step, begun_by
from .recovery import Recovery

#: Instructions of all members after which a job counts as one that never ends.
_ENDLESS = 100_000

#: A member's turn is this many instructions at most.
_TURN = 10


class World:
    """One run of a job.

    Args:
        case: the job.
        random: says who goes on, what is drawn, and what arrives.
        draw: says which of the plans it begins with.

    Attributes:
        plan: the newest one that is written.
        told: what members have told the leader: the epoch that they have entered, replicas that they have, and lacked.
        done: instructions that members have executed.
        counts: what has happened.
    """

    def __init__(self, case: Case, random: Random, draw: int = 0) -> None:
        self.case, self.random, self.layout = case, random, case.layout
        self._job = Job(case, random)
        self.counts = self._job.counts
        self.plan = plan = first_plan(case, draw)
        epoch = Epoch(plan)
        script_ranks = map(self.layout.role, plan.script_ranks)
        self.members = {
            name: Member(name, epoch, script_rank) for name, script_rank in zip(plan.members, script_ranks, strict=True)
        }
        self.told: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}
        self.done = 0
        self._recovery, self._instructions = Recovery(self._job), Instructions(self._job)
        self._copies = Copies(self._job, self.members, self._tell)
        for name, member in self.members.items():
            for role in plan.owned_by(name):
                member.runtimes[role] = self._job.runtime(role, owned=True)
            for role in plan.shadowed_by(name):
                if case.copies:
                    member.lacked.add(role)
                else:
                    member.runtimes[role] = self._job.runtime(role)
            if not case.copies:
                self._tell(member)
        self._commits = False  # all have entered a commit, and none has passed it
        self._next: Epoch | None = None  # that members enter between two iterations
        self._aware: set[str] = set()  # members that know of it
        self.running = {name: self._live(member, enters=False) for name, member in self.members.items()}
        self.waiting: dict[str, Waits] = dict.fromkeys(self.running)

    @property
    def length(self) -> int:
        """About how many instructions there are if nobody is lost."""
        programs = self._begun(self.plan)
        return self.case.iterations * sum(len(programs.of(name)) for name in self.plan.members)

    def _begun(self, plan: Plan) -> Programs:
        return begun_by(plan, *self._settings)

    @property
    def _settings(self) -> tuple[int, bool, int]:
        case = self.case
        # Where members do nothing in bubbles these are left out.
        return case.micro_batches, case.eager, case.every

    def run(self, instructions: int | None = None, to_commit: bool = False) -> bool:
        """Go on until all have ended, or for so many instructions, or until all are in a commit that none has passed.

        Returns:
            Whether all have ended.
        """
        end = _ENDLESS if instructions is None else self.done + instructions
        draw, self._commits = self.random.random, False
        while self.running and self.done < end and not (to_commit and self._commits):
            names = list(self.running)
            first = int(draw() * len(names))
            for name in (*names[first:], *names[:first]):
                waits = self.waiting[name]
                if waits is None or waits():
                    break
            else:
                if all(self.members[name].joining for name in names):
                    return True  # the job is over, and they are told so
                raise AssertionError(f"nobody can go on: {self._where()}")
            self._advance(name, min(end - self.done, int(draw() * _TURN) + 1))
        assert self.done < _ENDLESS, "the job never ends"
        return not self.running

    def _advance(self, name: str, most: int) -> None:
        """Until it waits for something, or for so many instructions."""
        script = self.running[name]
        for _ in range(most):
            self.done += 1
            try:
                waits = next(script)
            except StopIteration:
                self.running.pop(name, None)
                return
            if waits is not None:
                self.waiting[name] = waits
                return
        self.waiting[name] = None

    def _where(self) -> dict[str, Any]:
        return {name: (member.step, member.entered, member.inside) for name, member in self.members.items()}

    def lose(self, lost: Sequence[str], completed: Callable[[Plan], Plan] = lambda plan: plan) -> None:
        """An epoch ends by the loss of members; the others recover.

        Args:
            lost: the members.
            completed: the plan that is written, made from the one that follows from the loss.

        Raises:
            Fatal: a role has no holder left.
        """
        for name in lost:
            del self.members[name]
        self.counts["losses"] += len(lost)
        plan, states = self.plan, dict[str, WorkerState]()
        if plan.builders or any(lacked for _, _, lacked in self.told.values()):
            states = self.states
            plan = as_told(states, plan)
        plan = takeover(plan, lost, holders_of(plan, ready_copies(states, plan)))
        if plan.lost_roles:
            raise Fatal
        self.interrupt(completed(plan))

    def interrupt(self, plan: Plan) -> None:
        """All members leave what they do, and enter ``plan``."""
        self.plan = plan = tight(plan, self.case, self.random)
        self._next = None
        for name in self.members.keys() - set(plan.members):
            self._remove(name)  # it had to leave at the next boundary, or waits to be admitted
        epoch = Epoch(plan)
        self._admit(epoch)
        for member in self.members.values():
            self._recovery.doubt(member)
            self._recovery.take_arrived(member)
        for member in self.members.values():
            member.inside, member.epoch = None, epoch
        self.running = {name: self._live(member, enters=True) for name, member in self.members.items()}
        self.waiting = dict.fromkeys(self.running)

    def change(self, plan: Plan) -> None:
        """Members enter ``plan`` between two iterations, when all know of it; those that join at once."""
        self.plan = tight(plan, self.case, self.random)
        self._next, self._aware = Epoch(self.plan), set()
        for member in self._admit(self._next):
            self.running[member.name], self.waiting[member.name] = self._live(member, enters=True), None
        self.counts["changes"] += 1

    def _admit(self, epoch: Epoch) -> list[Member]:
        """Those that come with a plan."""
        plan, names = epoch.plan, [name for name in epoch.plan.members if name not in self.members]
        come = [Member(name, epoch, self.layout.role(plan.script_rank(name)), joining=True) for name in names]
        self.members.update({member.name: member for member in come})
        self.counts["joined"] += len(come)
        return come

    def _remove(self, name: str) -> None:
        del self.members[name]
        self.running.pop(name, None)
        self.counts["left"] += 1

    @property
    def settled(self) -> bool:
        """Whether all members have entered the newest plan, and none has finished: the leader may write another."""
        entered = all(name in self.told and self.told[name][0] == self.plan.epoch for name in self.plan.members)
        return entered and all(member.step < self.case.iterations for member in self.members.values())

    def _live(self, member: Member, enters: bool) -> Iterator[Waits]:
        if not enters and self.case.copies:
            yield from self._copies.make_first(member)
        while True:
            if enters:
                yield from self._recover(member)
            elif member.step < self.case.iterations:
                member.at_boundary = False
                yield from self._iteration(member, None)
            else:
                break
            enters = False
            if member.at_boundary:
                yield from self._share(member)
                enters = self._switches(member)
            if enters and member.name not in self.plan.members:
                self._remove(member.name)
                return
        # Its last operation takes part in a commit of all, as an engine's end does.
        member.at_boundary = False
        yield self._all_come(member, "end")

    def _all_come(self, member: Member, *what: Any) -> Callable[[], bool]:
        come, plan = member.epoch.come[what], member.plan
        come.add(member.name)
        return lambda: len(come) == len(plan.members)

    def _iteration(self, member: Member, resumed: Programs | None) -> Iterator[Waits]:
        programs = resumed or self._begun(member.plan)
        self._instructions.divide(member, programs, resumed=resumed is not None)
        steps = programs.of(member.name)
        self.counts["held" if resumed is None else "held, resumed"] += member.name in programs.held
        return self._execute(member, steps, programs)

    def _execute(self, member: Member, steps: Sequence[Step], programs: Programs) -> Iterator[Waits]:
        for step in steps:
            yield None
            if step.kind == "Commit":
                break
            if member.building and self.case.long and not self.layout.sharded:
                self._copies.complete_arrived(member)
            rest = self._instructions.execute(member, step)
            if rest is not None:
                yield from rest
        yield from self._commit(member, programs)

    def _commit(self, member: Member, programs: Programs) -> Iterator[Waits]:
        epoch, step = member.epoch, member.step
        member.entered = True
        if self._next is not None and self.random.random() < 0.6:
            self._aware.add(member.name)
        epoch.newest[step].append(self.plan.epoch if member.name in self._aware else 0)
        waits = self._all_come(member, "commit", step)
        self._commits = waits()
        yield waits
        self._commits = False
        if (step, "") not in epoch.passes:
            epoch.passes[step, ""] += 1
            self._check_committed(epoch, step, programs)
        member.vector = (float(step),)
        self._finish(member)

    def _check_committed(self, epoch: Epoch, step: int, programs: Programs) -> None:
        """All passes that were left have been done, once; and no message is left that passes were to use."""
        if epoch.decision is None or epoch.decision.mode == "resume" or epoch.decision.step != step:
            done = {kind: epoch.passes[step, kind] for kind in ("ForwardPass", "BackwardPass")}
            assert done == dict(programs.left), f"passes of iteration {step}: {done}, and left were {programs.left}"
        kinds = {key[0] for key, messages in epoch.sent.items() if messages}
        assert kinds <= {"Sums", "Shadow", "State", "Fold"}, f"messages that nobody receives: {kinds}"

    def _finish(self, member: Member) -> None:
        """The commit of an iteration has taken place: steps."""
        decision = member.epoch.decision
        if decision is None or member.step > decision.step:  # else a loss may have come before they were sent
            for runtime in member.runtimes.values():
                used = (runtime.owned or runtime.helps) and self._instructions.users(member, runtime)
                unsent = [part.marks for part in runtime.parts if part.marks and used]
                assert not unsent, f"sums of {runtime.role} after {unsent} micro-batches were not sent"
        for step in self._begun(member.plan).commit(member.name)[1:]:
            runtime = member.runtimes.get(step.role)
            if step.kind == "StepReplica" and runtime is None:
                built = member.building[step.role]
                if built.incoming is not None:  # else the snapshot is taken after this iteration, and contains it
                    built.kept.append(((member.step, False), built.incoming))
                    built.incoming = None
                continue
            assert runtime is not None and runtime.reduced is not None, f"{member.name} steps {step.role} unreduced"
            self._copies.step(runtime, runtime.reduced, member.step)
        if self.case.differs and self.random.random() < 0.1:
            for runtime in member.runtimes.values():
                runtime.valid &= runtime.owned or self.random.random() < 0.7
                self.counts["differs"] += not runtime.valid
        member.end_iteration()
        member.at_boundary = True
        self._copies.advance(member)

    def _share(self, member: Member) -> Iterator[Waits]:
        """Between two iterations: owners exchange the shards that their steps have changed."""
        if self.layout.sharded:
            yield self._all_come(member, "shards", member.step)
            for runtime in member.runtimes.values():
                runtime.stale = False
        yield None

    def _switches(self, member: Member) -> bool:
        """Whether all members knew of the next plan when they entered the last commit; this one enters it."""
        newest = member.epoch.newest.get(member.step - 1, [0])
        if self._next is None or min(newest) <= member.plan.epoch:
            return False
        member.epoch = self._next
        return True

    def _recover(self, member: Member) -> Iterator[Waits]:
        epoch = member.epoch
        yield None
        self._recovery.follow(member)
        yield None
        epoch.reports[member.name] = self._recovery.report(member)
        yield lambda: len(epoch.reports) == len(epoch.plan.members)
        decision = self._recovery.decide(member)
        behind = member.name in decision.behind
        self._copies.begin(member, decision)
        if member.joining:
            member.joining, member.step = False, decision.step
        if behind:
            member.vector = decision.commit_vector
        elif decision.mode == "resume":
            member.entered = False
            for role, runtime in member.runtimes.items():
                if not decision.progress[role].reduced:
                    runtime.reduced, runtime.loss, runtime.tied = None, False, set()
            for built in member.building.values():
                built.incoming = None
        self._tell(member)
        yield None
        if self._lacks_shards(epoch) and not behind:
            yield from self._share(member)
        if decision.mode == "resume" and not behind:
            self._recovery.check_redone(member, decision)
        if behind:
            self._finish(member)
            yield from self._share(member)
        yield None
        member.at_boundary = False
        if decision.mode == "commit":
            yield from self._commit(member, self._begun(member.plan))
        elif member.step < self.case.iterations:
            if epoch.resumed is None:
                epoch.resumed = Programs(epoch.plan, self._settings[0], decision.progress, *self._settings[1:])
            yield from self._iteration(member, epoch.resumed)

    def _lacks_shards(self, epoch: Epoch) -> bool:
        assert epoch.decision is not None
        stale = any(report.stale for report in epoch.reports.values())
        return self.layout.sharded and (bool(epoch.decision.behind) or stale)

    def _tell(self, member: Member) -> None:
        """Tell the leader."""
        lacked = tuple(sorted(member.epoch.lacking.get(member.name, ())))
        self.told[member.name] = member.plan.epoch, self._recovery.replicas(member), lacked

    @property
    def states(self) -> dict[str, WorkerState]:
        """What the leader knows of members."""
        case, cuts = self.case, dict[str, dict[int, tuple[int, ...]]]()
        for name in self.told.keys() & self.members.keys() if case.lends else ():
            owned = [self.layout.rank(each.role) for each in self.members[name].owned()]
            cuts[name] = dict.fromkeys(owned, tuple(range(1, case.blocks)))
        return {
            name: WorkerState(
                id=name,
                epoch=epoch,
                replicas=replicas,
                lacked=lacked,
                cuts=cuts.get(name, {}),
                iteration_s=2 * LONG_S if case.long else 1.0,
                sums_share=case.every / case.micro_batches,
            )
            for name, (epoch, replicas, lacked) in self.told.items()
        }


def check_end(world: World) -> None:
    """The job has trained as it should: every role has an owner, and owners and shadows the same state."""
    plan = next(iter(world.members.values())).plan
    for rank, owner in enumerate(plan.owners):
        role = world.layout.role(rank)
        assert world.members[owner].runtimes[role].owned, (role, owner)
        shadow = plan.shadows[rank] if plan.shadows else None
        assert shadow is None or role in world.members[shadow].runtimes
    for name, member in world.members.items():
        for role, runtime in member.runtimes.items():
            assert runtime.steps == world.case.iterations or not runtime.valid, (role, name, runtime.steps)
