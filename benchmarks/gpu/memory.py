"""Memory of each worker with redundancy and without, and whether a replica could be parked in host memory.

Peaks are of the jobs of :mod:`transformer`. A parked replica's state would be brought to the device and stepped slice
by slice: that step would have to be, bit for bit, the one of the whole state on the device. See ``--help``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import click
import torch
from bench import MIB, Experiment, experiment, table
from common import TRAININGS, Job, JobFailed
from deepspeed.accelerator import get_accelerator
from jobs import WARM_UP, Case, Jobs, Model, peaks
from overhead import MODES
from rich.markup import escape
from torch import Tensor

WANTED = ("none", "lazy", "eager-frc", "eager-frc-eager-brc")
#: Steps that parked and resident state are compared after.
STEPS = 4
SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def fused_adam(parameters: Sequence[Tensor]) -> Any:
    """DeepSpeed's, whose kernel may have to be compiled."""
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(parameters, **SETTINGS)


#: Names and makers of optimizers.
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Any]] = {
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, **SETTINGS),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, fused=True, **SETTINGS),
    "FusedAdam": fused_adam,
}


@dataclass
class Parked:
    """One optimizer with one size of slices.

    Attributes:
        cut: ``within`` a tensor, from its begin; ``across`` tensors, as if they were one; ``odd``: the same, and slices
            are by one value longer, so that they do not begin where vectors do.
        bytes: of a slice of the parameters.
        values: compared, of parameters and state.
        differ: values that differ.
        device_bytes: at the peak of a parked step, beside what was there before; ``None`` on a CPU.
        problem: why there are no figures.
    """

    optimizer: str
    cut: str
    bytes: int
    values: int = 0
    differ: int = 0
    device_bytes: int | None = None
    problem: str = ""


def cut(row: Parked, flat: Tensor, shapes: Sequence[int]) -> list[Tensor]:
    """``flat``, which has the values of all tensors, in slices."""
    length = row.bytes // flat.element_size()
    if row.cut != "within":
        return list(flat.split(length + (row.cut == "odd")))
    return [part for tensor in flat.split(list(shapes)) for part in tensor.split(length)]


class Slice:
    """Parameters in host memory, which visit ``device`` for a step with their state."""

    def __init__(self, make: Callable[[Sequence[Tensor]], Any], values: Tensor, device: str) -> None:
        self._device, self._parameter = device, torch.nn.Parameter(values.clone())
        self._optimizer = make([self._parameter])
        self._move("cpu")

    def _move(self, place: str) -> None:
        def moved(tensor: Tensor) -> Tensor:
            if place != "cpu":
                return tensor.to(place, non_blocking=True)
            host = tensor.detach().cpu()
            return get_accelerator().pin_memory(host) if self._device != "cpu" else host.clone()

        self._parameter.data = moved(self._parameter.data)
        state = self._optimizer.state.get(self._parameter, {})
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim():
                state[name] = moved(value)

    def step(self, gradient: Tensor) -> None:
        """One step; ``gradient`` is on the device."""
        self._move(self._device)
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None
        self._move("cpu")

    def tensors(self) -> list[Tensor]:
        """Parameters and state, in host memory."""
        return tensors_of(self._optimizer, [self._parameter])


def tensors_of(optimizer: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Flat, in host memory: all parameters, first moments, second moments."""
    found = [torch.cat([p.detach().reshape(-1) for p in parameters])]
    for name in ("exp_avg", "exp_avg_sq"):
        found.append(torch.cat([optimizer.state[p][name].reshape(-1) for p in parameters]))
    return [each.cpu() for each in found]


def compare(run: Experiment, row: Parked, shapes: Sequence[int]) -> None:
    """Step parameters of ``shapes`` elements on the device, and the same in slices."""
    make, generator = OPTIMIZERS[row.optimizer], torch.Generator().manual_seed(1)
    flat = torch.randn(sum(shapes), generator=generator).to(run.kind)
    whole = [torch.nn.Parameter(part.clone()) for part in flat.split(list(shapes))]
    try:
        resident = make(whole)
        parts = [Slice(make, part, run.kind) for part in cut(row, flat, shapes)]
        for _ in range(STEPS):
            gradient = torch.randn(sum(shapes), generator=generator).to(run.kind)
            for parameter, part in zip(whole, gradient.split(list(shapes)), strict=True):
                parameter.grad = part.clone()
            resident.step()
            before = get_accelerator().memory_allocated()
            get_accelerator().reset_peak_memory_stats()
            for part, given in zip(parts, cut(row, gradient, shapes), strict=True):
                part.step(given)
            if run.gpu:
                row.device_bytes = get_accelerator().max_memory_allocated() - before
    except Exception as error:  # a kernel that cannot be compiled or used here: that is the result
        row.problem = (str(error) or repr(error)).splitlines()[0][:200]
        return
    parked = [torch.cat(tensors) for tensors in zip(*(part.tensors() for part in parts), strict=True)]
    for a, b in zip(tensors_of(resident, whole), parked, strict=True):
        row.values += a.numel()
        row.differ += int((a.view(torch.int32) != b.view(torch.int32)).sum())


def job_peaks(jobs: Jobs, case: Case, mode: str) -> list[int]:
    """Bytes of each worker of one job."""
    steps, more = WARM_UP + 3, ["--no-checkpoint"]
    if mode == "stock":
        job: Job = jobs.stock(case, steps, more)
    else:
        job = jobs.block(case, mode, steps, next(each.block for each in MODES if each.name == mode), more)
    return peaks(job)


@experiment("memory")
@click.option("--stages", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--micro-batches", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--training", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True)
@click.option("--parked-only", is_flag=True, help="No jobs.")
@click.option("--jobs-only", is_flag=True, help="No parked replicas.")
def main(run: Experiment, stages: int, micro_batches: int, training: str, parked_only: bool, jobs_only: bool) -> None:
    """Measure peaks of memory, and compare parked replicas with resident ones."""
    millions, sizes = (64, (1, 4, 16, 64)) if run.gpu else (0.05, (0.0625, 0.25))
    shapes = [int(millions * 10**6) // 4 + odd for odd in (0, 1, 3, 17)]
    rows: list[Parked] = []
    parked = table("parked replicas", "optimizer", " cut", "slice [MiB]", "values", "differ", "device [MiB]", " ")
    for name, size, where in product(() if jobs_only else OPTIMIZERS, sizes, ("within", "across", "odd")):
        row = Parked(name, where, int(size * MIB))
        if name == "FusedAdam" and not run.gpu:
            row.problem = "its kernel is of a GPU"
        elif run.left_s() > 0:
            compare(run, row, shapes)
        else:
            row.problem = "left out, the time is over"
        rows.append(row)
        device = "" if row.device_bytes is None else f"{row.device_bytes / MIB:.1f}"
        differ = f"[{'red' if row.differ else 'green'}]{row.differ}[/]"
        parked.add_row(name, where, f"{size:g}", str(row.values), differ, device, escape(row.problem))
        run.save(parked=[asdict(each) for each in rows])
    found: dict[str, list[int]] = {}
    view = table(f"M={micro_batches}, {training}: peaks", "mode", "MiB, by rank", "largest against stock")
    model = Model(2 * stages, 1024, 512, 16, attention="fused") if run.gpu else Model(4, 64, 16, 4)
    jobs, case = Jobs(run, model, micro_batches), Case(TRAININGS[training], stages if run.gpu else 2)
    for mode in () if parked_only else ("stock", *WANTED):
        try:
            found[mode] = job_peaks(jobs, case, mode)
        except JobFailed as error:
            run.blame(f"{mode}: {error.message}")
            continue
        ratio = f"{max(found[mode]) / max(found['stock']):.2f}" if "stock" in found else ""
        view.add_row(mode, " ".join(f"{each / MIB:.0f}" for each in found[mode]), ratio)
        run.save(parked=[asdict(each) for each in rows], peaks=found)
    if not jobs_only:
        run.show(parked)
    run.end(view, training=training, parked=[asdict(each) for each in rows], peaks=found)


if __name__ == "__main__":
    main()
