"""Which streams exist between members under a plan. Pure."""

from __future__ import annotations

from enum import IntEnum
from itertools import chain

from ...comm.transport import Lane
from ...topology import Plan, Role, batch_sources, end_sources


class Stream(IntEnum):
    """What a lane carries. The role of a lane is the one that receives, or whose state it is."""

    #: Outputs of the previous stage, to the role's owner.
    ACTIVATION = 0
    #: Gradients of the role's outputs, to the role's owner.
    GRADIENT = 1
    #: Reduced gradients and buffers of the role, from its owner to its shadow.
    REPLICA = 2
    #: Labels of a last stage, to its owner.
    LABELS = 3
    #: Labels of a last stage, to its shadow.
    SHADOW_LABELS = 4
    #: Gradients of the role's outputs, to its shadow (eager redundant backwards).
    SHADOW_GRADIENT = 5
    #: Full state of the role, from its owner to its shadow.
    STATE = 6
    #: Inputs of a first stage, to its owner.
    INPUTS = 7
    #: Inputs of a first stage, to its shadow.
    SHADOW_INPUTS = 8
    #: Outputs of the front part of the role, to the member that computes its rear part.
    INNER_ACTIVATION = 9
    #: Gradients of these, back.
    INNER_GRADIENT = 10
    #: What the script has changed of the role, from its owner to its shadow, which computes a part of it.
    CHANGES = 11
    #: Gradients of that part, back.
    PART = 12


#: Streams that carry parts of batches: which part, inputs or labels.
BATCH_PARTS = {
    Stream.INPUTS: "inputs",
    Stream.SHADOW_INPUTS: "inputs",
    Stream.LABELS: "labels",
    Stream.SHADOW_LABELS: "labels",
}


def assists(plan: Plan, role: Role) -> bool:
    """Whether the shadow of ``role`` computes its redundant passes: it computes what precedes the role.

    Those of tensor slices would communicate, for which all shadows would have to agree on when they run. Where it
    computes a part of the role for the owner it has no time for them.
    """
    if plan.world.slices > 1 or plan.lending(role) is not None:
        return False
    return plan.shadow(role) == plan.computers(plan.world.predecessor(role))[-1]


class Lanes:
    """All lanes of ``plan``'s epoch.

    Attributes:
        streams: by what they carry and the role concerned; those of activations and gradients between owners.
        others: of activations and gradients where one of the members is a shadow that computes a part of its role; by
            these members, too.
        shards: parameters that a role's step has brought up to date, from its owner to a member that has other roles
            of the stage; where the optimizer is partitioned.
        constructions: reduced gradients and buffers of a role, and its state where that is copied at once, to a member
            that builds a replica of it.
        told: what the script has changed of a role between two operations, from its owner to each member that holds or
            builds a replica.
    """

    def __init__(self, plan: Plan, shadow_gradients: bool) -> None:
        """Args:
        plan: the plan, without unheld roles.
        shadow_gradients: whether gradients are also sent to shadows.
        """
        self.streams: dict[tuple[Stream, Role], Lane] = {}
        self.others: dict[tuple[Stream, Role, str, str], Lane] = {}
        self.constructions: dict[tuple[Role, str], Lane] = {}
        self.shards: dict[tuple[Role, str], Lane] = {}
        self.told: dict[tuple[Role, str], Lane] = {}
        layout = plan.world
        for role in layout.roles:
            owner, shadow = plan.owner(role), plan.shadow(role)
            helper = shadow if shadow is not None and assists(plan, role) else None
            if role.stage > 0:
                self._add(Stream.ACTIVATION, role, plan.owner(layout.predecessor(role)), owner)
                self._add_others(plan, Stream.ACTIVATION, role, layout.predecessor(role))
            if role.stage < layout.stages - 1:
                self._add(Stream.GRADIENT, role, plan.owner(layout.successor(role)), owner)
                self._add_others(plan, Stream.GRADIENT, role, layout.successor(role))
                if helper is not None and shadow_gradients:
                    self._add(Stream.SHADOW_GRADIENT, role, plan.computers(layout.successor(role))[0], helper)
            lent = plan.lending(role)
            if lent is not None and shadow is not None:
                front, rear = plan.computers(role)
                self._add(Stream.INNER_ACTIVATION, role, front, rear)
                self._add(Stream.INNER_GRADIENT, role, rear, front)
                self._add(Stream.CHANGES, role, owner, shadow)
                self._add(Stream.PART, role, shadow, owner)
                # It loads micro-batches, if its part is at an end of the pipeline.
                helper = shadow if role.stage == (0 if lent.side == "front" else layout.stages - 1) else None
            if shadow is not None:
                self._add(Stream.REPLICA, role, owner, shadow)
                self._add(Stream.STATE, role, owner, shadow)
                self._tell(plan, role, shadow)
            # Those of the end itself are right in any case.
            sources = end_sources(plan, layout.rank(role)) or batch_sources(plan, role.pipeline)
            if not sources:
                continue
            for stage, to_owner, to_shadow in (
                (0, Stream.INPUTS, Stream.SHADOW_INPUTS),
                (layout.stages - 1, Stream.LABELS, Stream.SHADOW_LABELS),
            ):
                if role.stage != stage:
                    continue
                if owner not in sources:
                    self._add(to_owner, role, sources[0], owner)
                if helper is not None and helper not in sources:
                    self._add(to_shadow, role, sources[0], helper)
        for rank, builder in plan.learners:
            role = layout.role(rank)
            name = f"build {role} {builder}"
            self.constructions[role, builder] = Lane(self._count(), plan.owner(role), builder, name)
            self._tell(plan, role, builder)
        for role in layout.roles if layout.sharded else ():
            for member in _interested(plan, role):
                name = f"shard {role} {member}"
                self.shards[role, member] = Lane(self._count(), plan.owner(role), member, name)

    def _count(self) -> int:
        return len(self.streams) + len(self.others) + len(self.constructions) + len(self.shards) + len(self.told)

    def _add_others(self, plan: Plan, stream: Stream, role: Role, source: Role) -> None:
        """Between members of which one computes a part of ``role`` or of ``source`` as its shadow."""
        forward = stream is Stream.ACTIVATION
        senders = {plan.owner(source), plan.computers(source)[-1 if forward else 0]}
        receivers = {plan.owner(role), plan.computers(role)[0 if forward else -1]}
        for sender in sorted(senders):
            for receiver in sorted(receivers):
                if (sender, receiver) != (plan.owner(source), plan.owner(role)):
                    name = f"{stream.name.lower()} {role} {sender} {receiver}"
                    self.others[stream, role, sender, receiver] = Lane(self._count(), sender, receiver, name)

    def _add(self, stream: Stream, role: Role, source: str, destination: str) -> None:
        self.streams[stream, role] = Lane(self._count(), source, destination, f"{stream.name.lower()} {role}")

    def _tell(self, plan: Plan, role: Role, holder: str) -> None:
        if (role, holder) not in self.told:
            self.told[role, holder] = Lane(self._count(), plan.owner(role), holder, f"told {role} {holder}")

    def __getitem__(self, key: tuple[Stream, Role]) -> Lane:
        return self.streams[key]

    def between(self, stream: Stream, role: Role, source: str, destination: str) -> Lane:
        """The lane of activations or gradients to ``role`` between two of the members that may compute."""
        lane = self.streams[stream, role]
        if (lane.source, lane.destination) == (source, destination):
            return lane
        return self.others[stream, role, source, destination]

    def get(self, key: tuple[Stream, Role]) -> Lane | None:
        """The lane, if the plan has it."""
        return self.streams.get(key)

    def replica(self, role: Role, member: str) -> Lane:
        """The lane of reduced gradients of ``role`` to ``member``, its shadow or one that builds a replica."""
        return self.constructions.get((role, member)) or self.streams[Stream.REPLICA, role]

    def replicas(self, role: Role) -> list[Lane]:
        """The lanes on which the owner of ``role`` sends its reduced gradients."""
        shadow = self.streams.get((Stream.REPLICA, role))
        return [*([shadow] if shadow else []), *(lane for (r, _), lane in self.constructions.items() if r == role)]

    def state(self, role: Role, member: str) -> Lane:
        """The lane of the full state of ``role`` to ``member``, its shadow or one that builds a replica."""
        return self.constructions.get((role, member)) or self.streams[Stream.STATE, role]

    def states(self, role: Role) -> list[Lane]:
        """The lanes on which the owner of ``role`` sends its full state."""
        shadow = self.streams.get((Stream.STATE, role))
        return [*([shadow] if shadow else []), *(lane for (r, _), lane in self.constructions.items() if r == role)]

    def all(self) -> list[Lane]:
        """Every lane."""
        chosen = self.constructions.values(), self.shards.values(), self.told.values()
        return [*self.streams.values(), *self.others.values(), *chain.from_iterable(chosen)]


class RehearsalLanes(Lanes):
    """The lanes of a takeover that is only rehearsed: what the owner of a role gets, for its shadow.

    Attributes:
        roles: those whose passes the shadows rehearse.
        reports: what the owner of a role has computed, for its shadow, of every role with a replica.
    """

    def __init__(self, plan: Plan) -> None:
        """Args:
        plan: the plan, without unheld roles.
        """
        self.streams, self.others, self.constructions, self.shards, self.told = {}, {}, {}, {}, {}
        self.reports: dict[Role, Lane] = {}
        self.roles: list[Role] = []
        layout = plan.world
        for role in layout.roles:
            shadow = plan.shadow(role)
            if shadow is None:
                continue
            self.reports[role] = Lane(self._count(), plan.owner(role), shadow, f"report {role}")
            beside = (layout.predecessor(role), layout.successor(role))
            if not assists(plan, role) or any(plan.lending(other) for other in beside):
                continue
            self.roles.append(role)
            if role.stage > 0:
                self._add(Stream.ACTIVATION, role, plan.owner(layout.predecessor(role)), shadow)
            if role.stage < layout.stages - 1:
                self._add(Stream.GRADIENT, role, plan.owner(layout.successor(role)), shadow)

    def _count(self) -> int:
        return super()._count() + len(self.reports)

    def between(self, stream: Stream, role: Role, source: str, destination: str) -> Lane:
        """The lane to the shadow of ``role``, whoever computes it."""
        return self.streams[stream, role]

    def all(self) -> list[Lane]:
        """Every lane."""
        return [*super().all(), *self.reports.values()]


def _interested(plan: Plan, role: Role) -> list[str]:
    """Members, other than the owner of ``role``, that hold or copy another role of the stage, in the plan's order."""

    def followers(each: Role) -> set[str | None]:
        builders = {builder for rank, builder in plan.learners if rank == plan.world.rank(each)}
        return {plan.owner(each), plan.shadow(each), *builders}

    others = (sibling for sibling in plan.world.siblings(role) if sibling != role)
    found = set[str | None]().union(*map(followers, others))
    return [member for member in plan.members if member in found and member != plan.owner(role)]
