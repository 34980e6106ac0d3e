"""Which kernels differ in a bit when a forward and backward pass is done again: plain torch, in one process.

A takeover does passes again, so each of these that differs would make a job inexact. Other work is on the device at the
same time, and memory is elsewhere each time. See ``--help``.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import product

import click
import torch
from bench import Experiment, experiment, table
from deepspeed.accelerator import get_accelerator
from rich.markup import escape
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Inputs, and what is computed of them; those that are floating are differentiated.
Case = tuple[list[Tensor], Callable[..., Tensor]]


class Kernels:
    """Makes the cases; ``rows`` is the size of most: 1024 on a GPU."""

    def __init__(self, kind: str, dtype: torch.dtype, rows: int) -> None:
        self._kind, self._dtype, self._rows = kind, dtype, rows
        self._generator = torch.Generator().manual_seed(1)

    def _floats(self, *shape: int) -> Tensor:
        values = torch.randn(*shape, generator=self._generator)
        return values.to(self._kind, self._dtype).requires_grad_()

    def _numbers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, generator=self._generator).to(self._kind)

    def attention(self, backend: SDPBackend) -> Case:
        """Causal, of 16 heads of 64."""

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return [self._floats(2, 16, self._rows, 64) for _ in range(3)], compute

    def convolution(self) -> Case:
        """cuDNN's, of two dimensions."""
        return [self._floats(self._rows // 16, 32, 32, 32), self._floats(64, 32, 3, 3)], functional.conv2d

    def linear(self) -> Case:
        """A matrix product, with a sum over rows for the bias."""
        return [self._floats(4 * self._rows, 1024), self._floats(1024, 1024), self._floats(1024)], functional.linear

    def scatter_add(self) -> Case:
        """Many values for each place."""
        index = self._numbers(64, 64 * self._rows, 16)
        return [self._floats(64, 16), index, self._floats(64 * self._rows, 16)], lambda x, i, y: x.scatter_add(0, i, y)

    def index_add(self) -> Case:
        """Many rows for each place."""
        index = self._numbers(64, 64 * self._rows)
        return [self._floats(64, 16), index, self._floats(64 * self._rows, 16)], lambda x, i, y: x.index_add(0, i, y)

    def index(self) -> Case:
        """Its backward pass adds with atomics, or sorts."""
        return [self._floats(64, 16), self._numbers(64, 64 * self._rows)], lambda x, i: x[i]

    def embedding(self) -> Case:
        """512 tokens."""
        return [self._numbers(512, 16 * self._rows), self._floats(512, 1024)], functional.embedding

    def layer_norm(self) -> Case:
        """Of rows of 1024."""
        inputs = [self._floats(8 * self._rows, 1024), self._floats(1024), self._floats(1024)]
        return inputs, lambda x, w, b: functional.layer_norm(x, (1024,), w, b)

    def cross_entropy(self) -> Case:
        """Of 8192 classes, in fp32 as is usual."""
        inputs = [self._floats(2 * self._rows, 8192), self._numbers(8192, 2 * self._rows)]
        return inputs, lambda x, labels: functional.cross_entropy(x.float(), labels)

    def dropout(self) -> Case:
        """The generator's state is restored before each repetition."""
        return [self._floats(8 * self._rows, 1024)], lambda x: functional.dropout(x, 0.1)

    def all(self) -> dict[str, Callable[[], Case]]:
        """By name."""
        backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
            "math": SDPBackend.MATH,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
        }
        attentions = {f"attention, {n}": lambda each=each: self.attention(each) for n, each in backends.items()}
        others = (self.convolution, self.linear, self.scatter_add, self.index_add, self.index, self.embedding)
        others += (self.layer_norm, self.cross_entropy, self.dropout)
        return attentions | {each.__name__: each for each in others}


@dataclass
class Figures:
    """One kernel.

    Attributes:
        repetitions: beside the first time.
        forward, backward: those whose result, or a gradient of which, differs from the first time's.
        largest: difference of a value.
        refused: why it does not run.
    """

    kernel: str
    dtype: str
    deterministic: bool
    repetitions: int = 0
    forward: int = 0
    backward: int = 0
    largest: float = 0.0
    refused: str = ""


class Load:
    """Other work on the device: matrix products on a stream of their own, as many as ``draw`` says."""

    def __init__(self, kind: str, draw: random.Random) -> None:
        accelerator = get_accelerator()
        self._gpu, self._draw = kind != "cpu", draw
        self._factor = torch.randn(2048, 2048, device=kind) if self._gpu else torch.randn(64, 64)
        self._stream: Callable[[], AbstractContextManager] = nullcontext
        if self._gpu:
            side = accelerator.Stream()
            self._stream = lambda: accelerator.stream(side)

    def add(self) -> Tensor:
        """Queue some; what is returned keeps memory until it is dropped."""
        with self._stream():
            for _ in range(self._draw.randrange(8)):
                self._factor @ self._factor
        return torch.empty(self._draw.randrange(1, 1 << 20), device=self._factor.device)


def once(case: Case, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The result, and the gradients for a gradient of the result that is drawn like everything else."""
    inputs, compute = case
    get_accelerator().set_rng_state(state)
    for each in inputs:
        each.grad = None
    result = compute(*inputs)
    result.backward(torch.randn_like(result))
    return result.detach().clone(), [each.grad.clone() for each in inputs if each.grad is not None]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@contextmanager
def algorithms(deterministic: bool) -> Iterator[None]:
    """In the body torch takes deterministic ones only; else, as by ``cudnn.benchmark``, the fastest."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]


def measure(make: Callable[[], Case], row: Figures, load: Load, repetitions: int, seconds: float) -> None:
    """Fill ``row``, in about so many ``seconds`` at most."""
    state, end = get_accelerator().get_rng_state(), time.monotonic() + seconds
    try:
        case = make()
        first, gradients = once(case, state)
        while row.repetitions < repetitions and time.monotonic() < end:
            kept = load.add()
            result, again = once(case, state)
            del kept
            pairs = [(first, result), *zip(gradients, again, strict=True)]
            differ = [not same(a, b) for a, b in pairs]
            row.repetitions += 1
            row.forward += differ[0]
            row.backward += any(differ[1:])
            found = [float((a.double() - b.double()).abs().max()) for (a, b), d in zip(pairs, differ, strict=True) if d]
            row.largest = max(row.largest, *found, 0.0)
    except RuntimeError as error:  # a kernel for other types, or one that is not deterministic: that is a result
        row.refused = str(error).splitlines()[0][:200]


@experiment("exact", minutes=5.0)
@click.option("--repetitions", type=click.IntRange(min=1), default=300, show_default=True, help="At most.")
@click.option("--kernel", "wanted", help="Only those whose name has this in it.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the other work.")
def main(run: Experiment, repetitions: int, wanted: str | None, seed: int) -> None:
    """Do passes again and compare bits, with deterministic algorithms and without."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms want it
    rows: list[Figures] = []
    view = table(
        "passes done again",
        "kernel",
        " dtype",
        " deterministic",
        "times",
        "forward differs",
        "backward",
        "by",
        " refused",
    )
    load, sizes = Load(run.kind, random.Random(seed)), 1024 if run.gpu else 16
    repetitions = repetitions if run.gpu else min(repetitions, 3)
    names = [name for name in Kernels(run.kind, torch.float32, sizes).all() if not wanted or wanted in name]
    todo = list(product(names, DTYPES, (False, True)))
    for number, (name, dtype, deterministic) in enumerate(todo):
        row = Figures(name, dtype, deterministic)
        seconds = run.left_s() / (len(todo) - number)
        with algorithms(deterministic):
            measure(Kernels(run.kind, DTYPES[dtype], sizes).all()[name], row, load, repetitions, seconds)
        rows.append(row)
        marks = ("red" if row.forward or row.backward else "green", str(row.forward), str(row.backward))
        cells = [row.kernel, row.dtype, "yes" if deterministic else "no", str(row.repetitions)]
        view.add_row(*cells, *(f"[{marks[0]}]{m}[/]" for m in marks[1:]), f"{row.largest:.2g}", escape(row.refused))
        run.save(rows=[asdict(each) for each in rows])
    if not any(row.repetitions for row in rows):
        run.blame("no pass was done again")
    run.end(view, rows=[asdict(each) for each in rows])


if __name__ == "__main__":
    main()
