"""Bytes that live in tensors, by what holds them, and in the process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


class _Saved:
    """A tensor that autograd saved for a backward pass; lives exactly as long as the graph holds it."""

    __slots__ = ("__weakref__", "redundant", "tensor")

    def __init__(self, tensor: torch.Tensor, redundant: bool) -> None:
        self.tensor, self.redundant = tensor, redundant


class Meter:
    """Samples one engine, stock's or bamboo's, after every pass and before its commit (stock: its step).

    Tensors are found by walking the garbage collector's objects. Autograd holds its saved tensors out of its sight:
    those are followed by hooks. Each storage counts once, for the first of the categories that holds it.
    """

    #: Iterations before the first that counts: the optimizer makes its state in the first step.
    WARM_UP = 3

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._process = psutil.Process()
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._static: list[weakref.ref[torch.Tensor]] = []
        self._counts = False
        self._peak: dict[str, int] = {}
        self._commit: dict[str, int] = {}
        handlers = dict(engine.HANDLERS)
        names = {kind.__name__: kind for kind in handlers}
        last = names.get("Commit", names["OptimizerStep"])
        handlers[last] = self._before(handlers[last])
        for name in ("ForwardPass", "BackwardPass"):
            handlers[names[name]] = self._after(handlers[names[name]])
        type(engine).HANDLERS = handlers
        if hasattr(engine, "_parts"):
            redundant = type(engine._parts.iteration.redundant)
            redundant.run = self._after(redundant.run)

    @contextmanager
    def iteration(self, step: int) -> Iterator[None]:
        """Measure an iteration."""
        if step == self.WARM_UP:
            gc.collect()
            self._static = [weakref.ref(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)]
            # Later walks see only what is younger.
            gc.freeze()
            self._counts = True
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def _binding(self) -> Any:
        """The roles of bamboo's engine; ``None``: it is stock's."""
        parts = getattr(self._engine, "_parts", None)
        return None if parts is None else parts.binding

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        binding = self._binding()
        saved = _Saved(tensor.detach(), binding is not None and not binding.current.owned)
        self._saved.add(saved)
        return saved

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            if self._counts:
                self._commit = self._largest(self._commit, self._sample())
            return call(*arguments, **keywords)

        return run

    def _after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            result = call(*arguments, **keywords)
            if self._counts:
                self._peak = self._largest(self._peak, self._sample())
            return result

        return run

    @staticmethod
    def _largest(known: dict[str, int], sample: dict[str, int]) -> dict[str, int]:
        return {name: max(value, known.get(name, 0)) for name, value in sample.items()}

    def _sample(self) -> dict[str, int]:
        """Bytes by category."""
        seen: set[int] = set()

        def count(tensors: Iterable[Any]) -> int:
            total = 0
            for tensor in tensors:
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
            return total

        sizes: dict[str, int] = {}
        binding = self._binding()
        if binding is None:
            sizes.update(self._state("", count, self._engine.module, self._engine.optimizer, ()))
        else:
            binding.refresh()
            for runtime in sorted(binding.runtimes.values(), key=lambda r: not r.owned):
                reduced = runtime.reduced or ()
                optimizer = runtime.attributes["optimizer"]
                prefix = "" if runtime.owned else "replica "
                sizes.update(self._state(prefix, count, runtime.module, optimizer, reduced))
            kept = [
                t
                for r in binding.runtimes.values()
                for p in r.parts
                for t in (*p.activations.values(), *p.gradients.values())
            ]
            sizes["boundary"] = count(t for x in kept for t in (x if isinstance(x, tuple) else (x,)))
        sizes["saved"] = count(s.tensor for s in list(self._saved) if not s.redundant)
        sizes["redundant saved"] = count(s.tensor for s in list(self._saved) if s.redundant)
        young = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        sizes["other"] = count([*young, *(reference() for reference in self._static)])
        memory = self._process.memory_full_info()
        return {**sizes, "tensors": sum(sizes.values()), "rss": memory.rss, "uss": memory.uss}

    @staticmethod
    def _state(
        prefix: str, count: Callable[[Iterable[Any]], int], module: Any, optimizer: Any, reduced: Iterable[Any]
    ) -> dict[str, int]:
        parameters = list(module.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        # DeepSpeed's optimizers for half precision and ZeRO keep masters and buffers of gradients besides.
        wraps = hasattr(optimizer, "optimizer")
        kept = {name: list(_tensors(value)) for name, value in vars(optimizer).items()} if wraps else {}
        summed = [tensor for name, tensors in kept.items() if "grad" in name for tensor in tensors]
        masters = [tensor for name, tensors in kept.items() if "grad" not in name for tensor in tensors]
        return {
            f"{prefix}parameters": count(parameters),
            f"{prefix}gradients": count([*(p.grad for p in parameters), *summed, *reduced]),
            f"{prefix}optimizer": count([*states, *masters]),
        }

    def result(self) -> dict[str, Any]:
        """Largest sizes in bytes at the commit and after passes; parameters of this member's own stage."""
        own = sum(p.numel() for p in self._engine.module.parameters())
        return {"parameters": own, "commit": self._commit, "peak": self._peak}
