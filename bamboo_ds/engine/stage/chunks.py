"""Steps of optimizers whose tensors are in host memory, or a part of them, on the device: chunk by chunk.

::

    host memory, to page-locked    chunk 1   chunk 2   chunk 3
    in-stream, to the device                 chunk 1   chunk 2   chunk 3
    device                                   step 1    step 2    step 3
    out-stream, to page-locked                         chunk 1   chunk 2   chunk 3
    page-locked, to host memory                                  chunk 1   chunk 2   chunk 3

Copies between a device and ordinary memory are slow, and the thread that asks for them waits. So threads bring a chunk
to page-locked memory while the one before is stepped, and from there back. The step of each chunk is the optimizer's
own, on tensors of the device: kernels of the host would round otherwise. That gives the bits of one step where each
element is computed by itself (:data:`~bamboo_ds.topology.memory.ELEMENTWISE`).
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizers

from ...bare import bare
from ...devices import staging
from ...devices.accelerators import HOST
from ...devices.staging import StreamMark, Streams
from ...topology.memory import ELEMENTWISE

#: Elements of a chunk. A part of a tensor begins at a multiple of it: vectors of kernels are the same as in the whole.
CHUNK = 1 << 21
#: Chunks that take memory of the device at the same time.
_UNDER_WAY = 2
#: Bytes, of tensors in page-locked memory.
_ALIGNMENT = 512

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_ALL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def unchunked(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why ``optimizer`` cannot be stepped chunk by chunk, or ``None``."""
    kind = type(optimizer)
    if (kind.__module__, kind.__qualname__) not in ELEMENTWISE:
        return f"{kind.__qualname__} is none of {', '.join(sorted(name for _, name in ELEMENTWISE))}"
    if any(group.get(name) for group in optimizer.param_groups for name in ("fused", "capturable", "differentiable")):
        return f"{kind.__qualname__} is fused, capturable or differentiable"
    # Of several parameters DeepSpeed's count the steps of a group's last one alone.
    if not kind.__module__.startswith("torch.") and any(len(group["params"]) > 1 for group in optimizer.param_groups):
        return (
            f"{kind.__qualname__} has several parameters in a group, which DeepSpeed's optimizers of flat ones have not"
        )
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return f"the script has given {kind.__qualname__} another step"
    if any(getattr(optimizer, name, None) for name in _HOOKS) or any(vars(torch_optimizers)[n] for n in _ALL_HOOKS):
        return f"{kind.__qualname__} has hooks on its steps"
    return None


@dataclass(frozen=True, eq=False)
class _Piece:
    """A parameter, or a part of it.

    Attributes:
        parameter: the whole, in host memory or on the device.
        state: what the optimizer's state has of it before the step.
        begin, end: elements, of a part.
    """

    parameter: torch.Tensor
    state: dict[str, Any]
    begin: int = 0
    end: int | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return (bare(self.parameter).numel() if self.end is None else self.end) - self.begin

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that is as large as the parameter."""
        return whole if self.end is None else whole.view(-1)[self.begin : self.end]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the device needs for the step, by names in the state."""
        assert self.parameter.grad is not None
        whole = {_PARAMETER: bare(self.parameter), _GRADIENT: self.parameter.grad.detach()}
        whole.update((name, value) for name, value in self.state.items() if is_like(self.parameter, name, value))
        return {name: self.of(tensor) for name, tensor in whole.items()}


_PARAMETER, _GRADIENT = "", ".grad"


def is_like(parameter: torch.Tensor, name: str, value: Any) -> bool:
    """Whether a state has under ``name`` a tensor of as many elements as the parameter, and no count of steps."""
    return name != "step" and torch.is_tensor(value) and value.shape == parameter.shape


class _Slabs:
    """Page-locked memory of one step, which its chunks use one after the other."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._free: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A slab, and places in it like ``tensors``, with any content."""
        size = sum(_aligned(tensor.nbytes) for tensor in tensors)
        slab = next((free for free in self._free if free.numel() >= size), None)
        if slab is None:
            slab = self._streams.memory(size)
        else:
            self._free = [free for free in self._free if free is not slab]
        places, begin = [], 0
        for tensor in tensors:
            like = torch.empty_like(tensor, device="meta")
            place = slab[begin : begin + tensor.nbytes].view(like.dtype)
            places.append(place.as_strided(like.size(), like.stride(), place.storage_offset()))
            begin += _aligned(tensor.nbytes)
        return slab, places

    def give_back(self, slab: torch.Tensor) -> None:
        """Frees a slab for the next chunk."""
        self._free.append(slab)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], after: StreamMark | None = None) -> None:
    """Copies within the host, after ``after``, on a thread of its own."""
    if after is not None:
        after.synchronize()
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Pieces that are stepped together, on their way to page-locked memory.

    Attributes:
        pieces: of parameters.
        hosts: what of each goes to the device, by its name.
        there: what of each is on it.
        slab, places: that it is copied to.
        copied: when that is over.
    """

    pieces: list[_Piece]
    hosts: list[dict[str, torch.Tensor]]
    there: list[dict[str, torch.Tensor]]
    slab: torch.Tensor
    places: list[torch.Tensor]
    copied: Future[None]


@dataclass(eq=False)
class ChunkedStep:
    """The ``step`` of ``optimizer`` on this process's device; its state, and what else is there, is in host memory.

    Args:
        optimizer: one that :func:`unchunked` has nothing against.
        chunk: elements.
    """

    optimizer: torch.optim.Optimizer
    chunk: int = CHUNK
    _streams: Streams = field(init=False)
    _slabs: _Slabs = field(init=False)
    _threads: ThreadPoolExecutor = field(init=False)
    #: Copies to the host that are under way, with their slab, and what has to be there until they are over.
    _leaving: deque[tuple[Future[None], torch.Tensor, Any]] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        found = staging.current()
        assert found is not None, "host memory has no chunks"
        self._streams = found.streams

    def __call__(self) -> None:
        """Takes the step."""
        self._slabs = _Slabs(self._streams)
        self._leaving.clear()  # of a step that has failed
        with ThreadPoolExecutor(_UNDER_WAY + 1, "bamboo-chunks") as self._threads:
            self._take()

    @torch.no_grad()
    def _take(self) -> None:
        twin = type(self.optimizer).__new__(type(self.optimizer))
        # But for a step that a scheduler has marked, or that is this one: they are bound to the original.
        vars(twin).update({name: value for name, value in vars(self.optimizer).items() if name != "step"})
        for group in self.optimizer.param_groups:
            before = {name: value for name, value in group.items() if name != "params"}
            counts: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
            for chunk in self._ahead(group["params"]):
                twin.state, twin.param_groups = defaultdict(dict), [{**copy.deepcopy(before), "params": []}]
                self._step(twin, chunk, counts)
                group.update({name: value for name, value in twin.param_groups[0].items() if name != "params"})
            for parameter, counted in counts.items():
                self.optimizer.state[parameter].update(counted)
        self._await(0)
        if hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):  # as that would, else torch's schedulers warn
            self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def _ahead(self, parameters: list[torch.Tensor]) -> Iterator[_Chunk]:
        """The chunks of a group, each while the next one is copied."""
        before = None
        for pieces in self._chunks(parameters):
            found = [piece.tensors() for piece in pieces]
            hosts, there = (
                [
                    {n: tensor for n, tensor in each.items() if (tensor.device.type == HOST.type) is here}
                    for each in found
                ]
                for here in (True, False)
            )
            sources = [tensor for each in hosts for tensor in each.values()]
            slab, places = self._slabs.take(sources)
            chunk = _Chunk(pieces, hosts, there, slab, places, self._threads.submit(_copy, sources, places))
            if before is not None:
                yield before
            before = chunk
        if before is not None:
            yield before

    def _chunks(self, parameters: list[torch.Tensor]) -> Iterator[list[_Piece]]:
        """The chunks of a group; one without pieces where it has nothing to step, but may count."""
        pieces: list[_Piece] = []
        elements = 0
        for piece in (each for p in parameters if p.grad is not None for each in self._pieces(p)):
            if pieces and elements + piece.size > self.chunk:
                yield pieces
                pieces, elements = [], 0
            pieces.append(piece)
            elements += piece.size
        yield pieces

    def _pieces(self, parameter: torch.Tensor) -> Iterator[_Piece]:
        whole = _Piece(parameter, dict(self.optimizer.state.get(parameter, {})))
        count = bare(parameter).numel()
        if count <= self.chunk or not all(bare(tensor).is_contiguous() for tensor in whole.tensors().values()):
            yield whole
            return
        for begin in range(0, count, self.chunk):
            yield replace(whole, begin=begin, end=min(begin + self.chunk, count))

    def _step(self, twin: Any, chunk: _Chunk, counts: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Takes the step of a chunk by ``twin``, which has the group of its pieces.

        Args:
            twin: of the optimizer.
            chunk: what is stepped.
            counts: gets what the state has of parameters besides tensors that are as large.
        """
        self._await(_UNDER_WAY - 1)
        (group,) = twin.param_groups
        chunk.copied.result()
        arrived, mark = self._streams.copy_in(chunk.places, None)
        self._streams.order(mark)
        arriving = iter(arrived)
        for piece, host, there in zip(chunk.pieces, chunk.hosts, chunk.there, strict=True):
            tensors = {**there, **{name: next(arriving) for name in host}}
            parameter = torch.nn.Parameter(tensors.pop(_PARAMETER), requires_grad=False)
            parameter.grad = tensors.pop(_GRADIENT)
            group["params"].append(parameter)
            if piece.state:
                twin.state[parameter] = {
                    n: tensors[n] if n in tensors else copy.deepcopy(v) for n, v in piece.state.items()
                }
        twin.step()
        sources, targets = [], []
        for piece, parameter, there in zip(chunk.pieces, group["params"], chunk.there, strict=True):
            if _PARAMETER not in there:
                sources.append(bare(parameter))
                targets.append(piece.of(bare(piece.parameter)))
            for name, value in twin.state.get(parameter, {}).items():
                if not is_like(parameter, name, value):
                    counts[piece.parameter][name] = value.to(HOST) if torch.is_tensor(value) else value
                    continue
                own = self.optimizer.state[piece.parameter]
                if name not in own:  # the first step makes it
                    own[name] = torch.empty_like(piece.parameter, dtype=value.dtype, device=HOST, requires_grad=False)
                sources.append(value)
                targets.append(piece.of(own[name]))
        slab, places = self._slabs.take(sources)
        left = self._streams.copy_out(sources, places)
        over = self._threads.submit(_copy, places, targets, left)
        self._leaving.append((over, slab, (chunk, arrived, sources)))

    def _await(self, most: int) -> None:
        """Waits until only ``most`` chunks are on their way to the host."""
        while len(self._leaving) > most:
            over, slab, (chunk, *_) = self._leaving.popleft()
            over.result()
            self._slabs.give_back(slab)
            self._slabs.give_back(chunk.slab)


class RestingOptimizer:
    """What of an optimizer can be in host memory between steps, while its parameters are on the device.

    Attributes:
        inner: the torch optimizer.
        resting: masters, and what ``inner`` keeps of parameters, are in host memory between steps.
    """

    inner: Any
    resting: bool = False

    @property
    @abstractmethod
    def _device(self) -> torch.device:
        """That of the parameters."""

    @property
    def _masters(self) -> list[list[torch.Tensor]]:
        """The lists in which DeepSpeed has them."""
        return []

    def masters(self) -> list[torch.Tensor]:
        """Copies of parameters in higher precision."""
        return [master for masters in self._masters for master in masters]

    def rest(self) -> None:
        """Brings masters, and what ``inner`` keeps of parameters, to host memory."""
        self.resting = True
        self._put_masters([master.to(HOST) for master in self.masters()])
        self._keep_on(HOST)

    def rouse(self) -> None:
        """Brings back to the device what rests."""
        self._put_masters([master.to(self._device) for master in self.masters()])
        self._keep_on(self._device)
        self.resting = False  # if there was room for all of it

    @contextmanager
    def awake(self) -> Iterator[None]:
        """In the body masters that rest are on the device. What ``inner`` keeps comes there by chunks."""
        if not self.resting:
            yield
            return
        homes = self.masters()
        self._put_masters([home.to(self._device) for home in homes])
        try:
            yield
        finally:
            with torch.no_grad():
                for home, master in zip(homes, self.masters(), strict=True):
                    home.copy_(master)
            self._put_masters(homes)
            self._keep_on(HOST)  # what a script has loaded meanwhile

    def _put_masters(self, others: Sequence[torch.Tensor]) -> None:
        """Puts ``others``, with the same values, in the places of the masters."""
        given = iter(others)
        params = [group["params"] for group in self.inner.param_groups] if self._masters else []
        for masters in self._masters:
            for place, master in enumerate(masters):
                other = masters[place] = next(given).detach().requires_grad_(master.requires_grad)
                for group in params:
                    group[:] = [other if parameter is master else parameter for parameter in group]
                if master in self.inner.state:
                    self.inner.state[other] = self.inner.state.pop(master)

    def _keep_on(self, device: torch.device) -> None:
        for parameter, state in self.inner.state.items() if self.inner is not None else ():
            for name, value in state.items() if isinstance(state, dict) else ():
                if is_like(parameter, name, value):
                    state[name] = value.to(device)
