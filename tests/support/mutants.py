"""Mutants of the schedule: each is found by jobs on integers or by another test, or is known to make no difference.

python -m tests.support.mutants [--courses N] [--module NAME ...] [--function NAME ...]

A mutant differs in one place: a comparison, a sign, a bound, ``and`` for ``or``, ``min`` for ``max``, a condition that
is turned round, a sum to which nothing is added. Each runs in a process of its own, forked from one that has imported
everything. What the courses of :mod:`tests.model.test_integers` do not notice the other tests of the module get. It
fails where a mutant survives that :data:`.survivors.SURVIVORS` does not explain, or one is found that is listed there.
"""

from __future__ import annotations

import ast
import copy
import importlib
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import click
import pytest

from ..model.test_integers import course, elastic, moving
from .survivors import SURVIVORS

ROOT = Path(__file__).parents[2]
#: Modules, with the tests that notice what takes longer, or is refused, but leads to the same sums.
TESTS = {
    "settling": ("tests/unit/schedule/test_resume.py", "tests/unit/engine/test_sums.py"),
    "program": ("tests/unit/schedule/test_schedule.py",),
    "progress": (
        "tests/unit/schedule/test_decide.py",
        "tests/unit/schedule/test_schedule.py",
        "tests/unit/schedule/test_resume.py",
        "tests/unit/topology/test_slices.py",
    ),
    "orders": ("tests/unit/schedule/test_orders.py", "tests/unit/schedule/test_schedule.py"),
    "spans": (
        "tests/unit/schedule/test_tight.py",
        "tests/unit/schedule/test_orders.py",
        "tests/unit/schedule/test_schedule.py",
    ),
    "redundant": ("tests/unit/schedule/test_schedule.py",),
    "syncing": ("tests/unit/engine/test_sums.py",),
    "rehearsal": ("tests/unit/engine/test_exactness.py",),
    "timing": ("tests/unit/simulate/test_simulate.py",),
}
#: Seconds of a processor after which a mutant counts as found, as something never ends: of courses, and of all.
COURSES_S, LIMIT_S = 30, 150
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
_BY_COURSES, _BY_TESTS, _SURVIVED = 1, 2, 0


@dataclass(frozen=True)
class Mutant:
    """A module that differs in one place.

    Attributes:
        function: where, with the module.
        change: the line as it was and as it is.
        original: the module.
        before, after: the smallest statement in it that differs.
    """

    function: str
    change: str
    original: ast.Module
    before: ast.stmt
    after: ast.stmt

    def tree(self) -> ast.Module:
        """The module that differs."""
        found: ast.Module = _Exchange(self.before, self.after).visit(self.original)
        return ast.fix_missing_locations(found)


def mutants(module: str) -> Iterator[Mutant]:
    """All of a module of the schedule."""
    tree = ast.parse((ROOT / "bamboo_ds" / "schedule" / f"{module}.py").read_text())
    for function, statement, path in _places(tree, module):
        node = _at(statement, path)
        for number in range(len(_changes(node))):
            mutated = copy.deepcopy(statement)
            _changes(_at(mutated, path))[number]()
            lines = ast.unparse(statement).splitlines(), ast.unparse(mutated).splitlines()
            before, after = next(pair for pair in zip(*lines, strict=True) if pair[0] != pair[1])
            yield Mutant(function, f"{before.strip()} -> {after.strip()}", tree, statement, mutated)


def _places(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.stmt, list[int]]]:
    """Function, smallest statement, and way from that to each node that could be different."""

    def visit(
        node: ast.AST, above: ast.AST, names: tuple[str, ...], statement: ast.stmt | None, path: list[int]
    ) -> Iterator[Any]:
        if isinstance(node, ast.stmt):
            statement, path = node, []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(above, ast.ClassDef):
            return  # a field's default
        if statement is not None and _changes(node):
            yield ".".join(names), statement, path
        for number, child in enumerate(ast.iter_child_nodes(node)):
            if child not in getattr(node, "decorator_list", ()):  # sizes of caches
                yield from visit(child, node, names, statement, [*path, number])

    return visit(tree, tree, (module,), None, [])


def _at(node: Any, path: Sequence[int]) -> Any:
    for number in path:
        node = list(ast.iter_child_nodes(node))[number]
    return node


class _Exchange(ast.NodeTransformer):
    """One statement for another; what is above it is copied."""

    def __init__(self, old: ast.stmt, new: ast.stmt) -> None:
        self._old, self._new = old, new

    def visit(self, node: Any) -> Any:
        if node is self._old:
            return self._new
        if not isinstance(node, (ast.stmt, ast.mod, ast.ExceptHandler)):
            return node
        fields = {
            name: [self.visit(each) for each in value] if isinstance(value, list) else value
            for name, value in ast.iter_fields(node)
        }
        return ast.copy_location(type(node)(**fields), node)


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


def _become(module: ModuleType, tree: ast.Module) -> None:
    """Make the functions of a module, which others have imported, those of a mutant."""
    mutant = ModuleType(module.__name__)
    mutant.__package__ = module.__package__
    exec(compile(tree, f"<mutant of {module.__name__}>", "exec"), mutant.__dict__)
    for name, new in vars(mutant).items():
        old = vars(module)[name]
        if getattr(new, "__module__", module.__name__) != module.__name__:
            continue  # imported
        if isinstance(new, type):
            for attribute, method in vars(new).items():
                _transplant(vars(old)[attribute], method)
        elif not _transplant(old, new):
            setattr(module, name, new)


def _transplant(old: Any, new: Any) -> bool:
    """Have a function do what another one does; whether it is one."""
    for inner in ("__wrapped__", "func", "fget", "__func__"):
        if not isinstance(new, FunctionType) and isinstance(getattr(new, inner, None), FunctionType):
            old, new = getattr(old, inner), getattr(new, inner)
    if not isinstance(new, FunctionType):
        return False
    if not new.__code__.co_freevars:  # what dataclasses make is alike
        old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__
    return True


def found(module: ModuleType, mutant: Mutant, courses: int) -> int:
    """By what a mutant is found: it fails, waits for ever, or cannot be imported."""
    child = os.fork()
    if not child:
        code = _BY_COURSES
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (COURSES_S, LIMIT_S))
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            _become(module, mutant.tree())
            code = _tried(module, courses)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return _BY_COURSES if code < 0 else code  # killed where it never ends


def _tried(module: ModuleType, courses: int) -> int:
    """By what the module as it is now is found. Raises whatever a course raises."""
    for number in range(courses):
        for kind, every in ((course, 1), (moving, 1), (elastic, 3)):
            if number % every == 0:
                kind(7 * number)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    tests = TESTS[module.__name__.rpartition(".")[2]]
    options = ["-o", "addopts=", "-m", "not exhaustive", "-x", "-q", "-p", "no:cacheprovider"]
    return _BY_TESTS if pytest.main([*options, *tests]) else _SURVIVED


@click.command()
@click.option("--courses", default=300, show_default=True, help="Jobs on integers that each mutant is tried by.")
@click.option("--module", "modules", multiple=True, default=tuple(TESTS), show_default=True)
@click.option("--function", "functions", multiple=True, help="Only of these, as progress.decide.")
def main(courses: int, modules: Sequence[str], functions: Sequence[str]) -> None:
    """Say which mutants of the schedule are not found."""
    wrong, listed = 0, {(function, change) for function in SURVIVORS for change in SURVIVORS[function]}
    for module in modules:
        ways = Counter[int]()
        original = importlib.import_module(f"bamboo_ds.schedule.{module}")
        for mutant in mutants(module):
            if functions and mutant.function not in functions:
                continue
            way, known = found(original, mutant, courses), (mutant.function, mutant.change) in listed
            ways[way] += 1
            if (way == _SURVIVED) != known:
                wrong += 1
                click.echo(f"{'is found' if known else 'survives'}: {mutant.function}: {mutant.change}")
            elif way == _BY_TESTS:
                click.echo(f"by other tests: {mutant.function}: {mutant.change}")
        told = f"{ways[_BY_COURSES]} by courses, {ways[_BY_TESTS]} by other tests, {ways[_SURVIVED]} survive"
        click.echo(f"{module}: of {ways.total()} mutants {told}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
