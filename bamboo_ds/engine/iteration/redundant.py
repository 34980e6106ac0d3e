"""Work of members in the bubbles of the pipeline: batches to draw; pending steps and redundant passes of replicas."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from ...comm.channel import Channel
from ...comm.wire.payloads import Payload, Staged
from ...observe.spans import Kind
from ...topology import Role
from ..context.channels import Channels, Stream, assists
from ..context.shared import InContext
from ..data.supply import BatchSupply
from ..stage.runtime import StageRuntime
from .boundaries import Boundaries, as_leaves, on_device
from .exactness import ExactChecks
from .measures import DRAWING, Measures
from .passes import Passes
from .recomputing import counting_saved_bytes, default_budget, release_cache
from .sums import PartialSums

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class RedundantPasses(InContext):
    """Does what there is to do while the member would be idle.

    Batches that its own passes need come first, then steps of the iteration before. Redundant passes run as long as
    there is memory for what they keep.
    """

    supply: BatchSupply
    passes: Passes
    boundaries: Boundaries
    checks: ExactChecks
    measures: Measures
    sums: PartialSums
    #: Bytes that redundant forwards may keep; ``None``: any number.
    _budget: float | None = field(default=None, init=False)
    _exhausted: bool = field(default=False, init=False)
    _lacks: bool = field(default=False, init=False)

    def end_iteration(self) -> None:
        """The iteration is over: the memory that it lacked may be there in the next one."""
        self._exhausted = False

    def fill_bubble(self, channels: Channels, awaits: str, buffer_id: int | None, role: Role | None) -> None:
        """Does what there is until the message that the next instruction receives is there or expected.

        Args:
            channels: that this receives on.
            awaits: ``activation``, ``grad`` or ``replica``.
            buffer_id: its micro-batch.
            role: whose reduced gradients are awaited.
        """
        current = self.binding.current.role
        place: Hashable
        if awaits == "replica":
            assert role is not None
            channel, place = channels.replica(role, self.epoch.member), (role, awaits, None)
            replica = self.binding.runtimes.get(role)
            if replica is not None and replica.pending is not None:
                self.run(replica, "step")  # the next one follows
        else:
            coming = self.boundaries.incoming(channels, awaits)
            assert coming is not None and buffer_id is not None
            channel, place = coming, self.boundaries.place(awaits, buffer_id)
        self._await_device(channel)
        begin = self.boundaries.begin_wait(place)
        while not channel.ready():
            if self._draw(place, begin):
                continue
            work = self._next()
            if work is None:
                return
            replica, kind = work
            duration = self.measures.idle.duration((replica.role, kind), fallback=(current, kind))
            if not self.measures.idle.fits(place, time.monotonic() - begin, duration):
                return
            self.run(replica, kind)
            self._await_device(channel)

    def _await_device(self, channel: Channel) -> None:
        """A bubble begins when the device is through with what it was told to do, unless the message is there."""
        busy = self.measures.idle.busy_until()
        if busy is not None:
            channel.await_message(busy)

    def _draw(self, place: Hashable, begin: float) -> bool:
        """Draws a batch if there is one to be drawn later, and time for it; returns whether it has."""
        batches, idle = self.supply.lacking(self.ds.micro_batches), self.measures.idle
        if batches is None or not idle.fits(place, time.monotonic() - begin, idle.duration(DRAWING)):
            return False
        begin = time.perf_counter()
        batches.draw_next()
        idle.record(DRAWING, time.perf_counter() - begin)
        return True

    def _next(self) -> tuple[StageRuntime, str] | None:
        """The next pending step or redundant pass that could run now without waiting for another member."""
        for replica in self.binding.replicas():
            if replica.pending is not None:
                return replica, "step"
        plan = self.epoch.plan
        waits = self._exhausted or self.checks.rests or self.epoch.member in plan.parked
        if not self.mode.eager_forward or waits:
            return None
        for replica in self.binding.replicas():
            role = replica.role
            if replica.parked or replica.results.reduced is not None or replica.share.helps or replica.share.divided:
                continue
            if not (self.epoch.shadows(role) and assists(plan, role)):
                continue
            if not (self.checks.on or self._follows(replica)):  # a check is to compare all passes
                return None
            done, last = replica.share.part, role.stage == self.ds.num_stages - 1
            m = done.backwards
            if self.mode.eager_backward and not self.progress.operation.resumed and m < done.forwards:
                channel = self.epoch.channels.get((Stream.SHADOW_GRADIENT, role))
                # Gradients below are of passes that sums have made needless, and may come later than those.
                if last or (channel is not None and channel.discard(m)):
                    return replica, "backward"
            m = done.forwards
            if m >= self.ds.micro_batches or self._over_budget(replica):
                continue
            if role.stage > 0 and m not in self._inputs(role):
                continue
            batches = self.supply[role.pipeline]
            if role.stage == 0 and not batches.ready(m, "inputs"):
                continue
            if last and not batches.ready(m, "labels"):
                continue
            return replica, "forward"
        return None

    def _follows(self, replica: StageRuntime) -> bool:
        """Goes on from sums that have arrived; returns whether there was memory for that."""
        reason, dropped = "", replica.share.part.forwards
        try:
            self.sums.follow(replica)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        if reason:
            self._exhaust(replica, "gradients' sums", dropped, reason)
        return not reason

    def _inputs(self, role: Role) -> dict[int, Payload | Staged]:
        """Outputs of the stage before ``role``, by micro-batch, as far as this member has computed them."""
        return self.binding.runtimes[self.epoch.plan.world.predecessor(role)].share.parts[-1].activations

    def _over_budget(self, replica: StageRuntime) -> bool:
        parts = [replica.share.part for replica in self.binding.replicas()]
        if not any(part.forwards > part.since for part in parts):  # the first one of this iteration, or beyond sums
            setting = self.settings.redundancy.memory_budget_mb
            self._budget = default_budget(self.ds.device, self.epoch.sharing) if setting is None else setting * 2**20
            self._tell_lack(replica)
        return self._budget is not None and sum(replica.share.part.saved.values()) >= self._budget

    def _tell_lack(self, replica: StageRuntime) -> None:
        """Says once that nothing is free for redundant passes: the job goes on as if redundancy were lazy."""
        lacks, before = self._budget == 0, self._lacks
        self._lacks = lacks
        if lacks and not before:
            role, reason = replica.role, f"nothing is free of the memory of {self.ds.device}"
            logger.warning("role %s: no redundant passes, as with redundancy.mode lazy-frc-lazy-brc: %s", role, reason)
            self._tell_exhausted(role, 0, reason)

    def run(self, replica: StageRuntime, kind: str) -> None:
        """Takes a pending step, or runs a redundant pass.

        If a pass exhausts the device's memory there are none any more in this iteration.
        """
        if kind == "step":
            with self.recording.span(Kind.STEP_REPLICA, replica.role):
                replica.catch_up()
            return
        before, forward = self.binding.current, kind == "forward"
        m = replica.share.part.forwards if forward else replica.share.part.backwards
        span_kind = Kind.REDUNDANT_FORWARD if forward else Kind.REDUNDANT_BACKWARD
        reason, dropped = "", 0
        try:
            with self.recording.span(span_kind, replica.role, m):
                self._run(replica, kind)
        except torch.OutOfMemoryError as error:
            dropped, reason = replica.share.part.forwards, str(error).splitlines()[0]
        self.passes.use_role(before.role, before.share.part.begin)
        # Here, where the traceback does not hold the pass's tensors any more.
        if reason:
            self._exhaust(replica, f"a redundant {kind} pass", dropped, reason)

    def _exhaust(self, replica: StageRuntime, what: str, dropped: int, reason: str) -> None:
        """Gives up the redundant passes of this iteration, after ``what`` of ``replica``: they took too much memory."""
        self._exhausted = True
        self.binding.refresh()
        for other in self.binding.replicas():
            if other.results.reduced is None and not other.share.helps:
                other.begin_again()
        self.binding.reload()
        release_cache(self.ds.device)
        logger.warning("role %s: %s exhausted the memory: %s", replica.role, what, reason)
        self._tell_exhausted(replica.role, dropped, reason)

    def _tell_exhausted(self, role: Role, dropped: int, reason: str) -> None:
        self.job.channel.event(
            "redundancy_exhausted",
            epoch=self.epoch.plan.epoch,
            step=self.progress.steps,
            role=[role.pipeline, role.stage],
            dropped=dropped,
            reason=reason,
        )

    def _run(self, replica: StageRuntime, kind: str) -> None:
        role = replica.role
        if kind == "backward":
            m = replica.share.part.backwards
            self.passes.use_role(role)
            if not self.ds.is_last_stage():
                self.ds.grad_layer = self.epoch.channels[Stream.SHADOW_GRADIENT, role].recv(m)
            self.passes.backward(m)
            return
        m = replica.share.part.forwards
        source = on_device(self._inputs(role)[m]) if role.stage > 0 else None
        self.passes.use_role(role)
        if role.stage > 0:
            self.ds.pipe_buffers["inputs"][m] = as_leaves(source)
        if role.stage in (0, self.ds.num_stages - 1):
            self.passes.load(m)
        if self._budget is None:
            self.passes.forward(m)
        else:
            with counting_saved_bytes(replica, m):
                self.passes.forward(m)
