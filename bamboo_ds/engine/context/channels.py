"""The channels between members under a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum

from ...comm.channel import Channel
from ...topology import Plan, Role, batch_sources, end_sources
from ...topology.memory import NEWEST_SUMS


class Stream(IntEnum):
    """The content of a channel. The role of a channel is the one that receives, or whose state it is."""

    #: Outputs of the previous stage, between the members that compute: owners, and shadows with a part of their role.
    ACTIVATION = 0
    #: Gradients of the role's outputs, between the same.
    GRADIENT = 1
    #: Reduced gradients and buffers of the role, from its owner to its shadow and to members that build a replica.
    REPLICA = 2
    #: Labels of a last stage, to its owner.
    LABELS = 3
    #: Labels of a last stage, to its shadow.
    SHADOW_LABELS = 4
    #: Gradients of the role's outputs, to its shadow (eager redundant backwards).
    SHADOW_GRADIENT = 5
    #: Full state of the role, where that is copied at once, to the same members.
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
    #: What the script has changed of the role between two operations, from its owner to the holders of its state.
    TOLD = 13
    #: Parameters that the role's step has brought up to date, where the optimizer is partitioned: from its owner to
    #: members that have other roles of the stage, and do not gather them (:func:`gathers`).
    SHARD = 14
    #: What the owner has computed, for the shadow that has rehearsed it.
    REPORT = 15
    #: Sums of gradients of a part of the role in the middle of an iteration, from the member that computes it to those
    #: that could take it over.
    SUMS = 16


#: Large, and no pass waits for them: what passes wait for goes first between two members.
_YIELDING = frozenset({Stream.REPLICA, Stream.STATE, Stream.SHARD, Stream.SUMS})

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
    if not plan.world.ahead or plan.lending(role) is not None:
        return False
    return plan.shadow(role) == plan.computers(plan.world.predecessor(role))[-1]


def gathers(plan: Plan, role: Role) -> bool:
    """Whether the owners of the stage of ``role`` gather its shards in their group: each owns one of its roles."""
    owners = [plan.owner(sibling) for sibling in plan.world.siblings(role)]
    return len(set(owners)) == len(owners)


#: Opens a channel, given its name, its ends, and whether it is bounded and yields; see there.
Opening = Callable[[str, str, str, int | None, bool], Channel]


class Channels:
    """All channels of ``plan``'s epoch."""

    #: What the names of channels begin with.
    _prefix = ""

    def __init__(self, plan: Plan, opening: Opening, shadow_gradients: bool) -> None:
        """Args:
        plan: the plan, without lost roles.
        opening: opens each.
        shadow_gradients: whether gradients are also sent to shadows.
        """
        self._begin(opening)
        layout = plan.world
        for role in layout.roles:
            owner, shadow = plan.owner(role), plan.shadow(role)
            helper = shadow if shadow is not None and assists(plan, role) else None
            if role.stage > 0:
                self._connect(plan, Stream.ACTIVATION, role, layout.predecessor(role))
            if role.stage < layout.stages - 1:
                self._connect(plan, Stream.GRADIENT, role, layout.successor(role))
                if helper is not None and shadow_gradients:
                    self._add(Stream.SHADOW_GRADIENT, role, plan.computers(layout.successor(role))[0], helper)
            lent = plan.lending(role)
            helpers = helper, helper
            if lent is not None and shadow is not None:
                front, rear = plan.computers(role)
                self._add(Stream.INNER_ACTIVATION, role, front, rear)
                self._add(Stream.INNER_GRADIENT, role, rear, front)
                self._add(Stream.CHANGES, role, owner, shadow)
                self._add(Stream.PART, role, shadow, owner)
                self._add(Stream.SUMS, role, shadow, owner, NEWEST_SUMS)
                # It loads micro-batches, if its part is at an end of the pipeline.
                helpers = (shadow, None) if lent.side == "front" else (None, shadow)
            builders = [builder for rank, builder in plan.builders if rank == layout.rank(role)]
            for holder in (*((shadow,) if shadow is not None else ()), *builders):
                self._add(Stream.SUMS, role, owner, holder, NEWEST_SUMS)
                for stream in (Stream.REPLICA, Stream.STATE, Stream.TOLD):
                    self._add(stream, role, owner, holder)
            for member in _interested(plan, role) if layout.sharded else ():
                self._add(Stream.SHARD, role, owner, member)
            # Those of the end itself are right in any case.
            sources = end_sources(plan, layout.rank(role)) or batch_sources(plan, role.pipeline)
            if not sources:
                continue
            ends = ((0, Stream.INPUTS, Stream.SHADOW_INPUTS), (layout.stages - 1, Stream.LABELS, Stream.SHADOW_LABELS))
            for (stage, to_owner, to_shadow), helper in zip(ends, helpers, strict=True):
                if role.stage != stage:
                    continue
                if owner not in sources:
                    self._add(to_owner, role, sources[0], owner)
                if helper is not None and helper not in sources:
                    self._add(to_shadow, role, sources[0], helper)

    def _begin(self, opening: Opening) -> None:
        self._channels: dict[tuple[Stream, Role], list[Channel]] = {}
        self._opening = opening

    def _connect(self, plan: Plan, stream: Stream, role: Role, beside: Role) -> None:
        """Connects the owner of the role ``beside`` to that of ``role``, and shadows that compute parts of them."""
        forward = stream is Stream.ACTIVATION
        self._add(stream, role, plan.owner(beside), plan.owner(role))
        senders = {plan.owner(beside), plan.computers(beside)[-1 if forward else 0]}
        receivers = {plan.owner(role), plan.computers(role)[0 if forward else -1]}
        for sender in sorted(senders):
            for receiver in sorted(receivers):
                self._add(stream, role, sender, receiver)

    def _add(self, stream: Stream, role: Role, source: str, destination: str, newest: int | None = None) -> None:
        channels = self._channels.setdefault((stream, role), [])
        if (source, destination) not in [(channel.source, channel.destination) for channel in channels]:
            name = f"{self._prefix}{stream.name.lower()} {role} from {source} to {destination}"
            channels.append(self._opening(name, source, destination, newest, stream in _YIELDING))

    def __iter__(self) -> Iterator[tuple[Stream, Role, Channel]]:
        """Every channel, with what it carries, and the role concerned."""
        return ((stream, role, channel) for (stream, role), channels in self._channels.items() for channel in channels)

    def __getitem__(self, key: tuple[Stream, Role]) -> Channel:
        """The only channel of a stream; of activations and gradients that between owners."""
        return self._channels[key][0]

    def get(self, key: tuple[Stream, Role]) -> Channel | None:
        """The same, if the plan has it."""
        return self[key] if key in self._channels else None

    def of(self, stream: Stream, role: Role) -> list[Channel]:
        """All channels of a stream."""
        return self._channels.get((stream, role), [])

    def to(self, stream: Stream, role: Role, member: str) -> Channel | None:
        """The channel of a stream from an owner to ``member``, if the plan has it."""
        return next((channel for channel in self.of(stream, role) if channel.destination == member), None)

    def replica(self, role: Role, member: str) -> Channel:
        """The channel of reduced gradients of ``role`` to ``member``, its shadow or one that builds a replica."""
        channel = self.to(Stream.REPLICA, role, member)
        assert channel is not None
        return channel

    def between(self, stream: Stream, role: Role, source: str, destination: str) -> Channel:
        """The channel of activations or gradients to ``role`` between two of the members that may compute."""
        found = self._channels[stream, role]
        return next(channel for channel in found if (channel.source, channel.destination) == (source, destination))


class RehearsalChannels(Channels):
    """The channels of a takeover that is only rehearsed: what the owner of a role gets, for its shadow.

    Attributes:
        roles: those whose passes the shadows rehearse.
        reported: those with a replica, of which the owners report what they have computed.
    """

    _prefix = "rehearsed "

    def __init__(self, plan: Plan, opening: Opening) -> None:
        """Args:
        plan: the plan, without lost roles.
        opening: opens each.
        """
        self._begin(opening)
        self.roles: list[Role] = []
        self.reported: list[Role] = []
        layout = plan.world
        for role in layout.roles:
            shadow = plan.shadow(role)
            if shadow is None:
                continue
            self.reported.append(role)
            self._add(Stream.REPORT, role, plan.owner(role), shadow)
            lent = any(plan.lending(each) for each in (role, layout.predecessor(role), layout.successor(role)))
            if layout.slices > 1 or lent:
                continue
            for stage, loads in ((0, Stream.INPUTS), (layout.stages - 1, Stream.LABELS)):
                if role.stage == stage and not assists(plan, role):  # one that assists has them
                    self._add(loads, role, plan.owner(role), shadow)
            self.roles.append(role)
            if role.stage > 0:
                self._add(Stream.ACTIVATION, role, plan.owner(layout.predecessor(role)), shadow)
            if role.stage < layout.stages - 1:
                self._add(Stream.GRADIENT, role, plan.owner(layout.successor(role)), shadow)

    def between(self, stream: Stream, role: Role, source: str, destination: str) -> Channel:
        """The channel to the shadow of ``role``, whichever member computes it."""
        return self[stream, role]


def _interested(plan: Plan, role: Role) -> list[str]:
    """Members that hold or copy another role of the stage than ``role``, in the plan's order.

    But for its owner, and where owners gather shards for all of them.
    """

    def followers(each: Role) -> set[str | None]:
        builders = {builder for rank, builder in plan.builders if rank == plan.world.rank(each)}
        return {plan.owner(each), plan.shadow(each), *builders}

    siblings = plan.world.siblings(role)
    interested = set[str | None]().union(*(followers(sibling) for sibling in siblings if sibling != role))
    have = {plan.owner(each) for each in (siblings if gathers(plan, role) else (role,))}
    return [member for member in plan.members if member in interested - have]
