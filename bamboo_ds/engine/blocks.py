"""Blocks: runs of consecutive layers of a stage, the smallest units that its shadow can compute for its owner.

Passes over some blocks of a stage compute what passes over the whole stage compute of them, bit for bit: layers are
called in the same order with the same inputs, and random numbers begin anew with every block::

    stage        | block 0 | block 1 | block 2 |
    seeded by      pass      pass, 1   pass, 2
    owner        |---------+---------|
    shadow                           |---------|
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

#: The most blocks that a stage is cut into.
MOST = 16


def blocks_of(layers: int, together: int) -> int:
    """Number of blocks of a stage.

    Args:
        layers: its layers.
        together: so many of them are checkpointed together, and so stay in one block.
    """
    return max(1, min(MOST, -(-layers // max(1, together))))


def bounds(layers: int, together: int, count: int) -> list[int]:
    """The first layer of each of a stage's ``count`` blocks, and behind the last one their number."""
    together = max(1, together)
    groups = -(-layers // together)
    return [*(number * groups // count * together for number in range(count)), layers]


class StageBlocks:
    """The blocks of ``module``, a ``PipelineModule``.

    Args:
        module: the stage.
        count: number of its blocks.

    Attributes:
        bounds: the first layer of each block, and behind the last one their number.
    """

    def __init__(self, module: Any, count: int) -> None:
        self._module, self._count = module, count
        self.bounds = [0, 0]
        if count > 1:
            self.bounds = bounds(len(module.forward_funcs), module.activation_checkpoint_interval, count)

    def parameters(self, begin: int, end: int) -> list[nn.Parameter]:
        """Parameters of the blocks from ``begin`` to before ``end``, in the order of the layers."""
        found: dict[int, nn.Parameter] = {}
        for layer in self._layers(begin, end):
            found.update((id(parameter), parameter) for parameter in layer.parameters())
        return list(found.values())

    def names(self, begin: int, end: int) -> set[str]:
        """Names in the stage of the modules of these blocks."""
        mine = {id(part) for layer in self._layers(begin, end) for part in layer.modules()}
        return {name for name, part in self._module.named_modules() if id(part) in mine}

    def _layers(self, begin: int, end: int) -> list[nn.Module]:
        functions = self._module.forward_funcs[self.bounds[begin] : self.bounds[end]]
        # A tied layer with a function of its own is that function, given the layer.
        parts = [part for function in functions for part in (function, *getattr(function, "args", ()))]
        return [part for part in parts if isinstance(part, nn.Module)]

    @contextmanager
    def computing(self, begin: int, end: int, seed: Callable[[int], None]) -> Iterator[None]:
        """In the body a forward pass of the stage is one of these blocks.

        Args:
            begin: the first one.
            end: the first one behind them.
            seed: called before each block but the stage's first one, with its number.
        """
        module: Any = self._module
        if self._count == 1:
            yield
            return
        whole = type(module).forward

        def forward(inputs: Any) -> Any:
            for block in range(begin, end):
                if block:
                    seed(block)
                inputs = whole(_Block(module, *self.bounds[block : block + 2]), inputs)
            return inputs

        vars(module)["forward"] = forward
        try:
            yield
        finally:
            del vars(module)["forward"]


class _Block:
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
        if interval:
            self.is_checkpointable_results = module.is_checkpointable_results[start // interval :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def obstacle(module: Any) -> str | None:
    """Why ``module`` has to be computed whole, if it has to be."""
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it is compiled as a whole"
    if "forward" in vars(module):
        return "its forward is one of the script's"
    return None


def shared(module: Any, limits: list[int]) -> set[int]:
    """Numbers of blocks before which a stage cannot be divided, since layers before and behind share something.

    Args:
        module: the stage.
        limits: the first layer of each block, and behind the last one their number.
    """
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    stage = StageBlocks(module, 1)
    for block, (start, stop) in enumerate(pairwise(limits)):
        stage.bounds = [start, stop]
        for layer in stage._layers(0, 1):
            for each in (*layer.modules(), *layer.parameters(), *layer.buffers()):
                first.setdefault(id(each), block)
                last[id(each)] = block
    return {cut for each, block in first.items() for cut in range(block + 1, last[each] + 1)}


def cuttable(value: Any) -> bool:
    """Whether ``value``, which goes from one layer to the next, can go from one member to another instead.

    The gradient of exactly one tensor comes back. With several, parameters before them would add up their gradients one
    by one instead of together, in another order.
    """
    tensors = (value,) if torch.is_tensor(value) else value
    if not isinstance(tensors, tuple) or not all(torch.is_tensor(each) for each in tensors):
        return False
    floating = [each for each in tensors if each.is_floating_point()]
    return len(floating) == 1 and floating[0].requires_grad
