"""Weights that a script puts into its stage for evaluations, such as averages that it keeps itself.

Copies of the stage do not have them. As long as each rank has its process an evaluation is right; after a loss the lost
rank's stage would be evaluated with other weights than the rest. So the first such evaluation tells it, and training
does not go on after it (``redundancy.on_mismatch``); one that would be wrong is never computed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ...bare import bare
from ...errors import UnsupportedError
from ...topology import Role
from ..context.shared import InContext
from ..script.changes import without_process
from ..stage.optimizers import PlainOptimizer
from ..stage.runtime import StageRuntime
from ..stage.tracing import sum_of_bits

logger = logging.getLogger("bamboo_ds")

_CURE = (
    "Let the optimizer's step keep such weights in the optimizer's state of each parameter, which every copy of a "
    "stage has (state[p]['ema']), and evaluate so: with bamboo_ds.evaluating_with(engine, 'ema'): "
    "engine.eval_batch(...)"
)


@dataclass(eq=False)
class ExchangedWeights(InContext):
    """Knows whether evaluations use other weights than training has left, and exchanges them where it is asked to."""

    #: Name in the optimizer's state of what evaluations use in the place of parameters.
    name: str | None = field(default=None, init=False)
    _found: str | None = field(default=None, init=False)
    #: Bits of the local stage after the last step, where a loss may leave no replica of it.
    _reference: int | None = field(default=None, init=False)

    def begin_training(self) -> None:
        """An iteration comes next.

        Raises:
            UnsupportedError: an evaluation has used weights that no copy of their stage has.
        """
        self._reference = None
        if self._found is not None and self.settings.redundancy.on_mismatch == "stop":
            raise UnsupportedError(self._found)

    def end_training(self) -> None:
        """An iteration is over."""
        local = self.binding.local
        if local.owned and without_process(self.epoch.plan):
            self._reference = sum_of_bits(local.module.parameters())

    def compare(self) -> None:
        """An evaluation begins: compare weights with those of replicas. Collective.

        Raises:
            UnsupportedError: they differ, and a rank is lost whose stage lacks such weights.
            EpochChanged: a member is lost.
        """
        away = without_process(self.epoch.plan)
        if not self.progress.steps or not (self.mode.replicas or away):
            return
        rank, local = self.epoch.layout.rank, self.binding.local
        replicas = [each for each in self.binding.replicas() if each.verification.valid and not each.stale]
        for replica in replicas:
            replica.catch_up()
        kept = {rank(each.role): sum_of_bits(each.module.parameters()) for each in replicas}
        if self._reference is not None and local.owned:
            kept[rank(local.role)] = self._reference
        used = {rank(each.role): sum_of_bits(each.module.parameters()) for each in self.binding.owned()}
        told = [json.loads(each) for each in self.epoch.transport.exchange(json.dumps([used, kept])).values()]
        all_used = {place: bits for each in told for place, bits in each[0].items()}
        found = {int(p) for each in told for p, bits in each[1].items() if all_used.get(p, bits) != bits}
        if found:
            self._tell(sorted(map(self.epoch.layout.role, found)), away)

    def _tell(self, roles: list[Role], away: list[Role]) -> None:
        stages = ", ".join(f"stage {role.stage} of pipeline {role.pipeline}" for role in roles)
        what = f"the script evaluates with weights that it has put into {stages} since the last iteration"
        if away:
            lost = ", ".join(str(self.epoch.layout.rank(role)) for role in away)
            raise UnsupportedError(
                f"{what}, and no process does so for the stages of ranks {lost}, which are lost: the evaluation would "
                f"be one of a mixture. {_CURE}"
            )
        if self._found is None:
            self._found = (
                f"{what}. No copy of a stage has them, so that no evaluation after a loss would be right. {_CURE}"
            )
            if self.epoch.leads:
                logger.warning("%s", self._found)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In the body the owned stages have what :attr:`name` says in the place of their parameters.

        Raises:
            UnsupportedError: an optimizer has no such state.
        """
        if self.name is None:
            yield
            return
        pairs = [pair for runtime in self.binding.owned() for pair in _pairs(runtime, self.name)]
        exchange(pairs)
        try:
            yield
        finally:
            exchange(pairs)


def _pairs(runtime: StageRuntime, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if not isinstance(runtime.optimizer, PlainOptimizer):
        raise UnsupportedError(
            "bamboo_ds.evaluating_with needs an optimizer over fp32 parameters, without ZeRO, and that of stage "
            f"{runtime.role.stage} is a {type(runtime.optimizer.wrapper).__name__}"
        )
    return pairs_of(runtime.optimizer.inner, dict(runtime.module.named_parameters()), name)


def pairs_of(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], name: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each trainable parameter with the tensor that the optimizer's state has for it under ``name``.

    Raises:
        UnsupportedError: there is none for a parameter.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for path, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        kept = optimizer.state.get(parameter, {}).get(name)
        if not torch.is_tensor(kept) or kept.shape != parameter.shape:
            raise UnsupportedError(
                f"bamboo_ds.evaluating_with: the state of optimizer {type(optimizer).__name__} has no {name!r} of the "
                f"shape of parameter {path}: let its step keep one for each parameter"
            )
        found.append((parameter, kept))
    return found


def exchange(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Exchange the memory of the two of each pair; nothing is copied, and torch counts no change."""
    for one, other in pairs:
        one.data, other.data = bare(other), bare(one)
