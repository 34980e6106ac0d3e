"""Copies of roles' states: at once while nothing is trained, in the background while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...comm.bulk.copying import Fetch
from ...control.registry.records import WorkerState
from ...errors import TransferError
from ...observe.spans import Kind
from ...schedule import Decision
from ...topology import LONG_S, Layout, Plan, Role, without_copies
from ..context.channels import Stream
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..iteration.parts import IterationParts
from ..replicas.building import StageBuilder
from ..replicas.construction import (
    FETCH_TIMEOUT_S,
    Construction,
    Kept,
    Moment,
    OfferedState,
    Snapshots,
    snapshot_key,
)
from ..replicas.replica import capture
from ..script.changes import Adjusted
from ..stage.runtime import StageRuntime
from ..stage.schedulers import Pristine, SchedulerPosition
from ..stage.work import Verification
from .reports import Reports, all_at_boundary, all_in_iteration

logger = logging.getLogger("bamboo_ds")

#: Seconds at a boundary that a replica may take to catch up; it performs two iterations in any case, so it gets there.
_CATCH_UP_S = 0.05


@dataclass(eq=False)
class Copies(InContext):
    """Makes and hands out copies of roles' states."""

    iteration: IterationParts
    builder: StageBuilder
    snapshots: Snapshots
    #: The operation after which snapshots may be offered.
    _first: int = field(default=0, init=False)
    #: Ranks of roles that this member was to shadow when it entered the epoch, without a replica.
    _lacked: tuple[int, ...] = field(default=(), init=False)
    #: Whether iterations are long; a member that has just come knows it of the others.
    _long: bool = field(default=False, init=False)

    @property
    def constructions(self) -> dict[Role, Construction]:
        """Replicas that this member builds."""
        return self.iteration.constructions

    def copy_state(self, roles: Iterable[Role], anew: bool = False) -> None:
        """Copies the full state of ``roles`` from their owners to all that hold or build their replicas. Collective.

        Args:
            roles: to be copied.
            anew: replicas are built again; else those that are there take the state over.
        """
        roles = list(roles)
        self.binding.refresh()
        runtimes, member = self.binding.runtimes, self.epoch.member
        for role in roles:
            channels = self.epoch.channels.of(Stream.STATE, role)
            if channels and self.epoch.owns(role):
                message = as_message(capture(runtimes[role]))
                for channel in channels:
                    channel.send(self.progress.sequence, message)
        for role in roles:
            incoming = self.epoch.channels.to(Stream.STATE, role, member)
            if incoming is not None:
                state = from_message(incoming.recv(self.progress.sequence, parked=True))
                construction = self.constructions.get(role)
                if construction is not None:
                    construction.fetch.cancel()
                    construction.runtime = self._build(role, state, self.binding.local.pristine)
                    self._complete(construction)
                elif role in runtimes and not (anew and runtimes[role] is not self.binding.local):
                    self.builder.restore(runtimes[role], state)
                else:
                    if role in runtimes:
                        self.binding.drop(role)
                    runtimes[role] = self._build(role, state, self.binding.local.pristine)
        self.epoch.drain()

    def renew(self) -> None:
        """Makes every replica anew from what its owner has now, as after a loss. Collective, between two operations.

        Raises:
            UnsupportedError: an owner has what cannot be sent.
            EpochChanged: a member is lost; a replica that has not been made anew yet stays as it was.
        """
        with self.recording.span(Kind.COPY):
            self.copy_state(self.epoch.layout.roles, anew=True)
            self.builder.place(self.epoch.plan)

    def _build(self, role: Role, state: Any, pristine: Pristine | None) -> StageRuntime:
        return self.builder.build(role, state, pristine, self.builder.parks and self.epoch.plan.lending(role) is None)

    def follow_owner(self, role: Role, change: Callable[[StageRuntime], None]) -> None:
        """Does to this member's copy of ``role``, if any, what the operation under way has done to its owner's."""
        if role in self.binding.runtimes:
            self.binding.runtimes[role].catch_up()
            change(self.binding.runtimes[role])
        elif role in self.constructions:
            self.constructions[role].kept.append(Kept((self.progress.sequence, False), change))

    def follow_settings(self, changed: Adjusted) -> None:
        """The script has set something: replicas under construction get it when they are that far."""

        def follow(runtime: StageRuntime) -> None:
            self.binding.refresh()
            changed.give(runtime)
            self.binding.reload()

        for construction in self.constructions.values():
            construction.kept.append(Kept((self.progress.sequence - 1, True), follow, changed.replacement))

    def tell(self) -> str:
        """The progress of replicas under construction, for people; callable from any thread."""
        parts = [f"{_name(c.role, self.epoch.layout)} ({c.fetch.share:.0%})" for c in list(self.constructions.values())]
        return f"copies {', '.join(parts) or 'nothing more'}"

    # -- in the background --------------------------------------------------------------------------------

    def planned(self, plan: Plan, reports: Reports) -> Plan:
        """``plan`` as all of its members go by it: shadows that have told of no replica make one.

        A member may be lost before others have made their first replicas, and one that was found to differ is dropped.
        """
        lacking = {
            member: {self.epoch.layout.rank(role) for role in plan.shadowed_by(member)}.difference(report.replicas)
            for member, report in reports.items()
        }
        self._lacked = tuple(sorted(lacking[self.epoch.member]))
        return without_copies(plan, lacking)

    def begin(self, plan: Plan, reports: Reports, decision: Decision) -> None:
        """Builds the replicas of ``plan``, and finds out which snapshots this member has to offer.

        A copy that was begun under an earlier plan goes on where the owner is the same. No operation has been committed
        without the builder, so it has kept all that the owner has done since it began, and any snapshot that the owner
        has taken since then will do. An owner that has withdrawn the one that the builder is fetching, since it has
        entered a plan that the builder has not, offers another one under the same key.

        Args:
            plan: the plan that begins.
            reports: of its members.
            decision: on the operation that all go on with. A builder may be in it, and knows nothing more of
                what its script has set before; so owners offer no snapshot before they have done it, unless all are at
                the boundary before, or in the same iteration, which they will finish together with those that join.
        """
        step = self._first = decision.step
        self._long = max(report.iteration_s for report in reports.values()) >= LONG_S
        wanted: dict[str, Role] = {}
        sources: dict[Role, tuple[str, str]] = {}
        for rank, builder in plan.builders:
            if rank in reports[builder].replicas:
                continue
            role, owner = self.epoch.layout.role(rank), plan.owners[rank]
            source = reports[builder].copying.get(rank)
            if source is None or source[0] != owner:
                source = owner, snapshot_key(plan.epoch, rank)
            if owner == self.epoch.member:
                wanted[source[1]] = role
            if builder == self.epoch.member:
                sources[role] = source
        self.snapshots.want(wanted)
        for construction in list(self.constructions.values()):
            if construction.source != sources.get(construction.role):
                self._give_up(construction)
        for role, source in sources.items():
            if role not in self.constructions:
                self.constructions[role] = Construction(role, source, self._fetch(*source))
                self.job.channel.activity.telling["copies"] = self.tell
        within = decision.mode == "resume" and all_in_iteration(reports, step)
        if within or all_at_boundary(reports, step):
            self.binding.refresh()
            if not reports[self.epoch.member].joining:
                self.note_position((step - 1, within))
            self._offer((step - 1, within))

    def _fetch(self, owner: str, key: str) -> Fetch:
        return self.epoch.session.fetch(owner, self.epoch.plan.place(owner), key, FETCH_TIMEOUT_S)

    def note_position(self, moment: Moment) -> None:
        """Remembers where this member's own scheduler stands."""
        for construction in self.constructions.values():
            construction.positions[moment] = SchedulerPosition.of(self.binding.local)

    def _offer(self, moment: Moment) -> None:
        for key, role in self.snapshots.due():
            runtime = self.binding.runtimes[role]
            self.snapshots.offer(key, OfferedState(moment, runtime.share.reversible, capture(runtime)))

    def drop_incoming(self) -> None:
        """Drops what this iteration's reductions have given."""
        for construction in self.constructions.values():
            construction.incoming = None

    def _give_up(self, construction: Construction) -> None:
        """Gives up a replica that is not wanted any more."""
        self._remove(construction)
        construction.fetch.cancel()
        construction.kept.clear()  # what is to be done refers to the construction, and to gradients on the device
        runtime = construction.runtime
        if runtime is not None and runtime is not self.binding.local:
            runtime.optimizer.release()

    def _remove(self, construction: Construction) -> None:
        del self.constructions[construction.role]
        if not self.constructions:
            self.job.channel.activity.telling.pop("copies", None)

    def advance(self, stepped: bool) -> None:
        """Offers, at a boundary, the snapshots that are due, and catches up with those that have arrived.

        Args:
            stepped: optimizers have done so. Members exchange shards after that only, which a replica that catches up
                with the steps of one role lacks.
        """
        self.binding.refresh()
        self.note_position((self.progress.sequence, False))
        if self.progress.sequence >= self._first:
            self._offer((self.progress.sequence, False))
        for construction in list(self.constructions.values()) if stepped or not self.epoch.layout.sharded else ():
            try:
                self._advance(construction)
            except TransferError as error:
                logger.warning("copying role %s failed and begins again: %s", construction.role, error)
                construction.fetch = self._fetch(*construction.source)

    def complete_arrived(self, awaited: Role | None) -> None:
        """Completes, in the middle of a long iteration, the copies that are there, so that others can rely on them.

        Not that of the role whose stage the script looks at, nor where members exchange shards after a step.

        Args:
            awaited: the reduced gradients of this role are received next; until they come there is time for copies.
        """
        if not self.constructions or not self._long or self.epoch.layout.sharded:
            return
        channel = None if awaited is None else self.epoch.channels.replica(awaited, self.epoch.member)

        def able() -> list[Construction]:
            local = self.binding.local.role
            return [each for each in self.constructions.values() if each.incoming is None and each.role != local]

        while True:
            for construction in able():
                if construction.serves:
                    self.binding.refresh()
                    self._advance(construction)
            if channel is None or channel.ready():
                return
            if any(each.serves for each in able()):
                continue  # it has yet to catch up
            coming = [each.fetch for each in able() if not each.fetch.complete]
            if not coming:
                return
            channel.await_either(partial(_one_is_there, coming))

    def _advance(self, construction: Construction) -> None:
        if construction.runtime is None:
            snapshot = construction.arrived()
            if snapshot is None:
                return
            construction.forget(snapshot.moment)
            pristine = construction.scheduled_by(self.binding.local.pristine)
            construction.runtime = self._build(construction.role, snapshot.state, pristine)
            construction.follows = construction.position(snapshot.moment) == SchedulerPosition.of(construction.runtime)
        begin, count = time.monotonic(), 0
        whole = construction.runtime is self.binding.local  # the script looks at it
        while construction.kept and (whole or count < 2 or time.monotonic() - begin < _CATCH_UP_S):
            construction.kept.popleft().follow(construction.runtime)
            count += 1
        if not construction.kept:
            self._complete(construction)

    def _complete(self, construction: Construction) -> None:
        """Makes a complete replica one like any other from now on."""
        role, runtime = construction.role, construction.runtime
        assert runtime is not None
        self.binding.runtimes[role] = runtime
        runtime.owned, runtime.stale = False, self.epoch.layout.sharded
        runtime.verification = Verification()  # its last step may have lacked the shards of others
        self._remove(construction)
        logger.info("the replica of role %s is complete", role)
        self.job.channel.event(
            "replica_built",
            epoch=self.epoch.plan.epoch,
            step=self.progress.steps,
            role=[role.pipeline, role.stage],
            seconds=time.monotonic() - construction.begun,
            bytes=sum(t.nbytes for t in runtime.tensors()),
        )
        self.tell_replicas()

    def replicas(self) -> tuple[int, ...]:
        """Ranks of the roles whose replica this member holds."""
        return tuple(self.epoch.layout.rank(r.role) for r in self.binding.replicas() if r.verification.valid)

    def tell_replicas(self) -> None:
        """Tells the control plane which epoch this member has entered, what it holds, and what it may share."""
        # The check of the first steps is one of whole stages, and replicas are where they were when it began.
        owners = () if self.iteration.checks.on else self.binding.owned()
        known = {self.epoch.layout.rank(r.role): r for r in owners if r.stage.cuts is not None}
        # Scripts may have stages compiled as wholes later.
        owned = {rank: () if r.stage.whole else r.stage.cuts or () for rank, r in known.items()}
        self.iteration.measures.times.enter(self.epoch.plan.epoch)
        changed = any(runtime.layers.changes.count for runtime in self.binding.owned())
        state = WorkerState(
            id=self.job.channel.member,
            epoch=self.epoch.plan.epoch,
            replicas=tuple(sorted(self.replicas())),
            lacked=self._lacked,
            cuts=owned,
            seconds=self.iteration.measures.times.told(),
            iteration_s=self.iteration.measures.times.iteration_s,
            sums_share=0.0 if changed else self.iteration.sums.every / self.ds.micro_batches,
            passes=self.iteration.measures.kept.known,
            outputs=self.iteration.measures.kept.outputs,
            redundant={} if self.iteration.checks.on else self.iteration.measures.kept.redundant,
        )
        self.job.channel.report_state(state)

    def close(self) -> None:
        """Gives up all copies and offers."""
        for construction in list(self.constructions.values()):
            self._give_up(construction)
        self.snapshots.close()


def _one_is_there(fetches: Iterable[Fetch]) -> bool:
    return any(each.complete for each in fetches)


def _name(role: Role, layout: Layout) -> str:
    return f"stage {role.stage}" + (f" of pipeline {role.pipeline}" if layout.pipelines > 1 else "")
