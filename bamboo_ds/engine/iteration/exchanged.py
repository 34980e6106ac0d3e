"""Weights that a script puts into its stage for evaluations, such as averages that it keeps itself.

Copies of the stage do not have them. As long as each rank has its process an evaluation is right; after a loss the lost
rank's stage would be evaluated with other weights than the rest. So the first evaluations, and all of them while a rank
is lost, compare weights with those that training has left, as replicas have them::

    train_batch | exchange | eval_batch: compare, note | exchange back | train_batch: refuse (redundancy.on_mismatch)
                                          a rank is lost: no evaluation

Weights that are still others when training goes on, and that torch has counted, are changes that travel to replicas. A
stage without a replica has what was noted of it after the step, while a rank is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import dropwhile, islice

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


#: So many evaluations after the first step compare weights, and all of them while a rank is lost.
_FIRST = 4
#: What a tensor has to have as the parameter has it that it takes the place of.
_ALIKE = ("shape", "dtype", "device", "layout")


@dataclass(eq=False)
class ExchangedWeights(InContext):
    """Knows whether evaluations use other weights than training has left, and exchanges them where it is asked to."""

    #: Name in the optimizer's state of what evaluations use in the place of parameters.
    name: str | None = field(default=None, init=False)
    #: Bits of the local stage as training has left it, where the last evaluations have used others.
    _kept: int | None = field(default=None, init=False)
    #: Roles whose weights have differed in evaluations since the last iteration.
    _differing: set[Role] = field(default_factory=set, init=False)
    #: Evaluations are among the first ones yet.
    _first: bool = field(default=True, init=False)
    #: The script has exchanged weights before, and training has gone on.
    _exchanges: bool = field(default=False, init=False)
    #: Bits of the local stage after the last step, where no member has a replica of it and a rank is lost.
    _reference: int | None = field(default=None, init=False)

    def begin_training(self) -> None:
        """An iteration comes next.

        Raises:
            UnsupportedError: evaluations have used weights that no copy of their stage has.
        """
        kept, differing = self._kept, self._differing
        self._reference, self._kept, self._differing = None, None, set()
        if kept is None or (self._bits() != kept and self.progress.script.changed):
            return
        what = f"{_did(differing)}. No copy of a stage has them: no evaluation after a loss would be right. {_CURE}"
        if not self.settings.redundancy.bears:
            raise UnsupportedError(what)
        if not self._exchanges:
            logger.warning("%s", what)
        self._exchanges = True

    def end_training(self) -> None:
        """An iteration is over."""
        local, plan = self.binding.local, self.epoch.plan
        if local.owned and plan.shadow(local.role) is None and without_process(plan):
            self._reference = self._bits()

    def loaded(self) -> None:
        """The script has loaded a checkpoint, in all copies of its stage."""
        self._reference, self._kept, self._differing = None, None, set()

    def _among_the_first(self) -> bool:
        """Whether it is one of the first evaluations after a step, on all members alike."""
        if self._first:
            kinds = (self.history[number].kind for number in range(len(self.history)))
            trained = dropwhile(lambda kind: kind != "train", kinds)
            self._first = len(list(islice((kind for kind in trained if kind == "evaluate"), _FIRST))) < _FIRST
        return self._first

    def _bits(self) -> int:
        return sum_of_bits(self.binding.local.module.parameters())

    def compare(self) -> None:
        """Compares weights, as an evaluation begins, with those that training has left. Collective.

        Raises:
            UnsupportedError: they differ, and a rank is lost whose stage lacks such weights.
            EpochChanged: a member is lost.
        """
        plan, local = self.epoch.plan, self.binding.local
        away = without_process(plan)
        if not self.progress.steps or not (away or (self.mode.replicas and self._among_the_first())):
            return
        rank = self.epoch.layout.rank
        replicas = [each for each in self.binding.replicas() if each.verification.valid and not each.stale]
        for replica in replicas:
            replica.catch_up()
        left = {rank(each.role): sum_of_bits(each.module.parameters()) for each in replicas}
        if self._reference is not None and local.owned:
            left[rank(local.role)] = self._reference
        used = {rank(each.role): sum_of_bits(each.module.parameters()) for each in self.binding.owned()}
        answers = self.epoch.agreement.exchange([used, left]).values()
        uses = {int(place): bits for answer in answers for place, bits in answer[0].items()}
        kept = {int(place): bits for answer in answers for place, bits in answer[1].items()}
        differing = {self.epoch.layout.role(place) for place, bits in kept.items() if uses.get(place, bits) != bits}
        self._differing |= differing
        if local.role in differing and local.owned:
            self._kept = kept[rank(local.role)]
        unknown = [place for place in uses if place not in kept and self.epoch.layout.role(place) not in away]
        if away and (self._differing or (self._exchanges and unknown)):
            lost = ", ".join(str(rank(role)) for role in away)
            raise UnsupportedError(
                f"{_did(self._differing)}, and no process does so for the stages of ranks {lost}, which are lost: the "
                f"evaluation would be one of a mixture. {_CURE}"
            )

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


def _did(roles: Collection[Role]) -> str:
    stages = ", ".join(f"stage {role.stage} of pipeline {role.pipeline}" for role in sorted(roles)) or "its stages"
    return f"the script evaluates with weights that it has put into {stages} since the last iteration"


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
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for path, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        kept = optimizer.state.get(parameter, {}).get(name)
        alike = torch.is_tensor(kept) and all(getattr(kept, each) == getattr(parameter, each) for each in _ALIKE)
        if not alike:
            raise UnsupportedError(
                f"bamboo_ds.evaluating_with: the state of optimizer {type(optimizer).__name__} has no {name!r} of the "
                f"shape, type and device of parameter {path}: let its step keep one for each parameter"
            )
        pairs.append((parameter, kept))
    return pairs


def exchange(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Exchanges the memory of the two of each pair; nothing is copied, and torch counts no change."""
    for one, other in pairs:
        one.data, other.data = bare(other), bare(one)
