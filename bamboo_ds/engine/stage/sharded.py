"""Optimizers that are partitioned over the pipelines: DeepSpeed's bf16 optimizer and ZeRO stage 1."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.utils import get_global_norm_of_tensors
from torch import distributed as dist

from ...bare import bare
from ...compat import averages_gradients, checks_zero_overflow, use_zero_gradient
from ...errors import ProtocolError
from ...state import Tree
from .answers import Recorder
from .commit import Measured
from .optimizers import HalfOptimizer, Stage, StageOptimizer, Tensors, laid_out
from .shares import Shares, all_reduce

if TYPE_CHECKING:
    from .deepspeed_adapter import DeepSpeedAdapter
    from .groups import RoleGroups

#: Elements of a shard that are gathered at once: so much memory, times the pipelines, is taken besides the parameters.
_PIECE = 1 << 25


class ShardedOptimizer(StageOptimizer):
    """Partitioned over the pipelines: role ``(d, s)`` keeps and steps part ``d`` of its stage's masters.

    With tensor slices ``d`` is the copy of the model that the role is a part of; each slice has masters of its own.
    """

    @property
    def _part(self) -> int:
        return int(self._groups.layout.copy_of(self._runtime.role))

    @property
    @abstractmethod
    def _partitions(self) -> list[Tensors]:
        """Per parameter group, the flat parameters in one part per pipeline."""

    def shard(self, part: int) -> Tensors:
        return [parts[part] for parts in self._partitions]

    def fill(self, part: int, shard: Tensors) -> None:
        with torch.no_grad():
            for parts, given in zip(self._partitions, shard, strict=True):
                parts[part].copy_(given)

    def gather(self) -> None:
        group, copies = self._ds.mpu.get_data_parallel_group(), self._groups.layout.copies
        with torch.no_grad():
            for parts in self._partitions:  # of one length
                for pieces in zip(*(part.split(_PIECE) for part in parts), strict=True):
                    # An abort leaves anything in what a collective writes, so that is not the parameters.
                    gathered = pieces[0].new_empty(copies * pieces[0].numel())
                    dist.all_gather_into_tensor(gathered, pieces[self._part], group=group)
                    for part, given in enumerate(gathered.chunk(copies)):
                        if part != self._part:
                            pieces[part].copy_(given)

    def restore(self, state: Tree) -> None:
        super().restore(state)
        self._link()

    def _keep_on(self, device: torch.device) -> None:
        super()._keep_on(device)
        self._link()

    def _link(self) -> None:
        """Has DeepSpeed's parameters find their masters, and the optimizer's state with the next step."""
        self.wrapper._link_all_hp_params()
        self.wrapper._hp_optimizer_states_linked = False


class Bf16Optimizer(ShardedOptimizer):
    """``BF16_Optimizer``: gradients add up in flat buffers; one norm, of all parameters on every pipeline."""

    def groups(self) -> list[list[torch.nn.Parameter]]:
        return self.wrapper.bf16_groups

    @property
    def _partitions(self) -> list[Tensors]:
        return self.wrapper.bf16_partitioned_groups

    def local(self) -> Tensors:
        return list(self.wrapper.get_grads_for_reduction()[0])

    def _place(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """The number of the parameter's group, and its place there."""
        for number, group in enumerate(self.groups()):
            for place, each in enumerate(group):
                if each is parameter:
                    return number, place
        raise ProtocolError("the optimizer does not know a parameter of its stage")

    def part(self, sums: Tensors, parameter: torch.nn.Parameter) -> torch.Tensor:
        number, place = self._place(parameter)
        return self._views(sums)[number][place]

    def used(self, parameter: torch.nn.Parameter) -> bool:
        number, place = self._place(parameter)
        return bool(self.wrapper.fp32_groups_has_gradients[number][place])

    def accumulated(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        known = {id(p) for group in self.groups() for p in group}
        found: list[torch.Tensor | None] = []
        for parameter in parameters:
            used = id(parameter) in known and self.used(parameter)
            found.append(self._sum_of(parameter).detach().clone() if used else None)
        return found

    def accumulate_on(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor | None]) -> None:
        known = {id(p) for group in self.groups() for p in group}
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = None
            if id(parameter) in known:
                number, place = self._place(parameter)
                self.wrapper.fp32_groups_has_gradients[number][place] = total is not None
                mine = self._sum_of(parameter)
                mine.zero_() if total is None else mine.copy_(total)

    def _sum_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        number, place = self._place(parameter)
        mine: torch.Tensor = self.wrapper.fp32_groups_gradients[number][place]
        return mine

    def replaced(self, sums: Tensors, gradients: Mapping[int, torch.Tensor]) -> Tensors:
        flats = [flat.clone() for flat in sums]
        flags = self.wrapper.fp32_groups_has_gradients
        for number, (group, views) in enumerate(zip(self.groups(), self._views(flats), strict=True)):
            for place, (parameter, view) in enumerate(zip(group, views, strict=True)):
                if id(parameter) in gradients:
                    view.copy_(gradients[id(parameter)].reshape(-1))
                    flags[number][place] = True  # else the norm leaves out what was accumulated elsewhere
        return flats

    def measure(self, reduced: Tensors) -> Measured:
        recorder = Recorder()
        views = self._views(reduced)
        mine: list[Tensors] = self.wrapper.fp32_groups_gradients
        chosen = {id(g) for g in self.wrapper.get_grads_for_norm()[0]}
        counted = [
            view
            for own, given in zip(mine, views, strict=True)
            for g, view in zip(own, given, strict=True)
            if id(g) in chosen
        ]
        if counted:
            with self._groups.acting_for(self._runtime.role, recorder):
                get_global_norm_of_tensors(counted, mpu=self.wrapper.mpu)
        return Measured(False, tuple(recorder.values) or (0.0,))

    def _views(self, flat: Tensors) -> list[Tensors]:
        """Per parameter group, the gradients of the parameters in ``flat``."""
        found = []
        for buffer, own in zip(flat, self.wrapper.fp32_groups_gradients, strict=True):
            sizes = [g.numel() for g in own]
            found.append(list(bare(buffer).narrow(0, 0, sum(sizes)).split(sizes)))
        return found

    def keep(self, reduced: Tensors) -> Tensors:
        kept = []
        for gradients, part in zip(reduced, self.shard(self._part), strict=True):
            mine = gradients.narrow(0, self._part * part.numel(), part.numel())
            # A view would keep the gradients of all parts.
            kept.append(mine if mine.numel() == gradients.numel() else mine.clone())
        return kept

    def apply(self, kept: Tensors) -> None:
        for group, (mine, given) in enumerate(zip(self.wrapper.fp32_groups_gradient_flat_partition, kept, strict=True)):
            if mine.data_ptr() != given.data_ptr():
                mine.copy_(given)
            # A replica may have accumulated nothing itself; the norm is answered, clipping must find all of it.
            self.wrapper.fp32_groups_has_gradients[group] = [True] * len(self.wrapper.bf16_groups[group])

    def clear(self) -> None:
        super().clear()
        self.wrapper.clear_hp_grads()

    @property
    def _masters(self) -> list[Tensors]:
        return [self.wrapper.fp32_groups_flat_partition]


class ZeroOptimizer(ShardedOptimizer):
    """``DeepSpeedZeroOptimizer``, stage 1: a norm per parameter group, summed over pipelines and then over stages."""

    sums = 2

    def __init__(self, ds: DeepSpeedAdapter, groups: RoleGroups, runtime: Stage) -> None:
        super().__init__(ds, groups, runtime)
        # Its first backward pass would allocate a bucket of `reduce_bucket_size`, of 2 GB by default, for a reduction
        # that :meth:`average` does in its place: each role, and each replica that computes, would keep one for good.
        self.wrapper.contiguous_gradients = False

    @property
    def norms(self) -> int:
        return len(self.groups())

    @contextmanager
    def rounding_as_on(self, device: torch.device) -> Iterator[None]:
        """See :class:`StageOptimizer`: by how much gradients are scaled and clipped."""
        zero = self.wrapper
        norm, scale = zero.get_grad_norm_direct, zero.unscale_and_clip_grads

        def norm_there(*args: Any, **kwargs: Any) -> torch.Tensor:
            found: torch.Tensor = norm(*args, **kwargs)
            return found.to(device)

        def scale_here(gradients: Sequence[Any], total_norm: torch.Tensor) -> None:
            factor = torch.ones((), device=device)
            scale([factor], total_norm)
            for gradient in gradients:
                gradient.data.mul_(factor.to(gradient.device))

        zero.get_grad_norm_direct, zero.unscale_and_clip_grads = norm_there, scale_here
        try:
            yield
        finally:
            del zero.get_grad_norm_direct, zero.unscale_and_clip_grads

    @property
    def _checks(self) -> bool:
        return checks_zero_overflow(self.wrapper)

    @property
    def skips(self) -> bool:
        return self._checks or self.wrapper.dtype != torch.bfloat16

    def groups(self) -> list[list[torch.nn.Parameter]]:
        return self.wrapper.round_robin_bit16_groups

    @property
    def _partitions(self) -> list[Tensors]:
        return self.wrapper.parallel_partitioned_bit16_groups

    def local(self) -> Tensors:
        found = []
        for parameter in (p for group in self.groups() for p in group):
            gradient = self.wrapper.get_gradient_for_reduction(parameter)
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=self.wrapper.gradient_accumulation_dtype)
            found.append(gradient.detach())
        return found

    def accumulated(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor | None]:
        found = [getattr(parameter, self._attribute, None) for parameter in parameters]
        return [None if total is None else total.detach().clone() for total in found]

    def accumulate_on(self, parameters: Sequence[torch.nn.Parameter], sums: Sequence[torch.Tensor | None]) -> None:
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = None
            setattr(parameter, self._attribute, laid_out(total, parameter))

    @property
    def _attribute(self) -> str:
        """The attribute in which gradients add up; what DeepSpeed gives to the reduction older versions round."""
        return "grad_accum" if self.wrapper.use_grad_accum_attribute else "grad"

    def _places(self) -> dict[int, int]:
        return {id(p): i for i, p in enumerate(p for group in self.groups() for p in group)}

    def average(self, sums: Sequence[Tensors], shares: Shares | None) -> Tensors:
        """See :class:`StageOptimizer`. Divides before it adds, as DeepSpeed does here by default."""
        zero, group = self.wrapper, self._ds.mpu.get_data_parallel_group()
        divisor = dist.get_world_size(group) if averages_gradients(zero) else 1
        flats = [torch.cat([g.reshape(-1) for g in own]).to(zero.communication_data_type) for own in sums]
        for flat in flats:
            flat.div_(divisor)
        total = flats[0]
        if shares is None:
            dist.all_reduce(total, group=group)
        else:
            total = all_reduce(flats, shares, group)
        parts = total.split([g.numel() for g in sums[0]])
        return [part.view_as(own).to(own.dtype, copy=True) for own, part in zip(sums[0], parts, strict=True)]

    def measure(self, reduced: Tensors) -> Measured:
        recorder = Recorder()
        pieces = self._pieces(reduced)
        overflow = self._checks and any(not torch.isfinite(p).all() for g in pieces for p in g)
        with self._groups.acting_for(self._runtime.role, recorder):
            for part, parameters in zip(pieces, self.wrapper.params_in_partition, strict=True):
                self.wrapper.get_grad_norm_direct(part, parameters)
        return Measured(overflow, tuple(recorder.values[:: self.sums]))

    def _pieces(self, reduced: Tensors) -> list[Tensors]:
        """Per parameter group, the parts of the gradients that belong to this role's shard."""
        gradients = {id(p): g for p, g in zip((p for g in self.groups() for p in g), reduced, strict=True)}
        by_group = []
        zero = self.wrapper
        for parameters, offset, size in zip(
            zero.params_in_partition, zero.first_offset, zero.partition_size, strict=True
        ):
            pieces, left, skip = [], int(size), int(offset)
            for parameter in parameters:
                piece = gradients[id(parameter)].reshape(-1)[skip : skip + left]
                pieces.append(piece)
                left, skip = left - piece.numel(), 0
            by_group.append(pieces)
        return by_group

    def keep(self, reduced: Tensors) -> Tensors:
        kept = []
        for pieces, size in zip(self._pieces(reduced), self.wrapper.partition_size, strict=True):
            buffer = torch.zeros(int(size), dtype=self.wrapper.gradient_accumulation_dtype, device=self._ds.device)
            if pieces:
                flat = torch.cat(pieces)
                buffer[: flat.numel()] = flat
            kept.append(buffer)
        return kept

    def apply(self, kept: Tensors) -> None:
        for group, gradient in enumerate(kept):
            # The step scales it in place.
            use_zero_gradient(self.wrapper, group, gradient.clone())

    def clear(self) -> None:
        self.wrapper.zero_grad()

    @property
    def _masters(self) -> list[Tensors]:
        return [self.wrapper.single_partition_of_fp32_groups]

    def _scaler(self) -> dict[str, Any]:
        numbers = vars(self.wrapper.loss_scaler)
        plain = {k: v for k, v in numbers.items() if v is None or isinstance(v, (bool, int, float))}
        return {**plain, **{name: getattr(self.wrapper, name) for name in HalfOptimizer.OWN}}

    def _restore_scaler(self, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            setattr(self.wrapper if name in HalfOptimizer.OWN else self.wrapper.loss_scaler, name, value)
