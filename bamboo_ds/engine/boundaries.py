"""What crosses the boundaries of stages: activations, gradients, and what of them is kept for a takeover."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.transport import Lane, Payload
from ..errors import ProtocolError
from ..topology import Role
from .bubbles import IdleTimes
from .deepspeed_adapter import DeepSpeedAdapter
from .lanes import Stream
from .records import CurrentEpoch, Progress
from .runtime import RuntimeBinding


@dataclass(eq=False)
class Boundaries:
    """Sends and receives for the bound role."""

    ds: DeepSpeedAdapter
    binding: RuntimeBinding
    epoch: CurrentEpoch
    progress: Progress
    idle: IdleTimes
    retain: bool
    _waits: dict[Hashable, float] = field(default_factory=dict, init=False)  # begin of each bubble in progress

    # -- activations and gradients ------------------------------------------------------------------------

    def send_activations(self, buffer_id: int) -> None:
        """Send the outputs of a micro-batch to the next stage."""
        payload = self._kept(self.binding.current.activations, buffer_id)
        self._send(Stream.ACTIVATION, self._neighbour(+1), buffer_id, payload)

    def send_grads(self, buffer_id: int) -> None:
        """Send the gradients of a micro-batch's inputs to the previous stage, and to its shadow if that uses them."""
        target = self._neighbour(-1)
        payload = self._kept(self.binding.current.gradients, buffer_id)
        self._send(Stream.GRADIENT, target, buffer_id, payload)
        if (Stream.SHADOW_GRADIENT, target) in self.epoch.lanes.streams and not self.progress.resumed:
            self._send(Stream.SHADOW_GRADIENT, target, buffer_id, payload)

    def resend_activation(self, buffer_id: int) -> None:
        """Send outputs again, to the new owner of the next stage."""
        self._send(Stream.ACTIVATION, self._neighbour(+1), buffer_id, self.binding.current.activations[buffer_id])

    def resend_grad(self, buffer_id: int) -> None:
        """Send gradients again, to the new owner of the previous stage."""
        self._send(Stream.GRADIENT, self._neighbour(-1), buffer_id, self.binding.current.gradients[buffer_id])

    def recv_activations(self, buffer_id: int) -> None:
        """Receive the inputs of a micro-batch."""
        role = self.binding.current.role
        payload = self.receive(self.epoch.lanes[Stream.ACTIVATION, role], buffer_id, (role, "activation", buffer_id))
        self.ds.pipe_buffers["inputs"][buffer_id] = as_leaves(payload)

    def recv_grads(self, buffer_id: int) -> None:
        """Receive the gradients of a micro-batch's outputs."""
        role = self.binding.current.role
        lane = self.epoch.lanes[Stream.GRADIENT, role]
        self.ds.grad_layer = self.receive(lane, buffer_id, (role, "grad", buffer_id))

    def _neighbour(self, step: int) -> Role:
        role = self.binding.current.role
        return Role(role.pipeline, role.stage + step)

    def _kept(self, store: dict[int, Payload], micro_batch: int) -> Payload:
        """What is sent; it stays in ``store`` until commit if a takeover could need it."""
        return store[micro_batch] if self.retain else store.pop(micro_batch)

    def _send(self, stream: Stream, role: Role, micro_batch: int, payload: Payload) -> None:
        self.epoch.transport.send(self.epoch.lanes[stream, role], micro_batch, payload)

    # -- bubbles ------------------------------------------------------------------------------------------

    def begin_wait(self, place: Hashable) -> float:
        """A bubble begins before the receive at ``place``; returns its begin."""
        self._waits[place] = begin = time.monotonic()
        return begin

    def receive(self, lane: Lane, sequence: int, place: Hashable) -> Payload:
        """Receive, and remember for how long the member would have been idle at ``place``."""
        arrival = self.epoch.transport.arrival(lane)
        payload = self.epoch.transport.recv(lane, sequence)
        begin = self._waits.pop(place, None)
        if begin is not None:
            self.idle.observe(place, (arrival if arrival is not None else time.monotonic()) - begin)
        return payload

    def forget(self) -> None:
        """Forget all waits: the schedule changes."""
        self._waits.clear()
        self.idle.forget()


def as_leaves(payload: Payload) -> Any:
    """Received activations as autograd leaves: floating-point tensors collect gradients."""
    if payload is None:
        raise ProtocolError("a message of activations carries no tensor")
    if torch.is_tensor(payload):
        return payload.detach().requires_grad_(payload.is_floating_point())
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in payload)
