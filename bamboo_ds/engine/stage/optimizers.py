"""DeepSpeed's optimizers: where gradients add up, what a step needs of them, what belongs to a role's state.

Their ``step()`` runs unmodified, but alone: every collective in it is *answered* from what the commit agreed on (see
:mod:`.answers`). Where the optimizer is partitioned over the pipelines (ZeRO stage 1, and DeepSpeed's bf16 optimizer
with several pipelines), a step brings only the role's own *shard* of the parameters up to date; the members of a stage
exchange their shards after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.utils import (
    get_flattened_grad_norm,
    get_weight_norm,
    is_model_parallel_parameter,
)

from ...bare import bare
from ...compat import forget_backward, loss_scaler
from ...errors import ProtocolError, UnsupportedError
from ...state import Tree
from ...topology import Role
from .answers import Recorder
from .chunks import RestingOptimizer
from .clones import check_sendable, kept_by, load_optimizer, put_kept, without_state_hooks, without_strangers
from .commit import Measured
from .shares import Shares, all_reduce

if TYPE_CHECKING:
    from .deepspeed_adapter import DeepSpeedAdapter
    from .groups import RoleGroups

Tensors = list[torch.Tensor]


class Stage(Protocol):
    """The runtime as its optimizer knows it; see :class:`~.runtime.StageRuntime`."""

    role: Role
    attributes: dict[str, Any]

    @property
    def module(self) -> torch.nn.Module:
        """The stage's module."""

    def trainable(self) -> list[torch.nn.Parameter]:
        """The stage's trainable parameters."""


def buckets(tensors: Tensors) -> Iterator[list[int]]:
    """Lists of those of ``tensors`` that DeepSpeed's engine reduces together."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places: list[int] = []
        elements = 0
        for place, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                continue
            places.append(place)
            elements += bare(tensor).numel()
            if elements > MEMORY_OPT_ALLREDUCE_SIZE:
                yield places
                places, elements = [], 0
        if places:
            yield places


def laid_out(total: torch.Tensor | None, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """A sum as autograd has it: with the strides of the parameter, on which the order of a norm's additions depends."""
    if total is None:
        return None
    if total.stride() == bare(parameter).stride():
        return total.to(parameter.device)
    return torch.empty_like(parameter, dtype=total.dtype, requires_grad=False).copy_(total)


class StageOptimizer(RestingOptimizer, ABC):
    """The optimizer of one runtime. Methods that compute are called while the runtime is bound.

    Args:
        groups: process groups of the roles.

    Attributes:
        wrapper: what DeepSpeed calls ``engine.optimizer``.
        inner: the torch optimizer in it.
        sums: reductions of each norm, along different axes.
        wraps: whether DeepSpeed has put an optimizer of its own around torch's.
    """

    sums = 1
    wraps = True

    @property
    def norms(self) -> int:
        """Norms that a step computes."""
        return 1

    @property
    def skips(self) -> bool:
        """Whether a step is left out when gradients overflow."""
        return True

    def __init__(self, ds: DeepSpeedAdapter, groups: RoleGroups, runtime: Stage) -> None:
        self._ds, self._groups, self._runtime = ds, groups, runtime
        self.wrapper: Any = runtime.attributes["optimizer"]
        self.inner: Any = self.wrapper.optimizer if self.wraps else self.wrapper

    @property
    def _device(self) -> torch.device:
        return self._ds.device

    # -- gradients ----------------------------------------------------------------------------------------

    def local(self) -> Tensors:
        """This role's own sums over the micro-batches. They stay as they are until the step."""
        return self._ds.gradients()

    def part(self, sums: Tensors, parameter: torch.nn.Parameter) -> torch.Tensor:
        """The gradient of ``parameter`` in what :meth:`local` gave, as a view."""
        return sums[self._places()[id(parameter)]]

    def used(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the sums have anything of ``parameter``; where that makes no difference: yes."""
        return True

    def accumulated(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        """Copies of the sums of gradients of ``parameters`` so far; ``None`` if nothing has been added."""
        return [None if p.grad is None else p.grad.detach().clone() for p in parameters]

    def accumulate_on(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor | None]) -> None:
        """Goes on from what :meth:`accumulated` gave elsewhere, which is the optimizer's from now on."""
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = laid_out(total, parameter)

    def replaced(self, sums: Tensors, gradients: Mapping[int, torch.Tensor]) -> Tensors:
        """The sums of :meth:`local` with other ``gradients`` for some parameters, by ``id``; ``sums`` stay."""
        places = self._places()
        found = list(sums)
        for parameter, gradient in gradients.items():
            found[places[parameter]] = gradient
        return found

    def _places(self) -> dict[int, int]:
        """Places of the gradients of parameters in what :meth:`local` gives."""
        return {id(p): i for i, p in enumerate(self._runtime.trainable())}

    def average(self, sums: Sequence[Tensors], shares: Shares | None) -> Tensors:
        """The average over all pipelines of the ``sums`` of this member's roles of the stage, which stay. Collective.

        Args:
            sums: of each of these roles, what :meth:`local` gave.
            shares: of the stage, where a member has several of its roles.
        """
        total = [g.clone() for g in sums[0]]
        if shares is None:
            self._ds.reduce_in_buckets(grads=total, elements_per_buffer=MEMORY_OPT_ALLREDUCE_SIZE)
            return total
        for places in buckets(total):
            flats = [torch.cat([own[i].reshape(-1) for i in places]) for own in sums]
            reduced = self._average_of_shares(flats, shares).split([total[i].numel() for i in places])
            for i, part in zip(places, reduced, strict=True):
                total[i].copy_(part.view_as(total[i]))
        return total

    def _average_of_shares(self, flats: Sequence[torch.Tensor], shares: Shares) -> torch.Tensor:
        """Rounds and scales as DeepSpeed's engine before and after the reduction."""
        before, after = self._ds.scales(shares.count)
        flats = [flat.to(self._ds.communication_data_type) for flat in flats]
        if before != 1.0:
            flats = [flat * before for flat in flats]
        total = all_reduce(flats, shares, self._ds.mpu.get_data_parallel_group())
        return total if after == 1.0 else total.mul_(after)

    @abstractmethod
    def measure(self, reduced: Tensors) -> Measured:
        """Facts for the commit. Without communication; the engine answers collectives by a recorder."""

    def keep(self, reduced: Tensors) -> Tensors:
        """The part of the reduced gradients that this role's step needs, for its owner and its shadow alike."""
        return reduced

    def apply(self, kept: Tensors) -> None:
        """Puts in place what :meth:`keep` gave."""
        for parameter, gradient in zip(self._runtime.trainable(), kept, strict=True):
            parameter.grad = gradient.reshape(parameter.shape)

    def rounding_as_on(self, device: torch.device) -> AbstractContextManager[None]:
        """In the body a step on tensors of the host rounds its own numbers as one on ``device`` would.

        What steps without partitions compute of one number is Python's, or done by operations that all devices round
        alike.
        """
        return nullcontext()

    def clear(self) -> None:
        """Forgets all sums."""
        for parameter in self._runtime.module.parameters():
            parameter.grad = None

    def abandon_pass(self) -> None:
        """A backward pass may have been interrupted, and none will be gone on with: DeepSpeed waits for its hooks."""
        forget_backward(self.wrapper)

    def release(self) -> None:
        """Releases memory: the runtime is none of this member's any more."""
        # Some optimizers hook into the graph, and what hooks refer to no garbage collector finds.
        destroy = getattr(self.wrapper, "destroy", None)
        if callable(destroy):
            # DeepSpeed looks for tensors in the state of each parameter, and finds what else is there.
            state = self.inner.state
            for key in [key for key, value in state.items() if not isinstance(value, dict)]:
                del state[key]
            destroy()

    # -- state --------------------------------------------------------------------------------------------

    def groups(self) -> list[list[torch.nn.Parameter]]:
        """The module's parameters of each parameter group."""
        return [group["params"] for group in self.wrapper.param_groups]

    def capture(self) -> Tree:
        """The state, without the module's parameters."""
        masters = [master.detach() for master in self.masters()]
        with without_state_hooks(self.inner), without_strangers(self.inner):
            inner = self.inner.state_dict()
        check_sendable(self.inner, inner)
        return {"inner": inner, "attributes": kept_by(self.inner), "masters": masters, "scaler": self._scaler()}

    def restore(self, state: Tree) -> None:
        """Takes over what :meth:`capture` gave elsewhere."""
        with without_state_hooks(self.inner):
            load_optimizer(self.inner, state["inner"], self.resting)
        put_kept(self.inner, state["attributes"])
        with torch.no_grad():
            for mine, given in zip(self.masters(), state["masters"], strict=True):
                mine.copy_(given)
        self._restore_scaler(state["scaler"])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Masters, then tensors of the state, in a fixed order, each with what it is."""
        for number, master in enumerate(self.masters()):
            yield f"master {number}", master
        names = {id(p): name for name, p in self._runtime.module.named_parameters()}
        for number, parameter in enumerate(p for group in self.inner.param_groups for p in group["params"]):
            state = self.inner.state.get(parameter, {})
            for name, tensor in _tensors_in(state, ""):
                yield f"state{name} of {names.get(id(parameter), f'master {number}')}", tensor

    def _scaler(self) -> dict[str, Any]:
        """Numbers of the loss scaler."""
        return {}

    def _restore_scaler(self, numbers: dict[str, Any]) -> None:
        """Takes over what :meth:`_scaler` gave elsewhere."""
        assert not numbers

    # -- shards -------------------------------------------------------------------------------------------

    def shard(self, part: int) -> Tensors:
        """Views of the parameters that the step of the stage's role in copy ``part`` of the model brings up to date."""
        return []

    def fill(self, part: int, shard: Tensors) -> None:
        """Takes over :meth:`shard` of the role in copy ``part`` of the model."""
        raise ProtocolError("this optimizer is not partitioned")

    def gather(self) -> None:
        """Takes over the shards of all roles of the stage from their owners. Collective: each owns one of them."""
        raise ProtocolError("this optimizer is not partitioned")


class NoOptimizer(StageOptimizer):
    """Stands for none: the script has given no optimizer (yet) and evaluates only, so nothing is stepped or copied."""

    norms = 0
    skips = False

    def __init__(self, ds: DeepSpeedAdapter, groups: RoleGroups, runtime: Stage) -> None:
        self._ds, self._groups, self._runtime = ds, groups, runtime
        self.wrapper = self.inner = None

    def measure(self, reduced: Tensors) -> Measured:
        raise ProtocolError("an engine without an optimizer does not train")

    def groups(self) -> list[list[torch.nn.Parameter]]:
        return []

    def capture(self) -> Tree:
        return {}

    def restore(self, state: Tree) -> None:
        if state:
            raise ProtocolError(f"role {self._runtime.role} has no optimizer for the state of one")

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def fill(self, part: int, shard: Tensors) -> None:
        assert not shard

    def gather(self) -> None:
        pass


class PlainOptimizer(StageOptimizer):
    """A torch optimizer over fp32 parameters, without a wrapper."""

    wraps = False

    @property
    def skips(self) -> bool:
        return False

    def measure(self, reduced: Tensors) -> Measured:
        """The sum of squares of the gradients that count for clipping, in fp32 as DeepSpeed computes it.

        DeepSpeed counts a parameter on the first rank of the model-parallel group (which in a pipeline is its first
        stage) or where the parameter is marked as model-parallel.
        """
        if not self._ds.gradient_clipping():
            return Measured(False, (0.0,))
        first = self._ds.mpu.get_model_parallel_rank() == 0
        norms = [
            g.detach().float().norm(2.0)
            for p, g in zip(self._runtime.trainable(), reduced, strict=True)
            if first or is_model_parallel_parameter(p)
        ]
        return Measured(False, (float(torch.stack(norms).pow(2.0).sum().float()) if norms else 0.0,))


class HalfOptimizer(StageOptimizer):
    """DeepSpeed's fp16 optimizers without ZeRO: masters in fp32, a loss scale."""

    _SCALER = ("cur_scale", "cur_iter", "last_overflow_iter")
    OWN = ("custom_loss_scaler", "external_loss_scale")

    def measure(self, reduced: Tensors) -> Measured:
        recorder = Recorder()
        gradients = {id(p): g for p, g in zip(self._runtime.trainable(), reduced, strict=True)}
        overflow = any(not torch.isfinite(g).all() for g in reduced)
        with self._groups.acting_for(self._runtime.role, recorder):
            self._norms([[gradients[id(p)] for p in group] for group in self.groups()])
        return Measured(overflow, tuple(recorder.values))

    @abstractmethod
    def _norms(self, gradients: list[Tensors]) -> None:
        """Computes the norms that the step will."""

    def groups(self) -> list[list[torch.nn.Parameter]]:
        return self.wrapper.fp16_groups

    def _scaler(self) -> dict[str, Any]:
        config = loss_scaler(self.wrapper)
        numbers = {name: getattr(config, name) for name in self._SCALER if hasattr(config, name)}
        return {**numbers, **{name: getattr(self.wrapper, name) for name in self.OWN}}

    def _restore_scaler(self, numbers: dict[str, Any]) -> None:
        config = loss_scaler(self.wrapper)
        for name, value in numbers.items():
            setattr(self.wrapper if name in self.OWN else config, name, value)


def check_freezing(optimizer: StageOptimizer) -> None:
    """Refuses what a script freezes, or makes trainable, after its engine was built, where copies cannot follow.

    Raises:
        UnsupportedError: the optimizer is DeepSpeed's for fp16 without ZeRO.
    """
    if isinstance(optimizer, HalfOptimizer):
        raise UnsupportedError(
            "the script has frozen parameters, or made them trainable, after deepspeed.initialize: with fp16 and "
            "without ZeRO do it before"
        )


class UnfusedHalfOptimizer(HalfOptimizer):
    """``FP16_UnfusedOptimizer``: one norm for each parameter group."""

    @property
    def norms(self) -> int:
        return len(self.groups())

    @property
    def _masters(self) -> list[Tensors]:
        masters: list[Tensors] = self.wrapper.fp32_groups
        return masters

    def _norms(self, gradients: list[Tensors]) -> None:
        for group in gradients:
            get_weight_norm(group, mpu=self.wrapper.mpu)


class FusedHalfOptimizer(HalfOptimizer):
    """``FP16_Optimizer``: one norm, of flattened groups."""

    @property
    def _masters(self) -> list[Tensors]:
        return [self.wrapper.fp32_groups_flat]

    def _norms(self, gradients: list[Tensors]) -> None:
        flat = [torch.cat([g.reshape(-1) for g in group]).float() for group in gradients]
        holders = [torch.nn.Parameter(g) for g in flat]
        for holder in holders:
            holder.grad = holder.data
        masks = [self._mask(group, given) for group, given in zip(self.groups(), gradients, strict=True)]
        get_flattened_grad_norm(holders, mpu=self.wrapper.mpu, grad_norm_mask=masks)

    def _mask(self, group: list[torch.nn.Parameter], gradients: Tensors) -> torch.Tensor:
        """DeepSpeed's own mask looks at ``grad``, which is not there yet."""
        before = [p.grad for p in group]
        try:
            for parameter, gradient in zip(group, gradients, strict=True):
                parameter.grad = gradient.reshape(parameter.shape)
            mask: torch.Tensor = self.wrapper._get_norm_mask_idx(group)
        finally:
            for parameter, own in zip(group, before, strict=True):
                parameter.grad = own
        return mask


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and numbers in dictionaries, lists and tuples, each with its path; numbers as tensors."""
    if torch.is_tensor(value):
        yield path, value
    elif isinstance(value, (bool, int, float)):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from _tensors_in(value[name], f"{path} {name}")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _tensors_in(part, f"{path} {number}")
