"""Partial sums: from where in an iteration a role goes on that is taken over (``redundancy.sync_every``).

An owner sends the sums of its gradients every few micro-batches to its shadow, which keeps the newest two, and to
members that copy its state::

    owner     F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 ...
                     |        \\ sums of 2     \\ sums of 4
    shadow           mark of 2

Sums are left folds in the order of micro-batches, so that the heir goes on from micro-batch k with the bits that its
lost owner had. Forward passes run ahead of backward passes: what the layers keep, and the loss, are those after k
forward passes, and *marked* then. From which sums an heir can go on is found by :func:`~bamboo_ds.schedule.settle`.

Of a divided role both members send the sums of their parts to each other. With tensor slices each keeps its own as
well: where one slice is lost, the others have to go back with it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...errors import ProtocolError
from ...schedule import NETWORK_SHARE, PROCESSOR_SHARE, PartProgress, affordable, syncs, ways
from ...state import Tree
from ...topology import Role
from ...topology.memory import NEWEST_SUMS
from ..context.channels import Stream
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..stage.layers import copied, merged
from ..stage.runtime import StageRuntime
from ..stage.work import Part

logger = logging.getLogger("bamboo_ds")

#: Bytes per second of a network that has not been measured.
_ASSUMED_RATE = 1e8

#: A role, and the first block of a part of it, and the one behind the last.
_Place = tuple[Role, int, int]


@dataclass(frozen=True)
class Sums:
    """The state that the computation of a part goes on from.

    Attributes:
        count: micro-batches whose gradients are in the sums.
        gradients: of its parameters, in order, or ``None`` if nothing has been added.
        layers: what the layers keep after so many forward passes.
        losses: sums of losses after these, if the part ends a pipeline.
        consumed: checksums of micro-batches, by number.
    """

    count: int
    gradients: list[torch.Tensor | None]
    layers: Tree
    losses: dict[str, Any]
    consumed: dict[int, int]


@dataclass(eq=False)
class PartialSums(InContext):
    """Sends sums, keeps those of others, and goes on from them. Its methods belong to the main thread.

    Attributes:
        every: this member sends sums after so many micro-batches of the operation under way; 0: never.
    """

    every: int = field(default=0, init=False)
    _held: dict[_Place, dict[int, Sums]] = field(default_factory=lambda: defaultdict(dict), init=False)
    _bytes: dict[Role, int] = field(default_factory=dict, init=False)  # that were sent last
    _taken_s: dict[Role, float] = field(default_factory=dict, init=False)  # by the last time, of the main thread
    _micro_batch_s: float | None = field(default=None, init=False)
    _told: bool = field(default=False, init=False)
    #: Number of an epoch in which there was no memory for them.
    _full: int | None = field(default=None, init=False)

    # -- when -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An iteration begins, or goes on."""
        setting = self.settings.redundancy.sync_every
        if not self.mode.replicas or self._full == self.epoch.plan.epoch:
            self.every = 0
        else:
            self.every = self._affordable() if setting == "auto" else setting

    def _affordable(self) -> int:
        if self._micro_batch_s is None:
            return 0
        seconds = 0.0
        for runtime in self.binding.owned():
            size = self._bytes.get(runtime.role) or sum(parameter.nbytes for parameter in runtime.trainable())
            for channel in self.epoch.channels.of(Stream.SUMS, runtime.role):
                if channel.source == self.epoch.member:
                    seconds += size / (channel.rate or _ASSUMED_RATE)
        share = PROCESSOR_SHARE if self.ds.device.type == "cpu" else NETWORK_SHARE
        # Their receiver takes as long for them as the main thread here, which passes wait for.
        taken = 2 * sum(self._taken_s.values())
        counts = self.ds.micro_batches, self._micro_batch_s
        every = affordable(seconds, *counts, share), affordable(taken, *counts, PROCESSOR_SHARE)
        if all(every):
            return max(every)
        self._tell_lack(seconds, taken)
        return 0

    def _tell_lack(self, seconds: float, taken: float) -> None:
        """Says once that sums cost too much."""
        assert self._micro_batch_s is not None
        if not self._told:
            logger.info(
                "redundancy.sync_every auto: no sums are sent in the middle of iterations of %.3g s, since they take "
                "%.3g s of the network and %.3g s of passes; a loss redoes what its stage has computed of an iteration",
                self._micro_batch_s * self.ds.micro_batches,
                seconds,
                taken,
            )
        self._told = True

    def end_iteration(self, seconds: float) -> None:
        """An iteration is over, after ``seconds``: what is held of it is void."""
        self._micro_batch_s = seconds / self.ds.micro_batches
        self._held.clear()
        for stream, _, channel in self.epoch.channels:
            if stream is Stream.SUMS and channel.destination == self.epoch.member:
                channel.discard(self.progress.sequence + 1)

    # -- sending ----------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """Notes, after a forward pass of the bound role, what the sums of as many micro-batches go with."""
        runtime = self.binding.current
        part = runtime.share.part
        wanted = (runtime.owned or runtime.share.helps) and syncs(self.epoch.plan, runtime.role)
        if not (self.every and wanted) or part.forwards % self.every or part.forwards == self.ds.micro_batches:
            return
        _, last = runtime.at_ends(part, self.layout.stages)
        losses = {"total": self.ds.total_loss, "more": dict(self.ds.total_additional_losses or {})} if last else {}
        part.marks[part.forwards] = copied({"layers": runtime.layers.capture(whole=True), "losses": losses})

    def send(self, buffer_id: int) -> None:
        """Sends the sums of the bound role's part, after the backward pass of micro-batch ``buffer_id``."""
        runtime, count = self.binding.current, buffer_id + 1
        part = runtime.share.part
        mark = part.marks.pop(count, None)
        if mark is None:  # it has gone on from other sums meanwhile
            return
        sent = self.epoch.channels.of(Stream.SUMS, runtime.role)
        channels = [channel for channel in sent if channel.source == self.epoch.member]
        if any(channel.leaving() >= NEWEST_SUMS for channel in channels):
            return  # passes come first on the network, which is slower than it was
        begin = time.perf_counter()
        self.epoch.session.confirm("sending sums of gradients")  # also passes that run behind the host must be whole
        gradients = self._copied(runtime, part)
        if gradients is None:
            return
        consumed = {
            m: checksum for m, checksum in runtime.results.consumed.items() if m % self.ds.micro_batches < count
        }
        sums = Sums(count, gradients, mark["layers"], mark["losses"], consumed)
        if self.layout.slices > 1:
            self._hold((runtime.role, part.begin, part.end), sums)
        self._bytes[runtime.role] = sum(total.nbytes for total in gradients if total is not None)
        message = as_message({"begin": part.begin, "end": part.end, **vars(sums)})
        for channel in channels:
            channel.send(self.progress.sequence, message)
        self._taken_s[runtime.role] = time.perf_counter() - begin

    def _copied(self, runtime: StageRuntime, part: Part) -> list[torch.Tensor | None] | None:
        """Copies of a part's gradients; ``None`` without room for them: none are sent under this plan."""
        reason = ""
        try:
            return runtime.optimizer.accumulated(self._parameters(runtime, part))
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
        self.every, self._full = 0, self.epoch.plan.epoch
        logger.warning("role %s: no sums of gradients are sent, whose copies have no room: %s", runtime.role, reason)
        return None

    # -- keeping ----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Takes what has arrived of the operation under way; also after the epoch has ended, before the next one."""
        for stream, role, channel in self.epoch.channels:
            if stream is not Stream.SUMS or channel.destination != self.epoch.member:
                continue
            runtime = self.binding.runtimes.get(role)
            for sequence, payload in channel.take(runtime is None or runtime.parked):
                if sequence == self.progress.sequence:
                    fields = from_message(payload)
                    place = role, fields.pop("begin"), fields.pop("end")
                    self._hold(place, Sums(**fields))

    def _hold(self, place: _Place, sums: Sums) -> None:
        held = self._held[place]
        held[sums.count] = sums
        for count in sorted(held)[:-NEWEST_SUMS]:
            del held[count]

    def held(self) -> list[tuple[Role, int, int, tuple[int, ...]]]:
        """The sums that are here, by part: role, first block, the one behind its last, numbers of micro-batches."""
        return [(*place, tuple(sorted(sums))) for place, sums in self._held.items() if sums]

    # -- going on ---------------------------------------------------------------------------------------------

    def move(self, runtime: StageRuntime, part: Part, to: PartProgress) -> None:
        """Makes ``part`` of ``runtime`` as it was, or would be, at ``to``. Attributes of what is bound are up to date.

        Raises:
            ProtocolError: there are no sums for that.
            torch.OutOfMemoryError: the device has no room for them; here they stay.
        """
        if to == part.progress() and not runtime.share.partial_pass:
            return
        share, parameters = runtime.share, self._parameters(runtime, part)
        if to.backwards:
            sums = self._held[runtime.role, part.begin, part.end].get(to.backwards)
            if sums is None:
                raise ProtocolError(f"role {runtime.role} is to go on from {to}, and no sums of these are here")
        elif to.forwards:
            raise ProtocolError(f"role {runtime.role} is to go on from {to}, and has done {part.progress()}")
        else:
            assert share.first_layers is not None or not share.begun
            first = share.first_layers or {}
            sums = Sums(0, [None] * len(parameters), first, {"total": None, "more": None}, {})
        if share.first_layers is None:
            share.first_layers = runtime.layers.undo()
        if to.forwards == to.backwards:
            self._put_back(runtime, part, sums)
        runtime.optimizer.accumulate_on(parameters, sums.gradients)
        self._held[runtime.role, part.begin, part.end].pop(to.backwards, None)  # they are the optimizer's now
        runtime.optimizer.abandon_pass()
        runtime.results.consumed.update(sums.consumed)
        part.forget(to)
        share.partial_pass = False

    def _put_back(self, runtime: StageRuntime, part: Part, sums: Sums) -> None:
        """No forward pass beyond ``sums`` counts: layers keep, and losses are, what they were after those."""
        if sums.layers:
            layers, whole = sums.layers, (part.begin, part.end) == (0, runtime.blocks)
            if not whole:
                names = runtime.stage.names(part.begin, part.end)
                layers = merged(runtime.layers.capture(whole=True), layers, names)
                # What others have is written to by a copy of itself, too: graphs that go on being used would find that.
                buffers = layers["buffers"]
                layers["buffers"] = {name: buffers[name] for name in buffers if name.rpartition(".")[0] in names}
            runtime.layers.restore(layers)
        if runtime.at_ends(part, self.layout.stages)[1]:
            total, more = tree_map_only(
                torch.Tensor, lambda each: each.to(self.ds.device), (sums.losses["total"], sums.losses["more"])
            )
            runtime.attributes.update(total_loss=total, total_additional_losses=more)

    def follow(self, replica: StageRuntime) -> None:
        """Has a replica that computes redundantly leave out the passes that sums which have arrived make needless."""
        channels = self.epoch.channels.of(Stream.SUMS, replica.role)
        if not any(channel.ready() for channel in channels if channel.destination == self.epoch.member):
            return
        self.collect()
        part = replica.share.part
        counts = tuple(self._held.get((replica.role, part.begin, part.end), ()))
        self.binding.refresh()
        self.move(replica, part, ways(replace(part.progress(), sums=counts))[0])
        self.binding.reload()

    def _parameters(self, runtime: StageRuntime, part: Part) -> list[torch.nn.Parameter]:
        """The parameters of a part, in an order that all copies of the stage have.

        Also those that are not trained: a replica that computes redundantly does not know yet what was just frozen.
        """
        if (part.begin, part.end) == (0, runtime.blocks):
            return list(runtime.module.parameters())
        return list(runtime.stage.parameters(part.begin, part.end))
