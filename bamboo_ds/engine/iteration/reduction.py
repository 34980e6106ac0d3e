"""Reduction of gradients: over the stages that share weights, then over the pipelines."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist

from ...bare import bare
from ..context.shared import InContext
from ..replicas.refusals import check_gradients
from ..stage.runtime import StageRuntime
from ..stage.shares import all_reduce, shares_of
from ..stage.tied import tied_weights


@dataclass(eq=False)
class Reduction(InContext):
    """Reduces the gradients of this member's roles.

    With several pipelines the sums of a role stay untouched until the iteration commits: a member lost during a
    reduction makes the others repeat it from them.
    """

    tied_stages: Collection[int]

    def reduce_tied(self) -> None:
        """Sums the gradients of the pipeline's tied weights into ``runtime.tied`` of this member's roles there."""
        runtime = self.binding.current
        roles = [r for r in self.binding.owned() if r.role.pipeline == runtime.role.pipeline]
        if not self.tied_stages or runtime is not roles[-1]:
            return
        parts: dict[tuple[str, str], list[tuple[StageRuntime, int, torch.Tensor]]] = {}
        for holder in roles:
            self.binding.use(holder)
            places = {id(p): i for i, p in enumerate(holder.trainable())}
            sums = self._sums(holder) if holder.role.stage in self.tied_stages else []
            for key, attribute, weight in tied_weights(self.ds.module):
                place = places.get(id(weight))
                if place is not None:
                    own = holder.optimizer.part(sums, weight)
                    parts.setdefault((key, attribute), []).append((holder, place, own))
        for (key, _), holders in sorted(parts.items(), key=lambda item: item[0]):
            module: Any = holders[0][0].module
            ranks, group = module.tied_comms[key]["ranks"], module.tied_comms[key]["group"]
            places_in_group = [ranks.index(self.epoch.layout.rank(holder.role)) for holder, _, _ in holders]
            shares = shares_of([self.epoch.plan.owners[rank] for rank in ranks], places_in_group)
            total = holders[0][2].clone()
            if shares is None:
                dist.all_reduce(total, group=group)
            else:
                flats = [part.reshape(-1) for _, _, part in holders]
                total.copy_(all_reduce(flats, shares, group).view_as(total))
            for holder, place, _ in holders:
                holder.results.tied[place] = total.clone()

    def reduce(self) -> None:
        """Averages the gradients over the pipelines into ``runtime.reduced`` of all roles of this stage."""
        runtime = self.binding.current
        # A collective counts a member once: roles of one stage are reduced together, with the last of them.
        same = [r for r in self.binding.owned() if r.role.stage == runtime.role.stage]
        if runtime is not same[-1] or all(r.results.reduced is not None for r in same):
            return
        sums = []
        for owned in same:
            self.binding.use(owned)
            check_gradients(owned.module)
            sums.append(self.local_sums(owned))
            if self.ds.is_last_stage():
                received = owned.share.received
                losses = None if received is None else received.losses
                owned.results.loss = self.losses() if losses is None else losses
        # Even one pipeline alone reduces: in another precision the sums are rounded.
        rounds = any(g.dtype != self.ds.communication_data_type for g in sums[0])
        if (self.ds.is_data_parallel or rounds) and self.ds.reduces_gradients:
            plan, siblings = self.epoch.plan, self.epoch.layout.siblings(runtime.role)
            shares = shares_of([plan.owner(role) for role in siblings], [siblings.index(owned.role) for owned in same])
            total = same[-1].optimizer.average(sums, shares)
            sums = [total, *([g.clone() for g in total] for _ in same[1:])]
        # What counts as reduced is replicated and committed: also the passes that it comes from must be whole.
        self.epoch.session.confirm("reducing gradients")
        for owned, reduced in zip(same, sums, strict=True):
            self.binding.use(owned)
            owned.results.measured = owned.optimizer.measure(reduced)
            owned.results.reduced = owned.optimizer.keep(reduced)

    def local_sums(self, runtime: StageRuntime) -> list[torch.Tensor]:
        """The sums that the bound ``runtime`` gives to the reduction over the pipelines."""
        sums = self._sums(runtime)
        tied = runtime.results.tied
        if not tied:
            return sums
        parameters = runtime.trainable()
        found = runtime.optimizer.replaced(sums, {id(parameters[i]): total for i, total in tied.items()})
        tied.clear()
        return found

    def _sums(self, runtime: StageRuntime) -> list[torch.Tensor]:
        """Sums over the micro-batches of the bound ``runtime`` and of its shadow, if that has computed a part of it."""
        sums = self.own_sums(runtime)
        received = runtime.share.received
        return sums if received is None else runtime.optimizer.replaced(sums, received.gradients)

    def own_sums(self, runtime: StageRuntime) -> list[torch.Tensor]:
        """Sums of the bound ``runtime`` alone. What it has not computed is zero, and goes on being nothing."""
        without = [p for p in runtime.trainable() if p.grad is None]
        sums = runtime.optimizer.local()
        for parameter in without:
            parameter.grad = None
        return sums

    def losses(self) -> torch.Tensor:
        """Mean loss and mean additional losses of the bound role's pipeline, as float64."""
        found = [self.ds.total_loss, *(self.ds.total_additional_losses or {}).values()]
        scaled = [self.ds.scaled_by_micro_batches(x) for x in found]
        return torch.stack([bare(x).reshape(()).double().cpu() for x in scaled])
