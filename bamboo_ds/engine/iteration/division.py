"""Divided roles: what an owner and its shadow compute of one stage, and exchange.

The shadow computes some of the first or of the last blocks of a role, where the plan says so
(:class:`~bamboo_ds.topology.Lent`). All else is the owner's as ever: reduction, replication, commit, checkpoints::

    owner    changes --+     passes of its blocks             +-- sums of all blocks --> reduction ...
                       |        |   activations, gradients    |
    shadow             +--->  passes of its blocks   part ----+

Nothing of the role's state moves for that, since both hold all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...schedule import RoleProgress, beginning, beside, finished, hosts
from ...topology import Role
from ..context.channels import Stream
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..stage.blocks import CutSearch
from ..stage.layers import copied, merged
from ..stage.work import PartSums
from .boundaries import Boundaries
from .reduction import Reduction
from .sums import PartialSums


@dataclass(eq=False)
class Division(InContext):
    """Divides the passes of roles between owners and shadows."""

    boundaries: Boundaries
    reduction: Reduction
    sums: PartialSums

    def begin(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        """Finds out which parts are computed here, as an iteration begins or goes on from ``progress``."""
        plan, member = self.epoch.plan, self.epoch.member
        if progress is None:
            progress = beginning(plan)
        members = self.boundaries.hosts = hosts(plan, progress)
        for role, runtime in self.binding.runtimes.items():
            if not runtime.owned and member in members[plan.world.rank(role)]:
                runtime.catch_up()  # before it computes a part of the role
        self.binding.refresh()
        for role, runtime in self.binding.runtimes.items():
            parts, computers = progress[role].parts, members[plan.world.rank(role)]
            mine = [part for part, each in zip(parts, computers, strict=True) if each == member]
            runtime.share.helps = bool(mine) and not runtime.owned
            runtime.share.received = None
            if not mine:
                if runtime.share.divided:  # of a division that is over
                    runtime.begin_again()
                    runtime.share.divide([(0, runtime.blocks)])
                continue
            if not runtime.share.begun:
                looks = runtime.owned and runtime.stage.cuts is None and len(parts) == 1 and not runtime.stage.whole
                looks = looks and not runtime.layers.generators  # backward passes may draw from them
                runtime.stage.search = CutSearch(runtime.stage) if looks else None
            ranges = [part.blocks for part in mine]
            if progress[role].reduced:
                runtime.share.divide(ranges)
                continue
            if any(part.begun and (part.begin, part.end) not in ranges for part in runtime.share.parts):
                runtime.begin_again()
            runtime.share.divide(ranges)
            for part, to in zip(runtime.share.parts, mine, strict=True):
                self.sums.move(runtime, part, to)
        if self.progress.operation.resumed:
            self._use_given(progress)
        self.binding.reload()

    def _use_given(self, progress: Mapping[Role, RoleProgress]) -> None:
        """Uses gradients that had arrived before a loss and that the parts behind do not hold any more."""
        plan, member = self.epoch.plan, self.epoch.member
        done = finished(plan.world, self.ds.micro_batches, progress)
        for rank, role in enumerate(plan.world.roles):
            computed = [index for index, each in enumerate(self.boundaries.hosts[rank]) if each == member]
            for index, part in zip(computed, self.binding.runtimes[role].share.parts if computed else (), strict=True):
                behind = None if progress[role].reduced else beside(plan.world, done, rank, index, +1)
                part.use_given(0 if behind is None else done[behind[0]][behind[1]].since)

    def note_cuts(self) -> bool:
        """Notes after an iteration where stages may be divided; returns whether that was found out of any."""
        found = False
        for runtime in self.binding.owned():
            if runtime.stage.search is not None:
                runtime.stage.cuts, runtime.stage.search = runtime.stage.search.found(), None
                found |= runtime.stage.cuts is not None
        return found

    # -- what scripts have changed ------------------------------------------------------------------------

    def send_changes(self) -> None:
        """Sends what the script has changed of the bound role before this iteration."""
        runtime = self.binding.current
        changes = None
        if runtime is self.binding.local and (self.progress.script.changed or runtime.trained):
            layers = runtime.layers.capture(self.progress.script.changed)
            if runtime.share.first_layers is not None:  # passes that are done have changed them
                first = runtime.share.first_layers
                layers |= {
                    name: first[name] for name in ("buffers", "extra", "extra_on", "numbers", "tensors", "whole")
                }
            changes = copied({"layers": layers, "trains": runtime.trains()})
        channel = self.epoch.channels[Stream.CHANGES, runtime.role]
        channel.send(self.progress.sequence, as_message(changes))

    def receive_changes(self, role: Role) -> None:
        """Receives the same of ``role``, before any pass of it."""
        channel, runtime = self.epoch.channels[Stream.CHANGES, role], self.binding.runtimes[role]
        changes = from_message(channel.recv(self.progress.sequence))
        if changes is not None and not runtime.share.begun:
            runtime.layers.restore(changes["layers"])
            runtime.train_only(changes["trains"])

    # -- gradients ----------------------------------------------------------------------------------------

    def send_part(self, role: Role) -> None:
        """Sends what this member has computed of ``role``, which it shadows."""
        runtime = self.binding.use(self.binding.runtimes[role])
        (part,) = runtime.share.parts
        sums, optimizer = self.reduction.own_sums(runtime), runtime.optimizer
        _, last = runtime.at_ends(part, self.epoch.layout.stages)
        message = {
            "losses": self.reduction.losses() if last else None,
            "consumed": runtime.results.consumed,
            "gradients": [
                optimizer.part(sums, p).detach() if optimizer.used(p) else None for p in self._parameters(role)
            ],
            "layers": runtime.layers.capture(),
        }
        self.epoch.channels[Stream.PART, role].send(self.progress.sequence, as_message(message))

    def receive_part(self) -> None:
        """Receives the same for the bound role."""
        runtime = self.binding.current
        payload = self.epoch.channels[Stream.PART, runtime.role].recv(self.progress.sequence)
        if runtime.results.reduced is not None:
            return  # it was reduced before a loss
        message = from_message(payload)
        given = zip(self._parameters(runtime.role), message["gradients"], strict=True)
        gradients = {id(parameter): gradient for parameter, gradient in given if gradient is not None}
        runtime.share.received = PartSums(gradients, message["losses"])
        runtime.results.consumed.update(message["consumed"])
        changed = self.progress.script.changed if runtime is self.binding.local else ()
        names = runtime.stage.names(*self._lent(runtime.role))
        runtime.results.layers = merged(runtime.layers.capture(changed), message["layers"], names)

    def _lent(self, role: Role) -> tuple[int, int]:
        """The blocks that the shadow of ``role`` computes."""
        lent = self.epoch.plan.lending(role)
        assert lent is not None
        return self.epoch.plan.lent_blocks(lent)

    def _parameters(self, role: Role) -> list[torch.nn.Parameter]:
        """The trainable parameters of these blocks."""
        runtime = self.binding.runtimes[role]
        known = {id(p) for group in runtime.optimizer.groups() for p in group}
        return [p for p in runtime.stage.parameters(*self._lent(role)) if p.requires_grad and id(p) in known]
