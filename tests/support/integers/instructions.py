"""What instructions do on integers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from bamboo_ds.engine.context.channels import assists
from bamboo_ds.schedule import PartProgress, ways
from bamboo_ds.topology import Role

from .members import Job, Member, Part, Runtime, Waits
from .programs import Programs, Step


class Instructions:
    """Executes instructions.

    Args:
        job: the job.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._case, self._random = job, job.case, job.random
        self._layout, self._counts = job.layout, job.counts
        self._plain: dict[str, Callable[[Member, Step], None]] = {
            "LoadMicroBatch": self._load,
            "SendActivation": self._send_activation,
            "ResendActivation": self._send_activation,
            "SendGrad": self._send_grad,
            "ResendGrad": self._send_grad,
            "SendSums": self._send_sums,
            "SendChanges": self._send_changes,
            "SendPart": self._send_part,
            "SendReplica": self._send_replica,
            "FillBubble": self._fill,
        }
        self._waiting: dict[str, Callable[[Member, Step], Iterator[Waits]]] = {
            "ForwardPass": self._pass_together,
            "BackwardPass": self._pass_together,
            "RecvActivation": self._recv_activation,
            "RecvGrad": self._recv_grad,
            "RecvChanges": self._recv_changes,
            "RecvPart": self._recv_part,
            "RecvReplica": self._recv_replica,
            "ReduceTiedGrads": self._reduce_tied,
            "ReduceGrads": self._reduce,
        }
        if self._layout.slices == 1:
            self._plain |= {"ForwardPass": self._pass, "BackwardPass": self._pass}

    def execute(self, member: Member, step: Step) -> Iterator[Waits] | None:
        """Do what an instruction says; ``None``: it is done, else what remains, which waits for something."""
        plain = self._plain.get(step.kind)
        if plain is None:
            return self._waiting[step.kind](member, step)
        plain(member, step)
        return None

    def divide(self, member: Member, programs: Programs, resumed: bool) -> None:
        """As :meth:`bamboo_ds.engine.iteration.division.Division.begin`."""
        for role, runtime in member.runtimes.items():
            mine = programs.shares.get((role, member.name), ())
            runtime.helps, runtime.theirs = bool(mine) and not runtime.owned, None
            if not mine:
                if runtime.divided:
                    runtime.parts = [Part(0, runtime.blocks)]
                continue
            ranges = [(part.begin, end) for part, end in mine]
            if programs.progress[role].reduced:
                runtime.divide(ranges)
                continue
            if any(part.forwards and (part.begin, part.end) not in ranges for part in runtime.parts):
                runtime.parts = [Part(0, runtime.blocks)]
            runtime.divide(ranges)
            for part, (to, _) in zip(runtime.parts, mine, strict=True):
                self._move(member, runtime, part, to)
        if resumed:
            self._use_given(member, programs)

    def _move(self, member: Member, runtime: Runtime, part: Part, to: PartProgress) -> None:
        """As :meth:`bamboo_ds.engine.iteration.sums.PartialSums.move`."""
        if to == part.progress() and not runtime.broken:
            return
        fold: tuple[int, ...] = ()
        if to.backwards:
            fold = member.sums[runtime.role, part.begin, part.end].pop(to.backwards)
            self._counts["from sums"] += 1
        else:
            assert not to.forwards, f"{runtime.role} is to go on from {to}, and has done {part.progress()}"
        part.go_back(to, fold)
        runtime.broken = False

    def _use_given(self, member: Member, programs: Programs) -> None:
        done = programs.done
        for rank, role in enumerate(self._layout.roles):
            computed = [index for index, each in enumerate(programs.hosts[rank]) if each == member.name]
            for index, part in zip(computed, member.runtimes[role].parts if computed else (), strict=True):
                behind = None if programs.progress[role].reduced else programs.beside(rank, index, +1)
                until = 0 if behind is None else done[behind[0]][behind[1]].since
                part.given = {m for m in part.given if part.backwards <= m < until}
                assert part.given == set(range(part.backwards, until)), f"gradients of {role} are gone"

    def _holders(self, member: Member, role: Role) -> list[str]:
        """Whom the owner of a role tells what it does."""
        plan = member.plan
        rank, shadow = self._layout.rank(role), plan.shadow(role)
        builders = [builder for learned, builder in plan.builders if learned == rank]
        return [*([] if shadow is None else [shadow]), *builders]

    def _load(self, member: Member, step: Step) -> None:
        member.runtimes[step.role].part(step.begin).received.add(("L", step.m))

    def _send_activation(self, member: Member, step: Step) -> None:
        part = member.runtimes[step.role].part(step.begin)
        assert step.m in part.outputs, f"{member.name} has no output {step.m} of {step.role}"
        assert step.behind is not None
        member.epoch.sent[("F", *step.behind)].append(step.m)

    def _send_grad(self, member: Member, step: Step) -> None:
        part = member.runtimes[step.role].part(step.begin)
        assert step.m in part.gradients, f"{member.name} has no gradient {step.m} of {step.role}"
        assert step.before is not None
        member.epoch.sent[("B", *step.before)].append(step.m)
        if self._case.mode == "eager-brc" and not step.begin and member.epoch.resumed is None:
            before = self._layout.predecessor(step.role)
            if assists(member.plan, before):
                member.epoch.sent["Shadow", member.plan.shadow(before), before, member.step].append(step.m)

    def _recv_activation(self, member: Member, step: Step) -> Iterator[Waits]:
        queue = member.epoch.sent["F", member.name, step.role, step.begin]
        yield queue.__len__
        assert queue.popleft() == step.m, f"a message to {step.role} is out of step"
        member.runtimes[step.role].part(step.begin).received.add(("F", step.m))

    def _recv_grad(self, member: Member, step: Step) -> Iterator[Waits]:
        part = member.runtimes[step.role].part(step.begin)
        if step.m in part.given:
            part.given.remove(step.m)
        else:
            queue = member.epoch.sent["B", member.name, step.role, step.begin]
            yield queue.__len__
            assert queue.popleft() == step.m, f"a message to {step.role} is out of step"
        part.received.add(("B", step.m))

    def _pass_together(self, member: Member, step: Step) -> Iterator[Waits]:
        """Slices of a stage do each pass together."""
        member.inside = step.role, step.begin, step.kind, step.m
        together = self._layout.slices_with(step.role)
        come = member.epoch.come["pass", member.step, together[0], step.kind, step.m]
        come.add(member.name)
        yield lambda: len(come) == len(together)
        member.inside = None
        self._pass(member, step)

    def _pass(self, member: Member, step: Step) -> None:
        part, m, every = member.runtimes[step.role].part(step.begin), step.m, self._case.every
        member.epoch.passes[member.step, step.kind] += 1
        self._job.did[member.step].add((step.role, step.kind, m))
        if step.kind == "ForwardPass":
            if step.before is None or step.behind is None:
                part.received.remove(("L", m))
            if step.before is not None:
                part.received.remove(("F", m))
            assert m == part.forwards
            part.forwards += 1
            part.outputs.add(m)
            if every and part.forwards % every == 0 and part.forwards < self._case.micro_batches:
                part.marks.add(part.forwards)
        else:
            if step.behind is not None:
                part.received.remove(("B", m))
            assert m == part.backwards < part.forwards
            part.backwards += 1
            part.gradients.add(m)
            part.fold += (m,)

    def _send_sums(self, member: Member, step: Step) -> None:
        runtime, count = member.runtimes[step.role], step.m + 1
        part = runtime.part(step.begin)
        if count not in part.marks:
            decision = member.epoch.decision
            assert decision is not None and decision.step == member.step, f"{step.role} has no sums of {count} to send"
            return
        assert part.backwards == count, f"{step.role} sends sums of {count} after {part.backwards}"
        part.marks.remove(count)
        whom = self.users(member, runtime)
        assert whom or self._layout.slices > 1, f"nobody could use sums of {step.role}"
        if self._random.random() < 0.2:  # passes come first on the network
            return
        if self._layout.slices > 1:
            member.hold(step.role, member.step, part.begin, part.end, part.fold)
        for each in whom:
            member.epoch.sent["Sums", each, step.role].append((member.step, part.begin, part.end, part.fold))

    def users(self, member: Member, runtime: Runtime) -> list[str]:
        """Those that could use sums of a role, which a member computes all or a part of."""
        return self._holders(member, runtime.role) if runtime.owned else [member.plan.owner(runtime.role)]

    def _send_changes(self, member: Member, step: Step) -> None:
        member.epoch.sent["Changes", member.plan.shadow(step.role), step.role].append(())

    def _recv_changes(self, member: Member, step: Step) -> Iterator[Waits]:
        yield from self._received("Changes", member, step)

    def _received(self, kind: str, member: Member, step: Step) -> Generator[Waits, None, Any]:
        queue = member.epoch.sent[kind, member.name, step.role]
        yield queue.__len__
        return queue.popleft()

    def _send_part(self, member: Member, step: Step) -> None:
        (part,) = member.runtimes[step.role].parts
        member.epoch.sent["Part", member.plan.owner(step.role), step.role].append(part)

    def _recv_part(self, member: Member, step: Step) -> Iterator[Waits]:
        theirs = yield from self._received("Part", member, step)
        runtime = member.runtimes[step.role]
        if runtime.reduced is None:
            runtime.theirs = theirs

    def _send_replica(self, member: Member, step: Step) -> None:
        runtime = member.runtimes[step.role]
        assert runtime.reduced is not None
        for holder in self._holders(member, step.role):
            member.epoch.sent["Replica", holder, step.role].append((runtime.reduced, runtime.loss))

    def _recv_replica(self, member: Member, step: Step) -> Iterator[Waits]:
        told = yield from self._received("Replica", member, step)
        if step.role in member.building:
            member.building[step.role].incoming = told[0]
        else:
            runtime = member.runtimes[step.role]
            runtime.reduced, runtime.loss = told

    def _fill(self, member: Member, step: Step) -> None:
        """A redundant pass, if one can be done."""
        if not self._case.eager:
            return
        able = []
        for role, runtime in member.runtimes.items():
            part = runtime.parts[0]
            if runtime.owned or runtime.helps or runtime.divided or runtime.reduced is not None:
                continue
            if member.plan.shadow(role) != member.name or not assists(member.plan, role):
                continue
            self._go_on_from_sums(member, runtime, part)
            if self._backwards(member, role, part):
                able.append((role, part, "BackwardPass"))
            before = member.runtimes[self._layout.predecessor(role)].parts[-1] if role.stage > 0 else None
            if part.forwards < self._case.micro_batches and (before is None or part.forwards in before.outputs):
                able.append((role, part, "ForwardPass"))
        if able:
            role, part, kind = self._random.choice(able)
            m = part.forwards if kind == "ForwardPass" else part.backwards
            self._job.did[member.step].add((role, kind, m))
            self._counts[f"redundant {kind}"] += 1
            if kind == "ForwardPass":
                part.outputs.add(m)
                part.forwards += 1
            else:
                part.gradients.add(m)
                part.fold += (m,)
                part.backwards += 1

    def _backwards(self, member: Member, role: Role, part: Part) -> bool:
        """Whether a redundant backward pass can be done; gradients of passes that are not needed are forgotten."""
        if self._case.mode != "eager-brc" or member.epoch.resumed is not None or part.backwards == part.forwards:
            return False
        if role.stage == self._layout.stages - 1:
            return True
        queue = member.epoch.sent["Shadow", member.name, role, member.step]
        while queue and queue[0] < part.backwards:
            queue.popleft()
        return bool(queue) and self._random.random() < 0.7

    def _go_on_from_sums(self, member: Member, runtime: Runtime, part: Part) -> None:
        """As :meth:`bamboo_ds.engine.iteration.sums.PartialSums.follow`."""
        queue = member.epoch.sent["Sums", member.name, runtime.role]
        if not queue or self._random.random() < 0.5:
            return
        member.hold(runtime.role, *queue.popleft())
        held = tuple(member.sums.get((runtime.role, part.begin, part.end), ()))
        self._move(member, runtime, part, ways(replace(part.progress(), sums=held))[0])

    def _sums_of(self, runtime: Runtime) -> tuple[int, ...]:
        """The sums of a role, of all of its parts, which have to be the same."""
        parts = sorted((*runtime.parts, *filter(None, [runtime.theirs])), key=lambda part: part.begin)
        covered = [0, *(part.end for part in parts)]
        assert covered == [*(part.begin for part in parts), runtime.blocks], f"parts of {runtime.role}: {covered}"
        folds = {part.fold for part in parts}
        assert folds == {tuple(range(self._case.micro_batches))}, f"the sums of {runtime.role} are {folds}"
        return folds.pop()

    def _reduce_tied(self, member: Member, step: Step) -> Iterator[Waits]:
        pipeline = step.role.pipeline
        mine = [each.role for each in member.owned() if each.role.pipeline == pipeline]
        for number, stages in enumerate(self._case.ties):
            tied = [each for each in mine if each.stage in stages]
            if step.role != mine[-1] or not tied:
                continue
            group = {member.plan.owner(Role(pipeline, stage)) for stage in stages}
            if all(member.runtimes[each].reduced is not None for each in tied):
                continue
            for each in tied:
                self._sums_of(member.runtimes[each])
                member.runtimes[each].tied.add(number)
            come = member.epoch.come["tied", member.step, pipeline, number]
            come.add(member.name)
            yield lambda come=come, group=group: come >= group  # type: ignore[misc]

    def _reduce(self, member: Member, step: Step) -> Iterator[Waits]:
        stage = step.role.stage
        same = [each for each in member.owned() if each.role.stage == stage]
        if step.role != same[-1].role or all(each.reduced is not None for each in same):
            return
        what = "reduce", member.step, stage, self._layout.slice_of(step.role)
        sums = member.epoch.sent[("Fold", "", *what)]
        for each in same:
            shared = {number for number, stages in enumerate(self._case.ties) if stage in stages}
            assert each.tied == shared, f"the tied weights of {each.role} are not reduced"
            sums.append(self._sums_of(each))
        group = {member.plan.owner(each) for each in self._layout.siblings(step.role)}
        come = member.epoch.come[what]
        come.add(member.name)
        yield lambda: come >= group
        for each in same:
            each.reduced = tuple(sums)
            each.loss = True
