"""Blocks: runs of consecutive layers of a stage, the smallest units that its shadow can compute for its owner.

Passes over some blocks of a stage compute what passes over the whole stage compute of them, bit for bit: layers are
called in the same order with the same inputs, and random numbers begin anew with every block::

    stage        | block 0 | block 1 | block 2 |
    seeded by      pass      pass, 1   pass, 2
    owner        |---------+---------|
    shadow                           |---------|
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from deepspeed.pipe import PipelineModule
from torch import nn

from ... import compat
from ...bare import bare
from ...errors import UnsupportedError
from ...topology import Layout
from ...topology.roles import MOST_BLOCKS
from .references import DEPTH, reached
from .rng import default_generators
from .tracing import tensors_in


def with_blocks(layout: Layout, module: Any, most: int | Literal["auto"]) -> Layout:
    """``layout`` with the number of blocks of every stage of ``module``, a ``PipelineModule``.

    Args:
        layout: the logical world. Tensor slices meet inside their layers, so that stages with them stay whole; so do
            those of a class that has a ``forward`` of its own, and all where gradients would depend on the division.
        module: this process's stage; it knows which layers the others have.
        most: of a stage.
    """
    whole = layout.slices > 1 or type(module).forward is not PipelineModule.forward or compat.divides_every_output()
    if most == 1 or whole:
        return layout
    together = max(1, module.activation_checkpoint_interval)  # what is checkpointed together stays together
    groups = [-(-(stop - start) // together) for start, stop in pairwise(module.parts)]
    limit = MOST_BLOCKS if most == "auto" else most
    blocks = tuple(max(1, min(limit, count)) for count in groups)
    return replace(layout, blocks=blocks) if max(blocks) > 1 else layout


def bounds(layers: int, together: int, count: int) -> list[int]:
    """The first layer of each of a stage's ``count`` blocks, and behind the last one their number."""
    together = max(1, together)
    groups = -(-layers // together)
    return [*(number * groups // count * together for number in range(count)), layers]


class StageBlocks:
    """The blocks of ``module``, a ``PipelineModule``.

    Attributes:
        bounds: the first layer of each block, and behind the last one their number.
        cuts: blocks before which the stage may be divided; ``None`` before this member has computed all of it.
        search: what finds that out in the current iteration.
    """

    def __init__(self, module: Any, count: int) -> None:
        self.module, self.count = module, count
        self.cuts: tuple[int, ...] | None = None
        self.search: CutSearch | None = None
        self.bounds = [0, 0]
        if count > 1:
            self.bounds = bounds(len(module.forward_funcs), module.activation_checkpoint_interval, count)

    def parameters(self, begin: int, end: int) -> list[nn.Parameter]:
        """Parameters of the blocks from ``begin`` to before ``end``, in the order of the layers."""
        found: dict[int, nn.Parameter] = {}
        for layer in self._layers(begin, end):
            found.update((id(parameter), parameter) for parameter in nn.Module.parameters(layer))
        return list(found.values())

    def names(self, begin: int, end: int) -> set[str]:
        """Names in the stage of the modules of these blocks."""
        mine = {id(part) for layer in self._layers(begin, end) for part in nn.Module.modules(layer)}
        return {name for name, part in self.module.named_modules() if id(part) in mine}

    def joined(self) -> set[int]:
        """Blocks before which the stage cannot be divided, since layers before and behind have something in common.

        That may be weights, whose gradients would add up in another order, or what layers keep.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for block in range(self.count):
            for layer in self._layers(block, block + 1):
                for each in (*nn.Module.modules(layer), *nn.Module.parameters(layer), *nn.Module.buffers(layer)):
                    first.setdefault(id(each), block)
                    last[id(each)] = block
        return {cut for each, block in first.items() for cut in range(block + 1, last[each] + 1)}

    @property
    def whole(self) -> bool:
        """Whether passes do not go block by block: there is one, or the stage is compiled, or has a forward of its own.

        All copies of a stage are alike in that.
        """
        module = self.module
        return self.count == 1 or module._compiled_call_impl is not None or "forward" in vars(module)

    def _layers(self, begin: int, end: int) -> list[nn.Module]:
        parts: list[Any] = []
        for function in self.module.forward_funcs[self.bounds[begin] : self.bounds[end]]:
            # A tied layer with a function of its own is that function, given the layer.
            parts += [*function.args, *function.keywords.values()] if isinstance(function, partial) else [function]
        if end == self.count:
            parts.append(getattr(self.module, "loss_fn", None))
        return [part for part in parts if isinstance(part, nn.Module)]

    def apart(self) -> bool:
        """Whether all that the stage has belongs to one of its blocks.

        What does not is on the ``PipelineModule`` itself, or reached by layers that are functions.
        """
        mine = {id(p) for p in self.parameters(0, self.count)}
        names = self.names(0, self.count)
        if any(id(p) not in mine for p in self.module.parameters()):
            return False
        if any(name.rpartition(".")[0] not in names for name, _ in self.module.named_buffers()):
            return False
        for function in self.module.forward_funcs:
            if isinstance(function, nn.Module):
                continue
            used = function.func if isinstance(function, partial) else function
            if next(reached(used, DEPTH, {}), None) is not None:
                return False
        return True

    @contextmanager
    def computing(
        self,
        begin: int,
        end: int,
        seed: Callable[[int], None],
        note: Callable[[int, Any], None] | None = None,
        timed: Callable[[int, float], None] | None = None,
    ) -> Iterator[None]:
        """In the body a forward pass of the stage is one of these blocks.

        Args:
            begin: the first one.
            end: the first one behind them.
            seed: called before each block but the stage's first one, with its number.
            note: called with the same, and with what goes into the block.
            timed: called after each block with its number, and with the seconds of its forward pass; after those of a
                stage that is computed whole, with equal shares.
        """
        module = self.module
        if self.whole:
            if (begin, end) != (0, self.count):
                raise UnsupportedError(
                    "the script has compiled the stage, or put a forward of its own in the place of the stage's, after "
                    "it was divided between members: do that before the first train_batch, or set "
                    '"bamboo.topology.blocks": 1'
                )
            began = time.perf_counter()
            yield
            if timed is not None:
                for block in range(self.count):
                    timed(block, (time.perf_counter() - began) / self.count)
            return
        whole = type(module).forward

        def forward(inputs: Any) -> Any:
            for block in range(begin, end):
                if block:
                    seed(block)
                if block > begin and note is not None:
                    note(block, inputs)
                began = time.perf_counter()
                inputs = whole(_LayerRun(module, *self.bounds[block : block + 2]), inputs)
                if timed is not None:
                    timed(block, time.perf_counter() - began)
            return inputs

        vars(module)["forward"] = forward
        try:
            yield
        finally:
            del vars(module)["forward"]


class _LayerRun:
    """Some layers of ``module``, which :meth:`PipelineModule.forward` takes for a module of its own.

    What that sets while it computes stays here. It goes on being asked for in backward passes, which compute
    checkpointed layers again.
    """

    def __init__(self, module: Any, start: int, stop: int) -> None:
        interval = module.activation_checkpoint_interval
        self._module = module
        self.forward_funcs = module.forward_funcs[start:stop]
        self.micro_offset = module.micro_offset
        # DeepSpeed numbers the layers of each group that it checkpoints from the stage's first one on.
        self._local_start = module._local_start + (0 if interval else start)
        if interval and hasattr(module, "is_checkpointable_results"):
            self.is_checkpointable_results = module.is_checkpointable_results[start // interval :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class CutSearch:
    """Finds out where a stage can be divided, in its first iteration."""

    def __init__(self, stage: StageBlocks) -> None:
        self._stage = stage
        self._passed: dict[int, list[bool]] = {}
        self._draws = False

    def note(self, block: int, value: Any) -> None:
        """``value`` goes into ``block`` in a forward pass."""
        found = self._passed.setdefault(block, [False])
        found[0] = cuttable(value)
        if found[0]:
            (floating,) = (each for each in tensors_in(value) if each.dtype.is_floating_point)
            torch.Tensor.register_hook(floating, lambda gradient: found.append(gradient.is_contiguous()))

    @contextmanager
    def backward(self, device: torch.device) -> Iterator[None]:
        """The body is the backward pass. One that draws random numbers cannot be divided: they are those of a stage."""
        before = [(each, each.get_state()) for each in default_generators(device)]
        yield
        self._draws |= any(not torch.equal(each.get_state(), state) for each, state in before)

    def found(self) -> tuple[int, ...] | None:
        """The blocks before which the stage can be divided; ``None`` if no pass has shown that.

        A member that takes a stage over at the end of an iteration has nothing to compute of it any more.
        """
        module: Any = self._stage.module
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        scripts = [hook for kind in kinds for hook in getattr(module, kind, {}).values()]
        foreign = any(not str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in scripts)
        if self._draws or foreign or not self._stage.apart():
            return ()
        if self._stage.count > 1 and not self._passed:
            return None
        # Where it goes in, and a gradient comes back.
        fit = {block for block, facts in self._passed.items() if len(facts) > 1 and all(facts)}
        return tuple(sorted(fit - self._stage.joined()))


def cuttable(value: Any) -> bool:
    """Whether ``value``, which goes from one layer to the next, can go from one member to another instead.

    The gradient of exactly one tensor comes back. With several, parameters before them would add up their gradients one
    by one instead of together, in another order.
    """
    tensors = (value,) if torch.is_tensor(value) else value
    if not isinstance(tensors, tuple) or not all(torch.is_tensor(each) for each in tensors):
        return False
    if not all(bare(each).is_contiguous() for each in tensors):
        return False  # what is sent is, and kernels may round differently
    floating = [each for each in tensors if each.dtype.is_floating_point]
    return len(floating) == 1 and [each for each in tensors if each.requires_grad] == floating
