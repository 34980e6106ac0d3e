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

from ...comm.transport import Payload
from ...schedule import RoleProgress, hosts, not_begun
from ...topology import Role
from ..context.lanes import Stream
from ..context.shared import InContext
from ..data.batches import as_message, from_message
from ..stage.blocks import CutSearch
from ..stage.layers import copied, merged
from ..stage.runtime import PartSums
from .boundaries import Boundaries
from .reduction import Reduction


@dataclass(eq=False)
class Division(InContext):
    """Divides the passes of roles between owners and shadows."""

    boundaries: Boundaries
    reduction: Reduction

    def begin(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        """An iteration begins, or goes on from ``progress``: find out which parts are computed here."""
        plan, member = self.epoch.plan, self.epoch.member
        if progress is None:
            progress = {role: not_begun(plan.lending(role)) for role in plan.world.roles}
        members = self.boundaries.hosts = hosts(plan, progress)
        self.binding.refresh()
        for role, runtime in self.binding.runtimes.items():
            parts, computers = progress[role].parts, members[plan.world.rank(role)]
            ends = [*(part.begin for part in parts[1:]), runtime.blocks]
            mine = [(part, end) for part, end, each in zip(parts, ends, computers, strict=True) if each == member]
            runtime.helps = bool(mine) and not runtime.owned
            runtime.received_part = None
            if not mine:
                if runtime.divided:  # of a division that is over
                    runtime.begin_again()
                    runtime.divide([(0, runtime.blocks)])
                continue
            if not runtime.begun:
                looks = runtime.owned and runtime.cuts is None and len(parts) == 1 and not runtime.stage.whole
                looks = looks and not runtime.layers.generators  # backward passes may draw from them
                runtime.search = CutSearch(runtime.stage) if looks else None
            known = {part.begin: part for part, _ in mine}
            stale = [part for part in runtime.parts if part.begun and known.get(part.begin) != part.progress()]
            if stale and not progress[role].reduced:
                runtime.begin_again()
            runtime.divide([(part.begin, end) for part, end in mine])
        self.binding.reload()

    def note_cuts(self) -> bool:
        """An iteration is over: note where stages may be divided; whether that was found out of any."""
        found = False
        for runtime in self.binding.owned():
            if runtime.search is not None:
                runtime.cuts, runtime.search = runtime.search.found(), None
                found |= runtime.cuts is not None
        return found

    # -- what scripts have changed ------------------------------------------------------------------------

    def send_changes(self) -> None:
        """Send what the script has changed of the bound role before this iteration."""
        runtime = self.binding.current
        told: Payload = ()
        if runtime is self.binding.local and (self.progress.changed or runtime.trained):
            layers = runtime.layers.capture(self.progress.changed)
            if runtime.first_layers is not None:  # passes that are done have changed them
                kept = {
                    name: runtime.first_layers[name] for name in ("buffers", "extra", "numbers", "tensors", "whole")
                }
                layers = {**layers, **kept}
            told = as_message(copied({"layers": layers, "trains": runtime.trains()}))
        lane = self.epoch.lanes[Stream.CHANGES, runtime.role]
        self.epoch.transport.send(lane, self.progress.sequence, told)

    def receive_changes(self, role: Role) -> None:
        """Receive the same of ``role``, before any pass of it."""
        lane, runtime = self.epoch.lanes[Stream.CHANGES, role], self.binding.runtimes[role]
        told = self.epoch.transport.recv(lane, self.progress.sequence)
        assert isinstance(told, tuple)
        if told and not runtime.begun:
            tree = from_message(told)
            runtime.layers.restore(tree["layers"])
            runtime.train_only(tree["trains"])

    # -- gradients ----------------------------------------------------------------------------------------

    def send_part(self, role: Role) -> None:
        """Send what this member has computed of ``role``, which it shadows."""
        runtime = self.binding.use(self.binding.runtimes[role])
        (part,) = runtime.parts
        sums, parameters = self.reduction.own_sums(runtime), self._parameters(role)
        gradients = [runtime.optimizer.part(sums, p) for p in parameters]
        used = torch.tensor([runtime.optimizer.used(p) for p in parameters], dtype=torch.bool)
        _, last = runtime.at_ends(part, self.epoch.layout.stages)
        losses = self.reduction.losses() if last else torch.empty(0, dtype=torch.float64)
        consumed = torch.tensor(runtime.checksums(), dtype=torch.int64)
        layers = as_message(runtime.layers.capture())
        payload = (losses, consumed, used, *(gradient.detach() for gradient in gradients), *layers)
        self.epoch.transport.send(self.epoch.lanes[Stream.PART, role], self.progress.sequence, payload)

    def receive_part(self) -> None:
        """Receive the same for the bound role."""
        runtime = self.binding.current
        payload = self.epoch.transport.recv(self.epoch.lanes[Stream.PART, runtime.role], self.progress.sequence)
        assert isinstance(payload, tuple)
        if runtime.reduced is not None:
            return  # it was reduced before a loss
        losses, consumed, used, *rest = payload
        parameters = self._parameters(runtime.role)
        given = zip(parameters, rest, used.tolist(), strict=False)
        gradients = {id(p): gradient for p, gradient, has_any in given if has_any}
        runtime.received_part = PartSums(gradients, losses if losses.numel() else None)
        runtime.consumed.update(enumerate(consumed.tolist()))
        theirs = from_message(tuple(rest[len(parameters) :]))
        changed = self.progress.changed if runtime is self.binding.local else ()
        names = runtime.stage.names(*self._lent(runtime.role))
        runtime.received_layers = merged(runtime.layers.capture(changed), theirs, names)

    def _lent(self, role: Role) -> tuple[int, int]:
        """The blocks that the shadow of ``role`` computes."""
        lent = self.epoch.plan.lending(role)
        assert lent is not None
        return self.epoch.plan.lent_blocks(lent)

    def _parameters(self, role: Role) -> list[torch.nn.Parameter]:
        """The trainable ones of these blocks."""
        runtime = self.binding.runtimes[role]
        known = {id(p) for group in runtime.optimizer.groups() for p in group}
        return [p for p in runtime.stage.parameters(*self._lent(role)) if p.requires_grad and id(p) in known]
