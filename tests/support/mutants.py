"""Mutants of the schedule, each of which :mod:`tests.test_integers` should find.

python -m tests.support.mutants [--courses N] [--module NAME ...] [--line NUMBER ...]

A mutant differs in one place: a comparison, a sign, a bound, ``and`` for ``or``, ``min`` for ``max``, a condition that
is turned round, a sum to which nothing is added. Each runs in a process of its own, forked from one that has imported
torch and DeepSpeed. The list that it prints ends with the survivors: what no job on integers has noticed.
"""

from __future__ import annotations

import ast
import copy
import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import click

ROOT = Path(__file__).parents[2]
MODULES = ("orders", "program", "progress", "redundant", "settling", "spans", "syncing")
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SURVIVED, _FOUND = 0, 1


def mutants(tree: ast.Module) -> Iterator[tuple[int, str, ast.Module]]:
    """Line, what is different, and the module."""
    places = [node for node in ast.walk(tree) if _changes(node)]
    for place in places:
        for number in range(len(_changes(place))):
            mutated = copy.deepcopy(tree)
            twin = next(
                node for node, original in zip(ast.walk(mutated), ast.walk(tree), strict=True) if original is place
            )
            before = ast.unparse(place)
            _changes(twin)[number]()
            after = ast.unparse(twin)
            ast.fix_missing_locations(mutated)
            first = before.splitlines()[0]
            yield place.lineno, f"{first[:70]} -> {after.splitlines()[0][:70]}", mutated  # type: ignore[attr-defined]


def _changes(node: ast.AST) -> list[Any]:
    """What could be different in ``node``."""
    if isinstance(node, ast.Compare):
        return [lambda at=at: _compare(node, at) for at, op in enumerate(node.ops) if type(op) in _COMPARISONS]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return [lambda: setattr(node, "op", _OPERATORS[type(node.op)]())]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [lambda step=step: setattr(node, "value", node.value + step) for step in (-1, 1)]
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        return [lambda: setattr(node, "op", other())]
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return [lambda: setattr(node, "id", _NAMES[node.id])]
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return [lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))]
    if isinstance(node, ast.AugAssign):
        return [lambda: setattr(node, "value", ast.BinOp(node.value, ast.Mult(), ast.Constant(0)))]
    return []


def _compare(node: ast.Compare, at: int) -> None:
    node.ops[at] = _COMPARISONS[type(node.ops[at])]()


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a tree."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self._name, self._tree = name, tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, f"<mutant of {self._name}>", "exec"), module.__dict__)


def found(name: str, tree: ast.Module, courses: int, limit_s: float) -> bool:
    """Whether a mutant fails in one of so many courses, ends in no time, or cannot be imported."""
    child = os.fork()
    if not child:
        code = _FOUND
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.meta_path.insert(0, _Mutated(name, tree))
            from tests.test_integers import course

            for seed in range(courses):
                course(seed)
            code = _SURVIVED
        finally:
            os._exit(code)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) != _SURVIVED
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return True


@click.command()
@click.option("--courses", default=300, show_default=True, help="Jobs on integers that each mutant is tried by.")
@click.option("--limit", "limit_s", default=120.0, show_default=True, help="Seconds after which one counts as found.")
@click.option("--module", "modules", multiple=True, default=MODULES, show_default=True)
@click.option("--line", "lines", type=int, multiple=True, help="Only those of these lines.")
def main(courses: int, limit_s: float, modules: Sequence[str], lines: Sequence[int]) -> None:
    """Say which mutants of the schedule are not found."""
    import deepspeed  # noqa: F401  # before it forks
    import torch  # noqa: F401

    assert not any(name.startswith("bamboo_ds.schedule") for name in sys.modules)
    total, survivors = 0, []
    for module in modules:
        tree = ast.parse((ROOT / "bamboo_ds" / "schedule" / f"{module}.py").read_text())
        for line, what, mutated in mutants(tree):
            if lines and line not in lines:
                continue
            total += 1
            if not found(f"bamboo_ds.schedule.{module}", mutated, courses, limit_s):
                survivors.append(f"{module}.py:{line}: {what}")
                click.echo(f"survives: {survivors[-1]}")
        click.echo(f"{module}: {total} tried so far, {len(survivors)} survive")


if __name__ == "__main__":
    main()
