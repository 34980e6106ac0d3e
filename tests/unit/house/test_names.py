"""Attributes of a script's tensors and layers may have any name: this package calls no method of theirs by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bamboo_ds
from bamboo_ds.bare import bare

pytestmark = pytest.mark.claim("contributing.md", "reference/guarantees.md")

PACKAGE = Path(bamboo_ds.__file__).parent
#: What tensors are called that scripts have made. Others are this package's own.
SCRIPTS = {"p", "param", "parameter", "buffer", "tensor", "t", "leaf", "weight", "payload", "output"}
LAYERS = {"layer"}


def methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("__") and callable(getattr(kind, name))}


#: Methods that a layer defines itself to be called, as DeepSpeed and torch do.
DEFINED = {"forward", "get_extra_state", "set_extra_state"}
FORBIDDEN = {
    **dict.fromkeys(SCRIPTS, methods(torch.Tensor)),
    **dict.fromkeys(LAYERS, methods(torch.nn.Module) - DEFINED),
}


def by_name(code: str) -> Iterator[tuple[int, str]]:
    """Lines that call a method of something of the script's by its name, and what they call."""
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = node.func.value
        name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
        if node.func.attr in FORBIDDEN.get(name, ()):
            yield node.lineno, f"{name}.{node.func.attr}"


def test_no_method_of_what_a_script_has_made_is_called_by_its_name() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, call in by_name(path.read_text())
    ]
    assert not found, f"bare(tensor).method(...), or torch.nn.Module.method(layer, ...): {found}"


def test_the_rule_sees_calls() -> None:
    code = "x = parameter.stride()\ny = bare(parameter).stride()\nz = self.parameter.numel()\nlayer.modules()\n"
    assert list(by_name(code)) == [(1, "parameter.stride"), (3, "parameter.numel"), (4, "layer.modules")]


def test_a_bare_tensor_is_the_same_memory() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.copy_ = parameter.stride = 1  # type: ignore[assignment]
    before = parameter._version
    bare(parameter).copy_(torch.ones(2))
    assert parameter._version == before + 1 and bare(parameter).stride() == (1,)
    assert parameter.tolist() == [1.0, 1.0] and not bare(parameter).requires_grad
