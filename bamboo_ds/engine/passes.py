"""The passes of one iteration, executed for whichever role is bound."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as stock

from .. import schedule
from ..comm.transport import Lane, Payload
from ..errors import ProtocolError
from ..topology import Role
from .accounts import payload_checksum
from .data import PARTS, as_payload
from .lanes import Stream, assists
from .recomputing import begin_forward, counting_saved_bytes, default_budget, release_cache
from .rng import Drawing, drawing_seed, keyed_attributes, keyed_generators, seeded_layers
from .runtime import StageRuntime
from .tied import TyingExecutor

logger = logging.getLogger("bamboo_ds")

#: A worker hangs when an instruction takes so many times as long as the longest so far, and at least so many seconds.
HANG_FACTOR = 10.0
HANG_AT_LEAST_S = 300.0


def detached(value: Any) -> Payload:
    """A tensor or a tuple of tensors without its graph."""
    return value.detach() if torch.is_tensor(value) else tuple(t.detach() for t in value)


def as_leaves(payload: Payload) -> Any:
    """Received activations as autograd leaves: floating-point tensors collect gradients."""
    if payload is None:
        raise ProtocolError("a message of activations carries no tensor")
    if torch.is_tensor(payload):
        return payload.detach().requires_grad_(payload.is_floating_point())
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in payload)


class PassExecutor(TyingExecutor):
    """DeepSpeed's pipeline engine with our transport, retention, redundant passes, replication and commit.

    DeepSpeed's own methods do all the computing. What differs is where tensors come from and go to.
    """

    def _beat(self) -> None:
        """An instruction is done: note how long the longest took."""
        now = time.monotonic()
        activity = self._job.channel.activity
        activity.beats += 1
        if activity.busy:
            self._longest_beat = max(self._longest_beat, now - self._last_beat)
        if self._committed_steps:  # the first iteration compiles, allocates, reads
            activity.hang_after_s = max(HANG_AT_LEAST_S, HANG_FACTOR * self._longest_beat)
        self._last_beat = now

    # -- roles and batches ----------------------------------------------------------------------------

    def _exec_use_role(self, role: Role) -> None:
        self._binding.use(self._binding.runtimes[role])

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        self._loading = buffer_id
        super()._exec_load_micro_batch(buffer_id)

    def _next_batch(self) -> Any:
        batches = self._batches[self._binding.current.role.pipeline]
        batch = self._processed(batches.batch(self._loading, self.is_first_stage(), self.is_last_stage()))
        if self._accounts.on and not self._evaluating:
            last = self.is_last_stage()
            self._binding.current.consumed[self._loading] = payload_checksum(as_payload(PARTS[last], batch[last]))
        return batch

    # -- forward and backward ---------------------------------------------------------------------------

    @contextmanager
    def _keyed(self, drawing: Drawing, runtime: StageRuntime, micro_batch: int = 0) -> Iterator[None]:
        """In the body random numbers are those of the role of ``runtime``, equal on its owner and its shadow.

        All slices draw the same. Copies of the model draw different numbers in their passes; in a step they draw the
        same ones, if they all update the same parameters. In backward passes only torch's generators are keyed, and
        those that layers have themselves.
        """
        layout, role = self._layout, runtime.role
        same = drawing is Drawing.STEP and not layout.sharded
        everywhere = Role(0 if same else layout.copy_of(role), role.stage)
        # Several evaluations may follow a step.
        step = len(self._history) if drawing is Drawing.EVALUATION else self.global_steps
        seed = drawing_seed(drawing, self._seed, step, everywhere, micro_batch)
        others = drawing is not Drawing.BACKWARD
        with keyed_generators(seed, self.device, layout.slice_of(role), others):
            if not runtime.layers.generators:
                yield
                return
            with keyed_attributes(runtime.layers.generators, seed):
                yield

    def _exec_forward_pass(self, buffer_id: int) -> None:
        runtime = self._binding.current
        if self._evaluating:
            with (
                self._among_slices(),
                self._keyed(Drawing.EVALUATION, runtime, buffer_id),
                seeded_layers(self.module, self._consumed + buffer_id),
            ):
                super()._exec_forward_pass(buffer_id)
            return
        if buffer_id != runtime.forwards:
            raise ProtocolError(f"forward {buffer_id} of role {runtime.role} comes after {runtime.forwards} forwards")
        begin = time.perf_counter()
        begin_forward()
        self._note_layers(runtime)
        with (
            self._in_pass(keeps=any((runtime.first_layers or {}).values())),
            self._keyed(Drawing.FORWARD, runtime, buffer_id),
            seeded_layers(self.module, self._consumed + buffer_id),
            nullcontext() if self._exact is None else self._exact.watching(runtime, buffer_id),
        ):
            super()._exec_forward_pass(buffer_id)
        if self.is_last_stage():
            # Redundant forwards run ahead of their backwards, so each micro-batch keeps its own loss.
            runtime.micro_losses[buffer_id] = self.loss
        else:
            runtime.activations[buffer_id] = detached(self.pipe_buffers["outputs"][buffer_id])
        runtime.forwards += 1
        self._idle.record((runtime.role, "forward"), time.perf_counter() - begin)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        runtime = self._binding.current
        if buffer_id != runtime.backwards:
            raise ProtocolError(
                f"backward {buffer_id} of role {runtime.role} comes after {runtime.backwards} backwards"
            )
        begin = time.perf_counter()
        if self.is_last_stage():
            self.loss = runtime.micro_losses.pop(buffer_id)
        with (
            self._in_pass(keeps=True),
            self._keyed(Drawing.BACKWARD, runtime, buffer_id),
            seeded_layers(self.module),
        ):
            super()._exec_backward_pass(buffer_id)
        if self.is_last_stage():
            self.loss = self.loss.detach()
        # DeepSpeed frees the outputs of inner stages only.
        self.pipe_buffers["outputs"][buffer_id] = None
        inputs, self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id], None
        if not self.is_first_stage():
            runtime.gradients[buffer_id] = self._input_gradients(inputs)
        runtime.backwards += 1
        runtime.saved.pop(buffer_id, None)
        self._idle.record((runtime.role, "backward"), time.perf_counter() - begin)

    @staticmethod
    def _input_gradients(inputs: Any) -> Payload:
        tensors = (inputs,) if torch.is_tensor(inputs) else inputs
        floating = [t for t in tensors if t.is_floating_point()]
        gradients = tuple(t.grad for t in floating if t.grad is not None)
        if len(gradients) < len(floating):
            raise RuntimeError(
                "a stage's floating-point input has no gradient after the backward pass: every floating-point tensor "
                "that a stage returns must be used by the next one"
            )
        return gradients[0] if torch.is_tensor(inputs) else gradients

    # -- sends and receives -----------------------------------------------------------------------------

    def _neighbour(self, step: int) -> Role:
        role = self._binding.current.role
        return Role(role.pipeline, role.stage + step)

    def _keep(self, store: dict[int, Payload], micro_batch: int) -> Payload:
        """What is sent; it stays in ``store`` until commit if a takeover could need it."""
        return store[micro_batch] if self._retain else store.pop(micro_batch)

    def _exec_send_activations(self, buffer_id: int) -> None:
        payload = self._keep(self._binding.current.activations, buffer_id)
        self._transport.send(self._lanes[Stream.ACTIVATION, self._neighbour(+1)], buffer_id, payload)

    def _exec_send_grads(self, buffer_id: int) -> None:
        target = self._neighbour(-1)
        payload = self._keep(self._binding.current.gradients, buffer_id)
        self._transport.send(self._lanes[Stream.GRADIENT, target], buffer_id, payload)
        shadow = self._lanes.get((Stream.SHADOW_GRADIENT, target))
        if shadow is not None and not self._interrupted:
            self._transport.send(shadow, buffer_id, payload)

    def _exec_resend_activation(self, buffer_id: int) -> None:
        payload = self._binding.current.activations[buffer_id]
        self._transport.send(self._lanes[Stream.ACTIVATION, self._neighbour(+1)], buffer_id, payload)

    def _exec_resend_grad(self, buffer_id: int) -> None:
        payload = self._binding.current.gradients[buffer_id]
        self._transport.send(self._lanes[Stream.GRADIENT, self._neighbour(-1)], buffer_id, payload)

    def _receive(self, lane: Lane, sequence: int, place: tuple[Any, ...]) -> Payload:
        """Receive, and remember for how long the member would have been idle at this place."""
        arrival = self._transport.arrival(lane)
        payload = self._transport.recv(lane, sequence)
        begin = self._bubble_begin.pop(place, None)
        if begin is not None:
            self._idle.observe(place, (arrival if arrival is not None else time.monotonic()) - begin)
        return payload

    def _exec_recv_activations(self, buffer_id: int) -> None:
        role = self._binding.current.role
        payload = self._receive(self._lanes[Stream.ACTIVATION, role], buffer_id, (role, "activation", buffer_id))
        self.pipe_buffers["inputs"][buffer_id] = as_leaves(payload)

    def _exec_recv_grads(self, buffer_id: int) -> None:
        role = self._binding.current.role
        self.grad_layer = self._receive(self._lanes[Stream.GRADIENT, role], buffer_id, (role, "grad", buffer_id))

    # -- redundant passes -------------------------------------------------------------------------------

    def _exec_fill_bubble(self, awaits: str, buffer_id: int | None, role: Role | None) -> None:
        current = self._binding.current.role
        place: tuple[Any, ...]
        if awaits == "replica":
            assert role is not None
            lane, place = self._lanes.replica(role, self._job.session.member), (role, awaits, None)
        else:
            stream = Stream.ACTIVATION if awaits == "activation" else Stream.GRADIENT
            lane, place = self._lanes[stream, current], (current, awaits, buffer_id)
        begin = self._bubble_begin[place] = time.monotonic()
        while not self._transport.ready(lane):
            work = self._redundant_work()
            if work is None:
                return
            replica, kind = work
            duration = self._idle.duration((replica.role, kind), fallback=(current, kind))
            if not self._idle.fits(place, time.monotonic() - begin, duration):
                return
            self._run_redundant(replica, kind)

    def _exec_redundant_forward(self) -> None:
        for _ in range(2 if self._mode.eager_backward else 1):
            work = self._redundant_work()
            if work is not None:
                self._run_redundant(*work)

    def _redundant_work(self) -> tuple[StageRuntime, str] | None:
        """The next redundant pass that could run now without waiting for anybody."""
        if not self._mode.eager_forward or self._exhausted or (self._exact is not None and self._exact.rests):
            return None
        for replica in self._binding.replicas():
            role = replica.role
            assisted = self._plan.shadow(role) == self._job.session.member and assists(self._plan, role)
            if replica.reduced is not None or not assisted:
                continue
            m, last = replica.backwards, role.stage == self.num_stages - 1
            if self._mode.eager_backward and not self._interrupted and m < replica.forwards:
                lane = self._lanes.get((Stream.SHADOW_GRADIENT, role))
                if last or (lane is not None and self._transport.ready(lane)):
                    return replica, "backward"
            m = replica.forwards
            if m >= self.micro_batches or self._over_budget(replica):
                continue
            if role.stage > 0 and m not in self._binding.runtimes[self._plan.world.predecessor(role)].activations:
                continue
            batches = self._batches[role.pipeline]
            if role.stage == 0 and not batches.ready(m, "inputs"):
                continue
            if last and not batches.ready(m, "labels"):
                continue
            return replica, "forward"
        return None

    def _over_budget(self, replica: StageRuntime) -> bool:
        if not any(each.forwards for each in self._binding.replicas()):  # the first one of this iteration
            setting = self._settings.redundancy.memory_budget_mb
            self._budget = default_budget(self.device) if setting is None else setting * 2**20
        return self._budget is not None and sum(replica.saved.values()) >= self._budget

    def _run_redundant(self, replica: StageRuntime, kind: str) -> None:
        """Run a redundant pass. If it exhausts the device's memory there are none any more in this iteration."""
        before = self._binding.current
        try:
            self._run_pass(replica, kind)
        except torch.OutOfMemoryError as error:
            self._exhausted = True
            dropped, reason = replica.forwards, str(error).splitlines()[0]
        self._binding.use(before)
        if not self._exhausted:
            return
        # Here, where the traceback does not hold the pass's tensors any more.
        self._binding.refresh()
        for each in self._binding.replicas():
            if each.reduced is None:
                each.begin_again()
        self._binding.reload()
        release_cache(self.device)
        role = replica.role
        logger.warning("role %s: a redundant %s pass has exhausted the memory: %s", role, kind, reason)
        self._job.channel.event(
            "redundancy_exhausted",
            epoch=self._plan.epoch,
            step=self._committed_steps,
            role=[role.pipeline, role.stage],
            dropped=dropped,
            reason=reason,
        )

    def _run_pass(self, replica: StageRuntime, kind: str) -> None:
        role = replica.role
        if kind == "forward":
            m = replica.forwards
            source = None
            if role.stage > 0:
                source = self._binding.runtimes[self._plan.world.predecessor(role)].activations[m]
            self._binding.use(replica)
            if role.stage > 0:
                self.pipe_buffers["inputs"][m] = as_leaves(source)
            if role.stage in (0, self.num_stages - 1):
                self._exec_load_micro_batch(m)
            if self._budget is None:
                self._exec_forward_pass(m)
            else:
                with counting_saved_bytes(replica, m):
                    self._exec_forward_pass(m)
        else:
            m = replica.backwards
            self._binding.use(replica)
            if not self.is_last_stage():
                self.grad_layer = self._transport.recv(self._lanes[Stream.SHADOW_GRADIENT, role], m)
            self._exec_backward_pass(m)

    _INSTRUCTION_MAP = {
        **TyingExecutor._INSTRUCTION_MAP,
        stock.LoadMicroBatch: _exec_load_micro_batch,
        stock.ForwardPass: _exec_forward_pass,
        stock.BackwardPass: _exec_backward_pass,
        stock.SendActivation: _exec_send_activations,
        stock.RecvActivation: _exec_recv_activations,
        stock.SendGrad: _exec_send_grads,
        stock.RecvGrad: _exec_recv_grads,
        schedule.UseRole: _exec_use_role,
        schedule.FillBubble: _exec_fill_bubble,
        schedule.RedundantForward: _exec_redundant_forward,
        schedule.ResendActivation: _exec_resend_activation,
        schedule.ResendGrad: _exec_resend_grad,
    }
