"""The collectives of torch's backends as one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...bare import bare

Tensors = Sequence[torch.Tensor]
#: An output for each rank, and what this rank gives; or an output, and what this rank gives to each.
Gathered = Iterable[tuple[Tensors, torch.Tensor]]
Scattered = Iterable[tuple[torch.Tensor, Tensors]]
Shape = Literal[
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "gather", "reduce_scatter", "scatter",
    "alltoall", "barrier",
]  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """A collective of torch's ``Backend``, called with tensors (and sizes), then options.

    Attributes:
        name: by which torch calls it.
        shape: what it does with its tensors; several collectives do one thing with different forms of them.
        options: torch's type of them.
        forms: brings its tensors into the form that its shape has, for a number of ranks: of reductions and broadcasts
            the tensors, else see :data:`Gathered` and :data:`Scattered`, of ``alltoall`` outputs and inputs by rank.
        also: names that newer versions of torch call it by.
        single: does it for one pair of tensors where torch's bindings lack it.
    """

    name: str
    shape: Shape
    options: str
    forms: Callable[..., Any]
    also: tuple[str, ...] = ()
    single: str | None = None

    @property
    def in_place(self) -> bool:
        """Whether it writes over what it is given."""
        return self.shape in ("allreduce", "allreduce_coalesced", "reduce", "broadcast")

    @property
    def reduces(self) -> bool:
        """Whether it sums up shares of ranks."""
        return self.shape in ("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter")

    @property
    def copies(self) -> bool:
        """Whether it gives each rank's share."""
        return self.shape in ("allgather", "gather", "alltoall")

    def device(self, arguments: Sequence[Any]) -> torch.device | None:
        """The device of its tensors."""
        if self.shape == "barrier":
            return getattr(arguments[-1], "device", None)
        some = arguments[1 if self.shape in ("allgather", "gather") else 0]
        return (some if isinstance(some, torch.Tensor) else some[0]).device

    def written(self, arguments: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors that it writes."""
        outputs = [] if self.shape == "barrier" else arguments[0]
        rows = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return [tensor for row in rows for tensor in ([row] if isinstance(row, torch.Tensor) else row)]


# -- forms of tensors -----------------------------------------------------------------------------------


def _plain(size: int, tensors: Tensors) -> Tensors:
    return tensors


def _pairs(size: int, outputs: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(outputs, inputs, strict=True))


def _by_rank(size: int, outputs: Sequence[Tensors], inputs: Tensors) -> Gathered:
    return list(zip(zip(*outputs, strict=True), inputs, strict=True))


def _optional_outputs(size: int, outputs: Sequence[Tensors], inputs: Tensors) -> Gathered:
    return [(outputs[0] if outputs else (), inputs[0])]


def _optional_inputs(size: int, outputs: Tensors, inputs: Sequence[Tensors]) -> Scattered:
    return [(outputs[0], inputs[0] if inputs else ())]


def _cut_output(size: int, output: torch.Tensor, tensor: torch.Tensor) -> Gathered:
    return [(bare(output).view(size, -1).unbind(), bare(tensor).reshape(-1))]


def _cut_input(size: int, output: torch.Tensor, tensor: torch.Tensor) -> Scattered:
    return [(output, bare(tensor).reshape(size, -1).unbind())]


def _several(form: Callable[..., Any]) -> Callable[..., Any]:
    def forms(size: int, outputs: Tensors, inputs: Tensors) -> list[Any]:
        return [each for pair in zip(outputs, inputs, strict=True) for each in form(size, *pair)]

    return forms


def _two_rows(size: int, outputs: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
    return outputs, inputs


def _cut_both(
    size: int, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
) -> tuple[Tensors, Tensors]:
    received = bare(output).split(list(output_splits) or [bare(output).size(0) // size] * size)
    return received, bare(tensor).split(list(input_splits) or [bare(tensor).size(0) // size] * size)


def _nothing(size: int) -> None:
    return None


COLLECTIVES = {
    each.name: each
    for each in (
        Collective("broadcast", "broadcast", "BroadcastOptions", _plain),
        Collective("allreduce", "allreduce", "AllreduceOptions", _plain),
        Collective("allreduce_coalesced", "allreduce_coalesced", "AllreduceCoalescedOptions", _plain),
        Collective("reduce", "reduce", "ReduceOptions", _plain),
        Collective("allgather", "allgather", "AllgatherOptions", _pairs),
        Collective("allgather_coalesced", "allgather", "AllgatherOptions", _by_rank),
        Collective("_allgather_base", "allgather", "AllgatherOptions", _cut_output, ("all_gather_single",)),
        Collective(
            *("allgather_into_tensor_coalesced", "allgather", "AllgatherOptions", _several(_cut_output)),
            also=("all_gather_single_coalesced",),
            single="_allgather_base",
        ),
        Collective("gather", "gather", "GatherOptions", _optional_outputs),
        Collective("scatter", "scatter", "ScatterOptions", _optional_inputs),
        Collective("reduce_scatter", "reduce_scatter", "ReduceScatterOptions", _pairs),
        Collective(
            "_reduce_scatter_base", "reduce_scatter", "ReduceScatterOptions", _cut_input, ("reduce_scatter_single",)
        ),
        Collective(
            *("reduce_scatter_tensor_coalesced", "reduce_scatter", "ReduceScatterOptions", _several(_cut_input)),
            also=("reduce_scatter_single_coalesced",),
            single="_reduce_scatter_base",
        ),
        Collective("alltoall", "alltoall", "AllToAllOptions", _two_rows),
        Collective("alltoall_base", "alltoall", "AllToAllOptions", _cut_both, ("all_to_all_single",)),
        Collective("barrier", "barrier", "BarrierOptions", _nothing),
    )
}
