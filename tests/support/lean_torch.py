"""Leaves out parts of torch that small jobs load and make no use of: import this before torch.

torch itself imports its descriptions of operators for compilers and exports, every optimizer torch's compiler, every
backward pass of an inner stage the algebra of symbolic sizes: together they take longer than all the rest of torch and
DeepSpeed. The jobs of ``train.py`` and its like compile nothing, and all their sizes are numbers.
"""

from __future__ import annotations

import gc
import operator
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

#: Other versions need these parts in other places. A forked process has all of torch already.
KNOWN = metadata.version("torch").startswith("2.13.") and metadata.version("deepspeed") == "0.19.8"
LEAN = KNOWN and "torch" not in sys.modules
_installed = False

if LEAN:
    for _name in ("torch._meta_registrations", "torch.export"):
        sys.modules[_name] = ModuleType(_name)
gc.disable()  # it would look at all that is being imported again and again
import deepspeed  # noqa: E402, F401
import torch  # noqa: E402
import torch._prims.rng_prims  # noqa: E402  # the descriptions would have: no torch.Generator without it

gc.enable()


def install() -> None:
    """Put stand-ins in the places of what is not imported yet, once; whatever else is asked of them is an error."""
    global _installed
    if not LEAN or _installed:
        return
    _installed = True
    compiler = ModuleType("torch._dynamo")
    compiler.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    compiler.graph_break = lambda *_, **__: None  # type: ignore[attr-defined]
    compiler.trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # type: ignore[attr-defined]
    sizes = ModuleType("torch.fx.experimental.symbolic_shapes")
    sizes.sym_eq, sizes.expect_true = operator.eq, bool  # type: ignore[attr-defined]
    for module in (compiler, sizes):
        assert module.__name__ not in sys.modules, "too late"
        sys.modules[module.__name__] = module
    torch._dynamo = compiler  # type: ignore[assignment]
    # DeepSpeed's module of the optimizer Muon, which ZeRO loads, decorates functions that nothing here calls.
    torch.compile = lambda function=None, **_: function or (lambda decorated: decorated)  # type: ignore[assignment]
