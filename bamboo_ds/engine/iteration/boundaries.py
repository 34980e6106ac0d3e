"""Tensors at the boundaries of stages: activations, gradients, and those that are kept for a takeover."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...bare import bare
from ...comm.channel import Channel
from ...comm.wire.payloads import Payload, Staged, aside
from ...errors import ProtocolError
from ...schedule import Hosts
from ...topology import Role
from ..context.channels import Channels, Stream
from ..context.shared import InContext
from .measures import IdleTimes


@dataclass(eq=False)
class Boundaries(InContext):
    """Sends and receives for the bound role, and the part of it that passes act on.

    Instructions are given their channels: those of the epoch, or those of a rehearsal.

    Attributes:
        hosts: members that compute the parts of every role in this iteration, by rank.
    """

    idle: IdleTimes
    hosts: Hosts = field(default=(), init=False)
    _waits: dict[Hashable, float] = field(default_factory=dict, init=False)  # begin of each bubble in progress

    # -- activations and gradients ------------------------------------------------------------------------

    def send_activations(self, channels: Channels, buffer_id: int) -> None:
        """Sends the outputs of a micro-batch to the next part or stage."""
        onwards = self._channel(channels, forward=True, sends=True)
        self._send(self.binding.current.share.part.activations, buffer_id, onwards)

    def send_grads(self, channels: Channels, buffer_id: int) -> None:
        """Sends the gradients of a micro-batch's inputs to the part or stage before, and to a shadow that uses them."""
        runtime = self.binding.current
        shadow = channels.get((Stream.SHADOW_GRADIENT, Role(runtime.role.pipeline, runtime.role.stage - 1)))
        uses = runtime.share.part.begin == 0 and not self.progress.operation.resumed
        before = self._channel(channels, forward=False, sends=True)
        self._send(runtime.share.part.gradients, buffer_id, before, shadow if uses else None)

    def resend_activation(self, channels: Channels, buffer_id: int) -> None:
        """Sends outputs again, to the new owner of the next part or stage."""
        self.send_activations(channels, buffer_id)

    def resend_grad(self, channels: Channels, buffer_id: int) -> None:
        """Sends gradients again, to the new owner of the part or stage before."""
        before = self._channel(channels, forward=False, sends=True)
        self._send(self.binding.current.share.part.gradients, buffer_id, before)

    def recv_activations(self, channels: Channels, buffer_id: int) -> None:
        """Receives the inputs of a micro-batch."""
        channel = self.incoming(channels, "activation")
        if channel is None:
            front, _ = self.binding.current.share.parts
            payload = on_device(front.activations[buffer_id])
        else:
            payload = self.receive(channel, buffer_id, self.place("activation", buffer_id))
        self.ds.pipe_buffers["inputs"][buffer_id] = as_leaves(payload)

    def recv_grads(self, channels: Channels, buffer_id: int) -> None:
        """Receives the gradients of a micro-batch's outputs."""
        part = self.binding.current.share.part
        if buffer_id in part.given:
            self.ds.grad_layer = part.given.pop(buffer_id)
            return
        channel = self.incoming(channels, "grad")
        if channel is None:
            _, rear = self.binding.current.share.parts
            self.ds.grad_layer = on_device(rear.gradients[buffer_id])
        else:
            self.ds.grad_layer = self.receive(channel, buffer_id, self.place("grad", buffer_id))

    def keep_given(self) -> None:
        """Keeps, after the epoch's end, gradients of this member's parts that have arrived and are not used."""
        for stream, role, channel in self.epoch.channels:
            ends = stream is Stream.GRADIENT
            if channel.destination != self.epoch.member or not (ends or stream is Stream.INNER_GRADIENT):
                continue
            arrived, runtime = channel.take(), self.binding.runtimes.get(role)
            if runtime is None:
                continue
            for part in runtime.share.parts:
                if (part.end == runtime.blocks) == ends:
                    part.given.update(arrived)

    def place(self, awaits: str, buffer_id: int) -> Hashable:
        """Names a receive of the current part."""
        runtime = self.binding.current
        return runtime.role, awaits, buffer_id, runtime.share.part.begin

    def incoming(self, channels: Channels, awaits: str) -> Channel | None:
        """The channel that ``activation`` or ``grad`` comes on; ``None`` from another part of the stage, here."""
        return self._channel(channels, awaits == "activation", sends=False)

    def _channel(self, channels: Channels, forward: bool, sends: bool) -> Channel | None:
        """The channel of activations (``forward``) or gradients that the current part sends or receives; as above."""
        runtime, onwards = self.binding.current, forward == sends
        if runtime.share.part.end < runtime.blocks if onwards else runtime.share.part.begin > 0:
            if len(runtime.share.parts) > 1:
                return None
            return channels[Stream.INNER_ACTIVATION if forward else Stream.INNER_GRADIENT, runtime.role]
        beside = Role(runtime.role.pipeline, runtime.role.stage + (1 if onwards else -1))
        ends = self.epoch.member, self._computer(beside.stage, last=not onwards)
        return channels.between(
            Stream.ACTIVATION if forward else Stream.GRADIENT,
            beside if sends else runtime.role,
            *(ends if sends else reversed(ends)),
        )

    def _computer(self, stage: int, last: bool) -> str:
        """The member that computes the last or the first part of another stage of the current pipeline."""
        rank = self.epoch.layout.rank(Role(self.binding.current.role.pipeline, stage))
        return self.hosts[rank][-1 if last else 0]

    def _send(self, store: dict[int, Payload | Staged], micro_batch: int, *channels: Channel | None) -> None:
        """Sends what is in ``store``; it stays there until commit if a takeover could need it."""
        payload = store[micro_batch] if self.context.retains else store.pop(micro_batch)
        for channel in channels:
            if channel is not None:
                payload = channel.send(micro_batch, payload)
        if self.context.retains:
            store[micro_batch] = aside(payload)

    # -- bubbles ------------------------------------------------------------------------------------------

    def begin_wait(self, place: Hashable) -> float:
        """A bubble begins before the receive at ``place``; returns its begin."""
        self._waits[place] = begin = time.monotonic()
        return begin

    def receive(self, channel: Channel, sequence: int, place: Hashable, parked: bool = False) -> Payload:
        """Receives, and remembers for how long the member would have been idle at ``place``.

        Args:
            channel, sequence, parked: see :meth:`~bamboo_ds.comm.channel.Channel.recv`.
            place: names the receive.
        """
        arrival = channel.arrival()
        payload = channel.recv(sequence, parked=parked)
        begin = self._waits.pop(place, None)
        if begin is not None:
            self.idle.observe(place, (arrival if arrival is not None else time.monotonic()) - begin)
        return payload

    def forget(self) -> None:
        """Forgets all waits: the schedule changes."""
        self._waits.clear()
        self.idle.forget()


def on_device(payload: Payload | Staged) -> Payload:
    """A payload that this member has sent, or would send, as it computes with it."""
    return payload.payload() if isinstance(payload, Staged) else payload


def as_leaves(payload: Payload) -> Any:
    """Received activations as autograd leaves: floating-point tensors collect gradients."""
    if payload is None:
        raise ProtocolError("a message of activations carries no tensor")
    if torch.is_tensor(payload):
        return bare(payload).requires_grad_(bare(payload).is_floating_point())
    return tuple(bare(t).requires_grad_(bare(t).is_floating_point()) for t in payload)
