"""The documentation as a program sees it: pages, headings, links, code, and the lists that are made from the code.

``python -m tests.support.docs`` (``make docs``) writes these lists anew, and lets links follow functions that have
moved to another file.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel

from bamboo_ds.cli.main import cli
from bamboo_ds.config import BambooConfig
from bamboo_ds.observe.events import Consumed, Event, EventBase

ROOT = Path(__file__).resolve().parents[2]
_GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end of generated -->)", re.DOTALL)
_FENCED = re.compile(r"^ *```[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """All pages for users and developers."""
    return [ROOT / "README.md", ROOT / "configs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Link:
    """A link of a page, as it is written there."""

    page: Path
    text: str
    target: str

    @property
    def file(self) -> Path:
        """The file that it leads to."""
        name = self.target.partition("#")[0]
        return (self.page.parent / name).resolve() if name else self.page

    @property
    def anchor(self) -> str:
        """The heading that it leads to; empty if none is named."""
        return self.target.partition("#")[2]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: [{self.text}]({self.target})"


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return _FENCED.sub("", page.read_text())


def code_blocks(page: Path) -> list[str]:
    """The blocks of code of a page."""
    return _FENCED.findall(page.read_text())


def code_spans(page: Path) -> list[str]:
    """What a page sets in type of code within its text."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: Path) -> list[Link]:
    """The links of a page that lead into the repository."""
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", prose(page))
    return [Link(page, text, target) for text, target in found if not re.match(r"\w+:", target)]


@cache
def headings(page: Path) -> dict[str, str]:
    """Text of every heading of a page, by its anchor (as GitHub names them)."""
    found: dict[str, str] = {}
    for line in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        again = sum(known == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", known) is not None for known in found)
        found[f"{slug}-{again}" if again else slug] = text
    return found


@cache
def definitions(file: Path) -> frozenset[str]:
    """What a module defines: ``name``, and ``Class.name`` for what its classes define."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        for name in _names(node):
            found.add(name)
            if isinstance(node, ast.ClassDef):
                found.update(f"{name}.{inner}" for each in node.body for inner in _names(each))
    return frozenset(found)


@cache
def places(last: str) -> list[tuple[str, Path]]:
    """What the package defines by a name whose last part is ``last``, and where."""
    files = sorted((ROOT / "bamboo_ds").rglob("*.py"))
    return [(name, file) for file in files for name in sorted(definitions(file)) if name.rpartition(".")[2] == last]


def successors(link: Link) -> list[tuple[str, Path]]:
    """What a link to code that :func:`is_undefined` may mean: the same name in other files, else others like it."""
    name = link.text.strip("`")
    found = places(name.rpartition(".")[2])
    return [each for each in found if each[0] == name] or found


def is_undefined(link: Link) -> bool:
    """Whether a link to code names what is not defined in the file that it leads to."""
    return link.target.endswith(".py") and not (link.file.is_file() and link.text.strip("`") in definitions(link.file))


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def commands() -> dict[str, click.Command]:
    """The commands of ``bamboo``, by name."""
    demo: click.Command = importlib.import_module("bamboo_ds.cli.demo.command").demo
    return {**cli.commands, "demo": demo}


def options_of(command: click.Command) -> list[click.Option]:
    """The options of a command, and of the commands that it has itself."""
    further = command.commands.values() if isinstance(command, click.Group) else ()
    return [each for part in (command, *further) for each in part.params if isinstance(each, click.Option)]


def settings_markdown() -> str:
    """The settings with their defaults, made from the models."""
    rows: list[str] = []

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            annotation = field.annotation
            # On Python 3.10 `tuple[int]` is an instance of `type`, but no class.
            if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
                walk(annotation, f"{prefix}{name}.")
                continue
            default = field.default.value if isinstance(field.default, Enum) else field.default
            rows.append(f"- `{prefix}{name}` (`{json.dumps(default)}`): {field.description}")

    walk(BambooConfig, "")
    return "\n".join(rows)


def events_markdown() -> str:
    """All kinds of events."""
    return "\n".join(f"- `{_kind(model)}`: {_told(model)}" for model in get_args(Event))


def events_schema() -> str:
    """A JSON schema of a line of events: the fields that all kinds have, then those of each."""
    kinds = {_kind(model): {"description": _told(model), **_fields(model)} for model in get_args(Event)}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "description": "A line of a file of events; written by `make docs` from bamboo_ds/observe/events.py",
        "type": "object",
        **_fields(EventBase),
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds],
        "unevaluatedProperties": False,
        "$defs": {
            **kinds,
            "consumed": {"description": _told(Consumed), "type": "object", **_fields(Consumed)},
            **_NUMBER,
        },
    }
    return _written(schema) + "\n"


def _kind(model: type[EventBase]) -> str:
    kind: str = model.model_fields["event"].default
    return kind


def _told(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    """The fields of a model, but for those that all events have, as a JSON schema."""
    own = {name: info for name, info in model.model_fields.items() if model is EventBase or name not in _OF_ALL}
    properties = {
        info.alias or name: {**_type(info.annotation), "description": info.description} for name, info in own.items()
    }
    if issubclass(model, EventBase) and model is not EventBase:
        properties = {"event": {"const": _kind(model)}, **properties}
    return {"properties": properties, "required": list(properties)}


_OF_ALL = frozenset(EventBase.model_fields)
_TYPES = {str: "string", bool: "boolean", int: "integer", datetime: "string"}
_NOT_FINITE = {"enum": ["NaN", "Infinity", "-Infinity"]}
_NUMBER = {"number": {"description": "one that is not finite is text", "anyOf": [{"type": "number"}, _NOT_FINITE]}}


def _type(kind: Any) -> dict[str, Any]:
    """The JSON schema of a field's type."""
    if kind in (Consumed, float):
        return {"$ref": f"#/$defs/{'number' if kind is float else 'consumed'}"}
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        return {"anyOf": [_type(part) for part in inner]}
    if origin is tuple:
        return {"type": "array", "items": _type(inner[0]), "minItems": len(inner), "maxItems": len(inner)}
    if origin is list:
        return {"type": "array", "items": _type(inner[0])}
    return {"type": "null" if kind is type(None) else _TYPES[kind]}


def _written(schema: dict[str, Any], indent: str = "") -> str:
    """A JSON schema with a line for each field."""
    if ("description" in schema and "properties" not in schema) or not any(
        isinstance(v, dict) for v in schema.values()
    ):
        return json.dumps(schema)
    inner = indent + "  "
    lines = [
        f"{inner}{json.dumps(name)}: {_written(v, inner) if isinstance(v, dict) else json.dumps(v)}"
        for name, v in schema.items()
    ]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


@dataclass(frozen=True)
class StateLine:
    """A line of ``docs/state.md``: a state, what becomes of it, and the tests as ``file::test[parameters]``."""

    state: str
    treatment: str
    tests: list[str]


def states() -> list[StateLine]:
    """The lines of the lists in ``docs/state.md``."""
    text = (ROOT / "docs" / "state.md").read_text()
    found = re.findall(r"^- ([^*\n].*): \*\*(\w+)\*\*.* \((`[^()]+`)\)$", text, re.MULTILINE)
    return [StateLine(state, treatment, re.findall("`([^`]+)`", tests)) for state, treatment, tests in found]


def claims() -> set[str]:
    """The pages, by their paths below ``docs``, of which some test proves a claim: the marker ``claim``."""
    files = (ROOT / "tests").rglob("test_*.py")
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call))
    markers = (node for node in nodes if ast.unparse(node.func) == "pytest.mark.claim")
    return {ast.literal_eval(page) for node in markers for page in node.args}


def page_of(claim: str) -> Path:
    """The page that a marker ``claim`` names."""
    return ROOT / claim if claim == "README.md" else ROOT / "docs" / claim


LISTS = {
    "settings": settings_markdown,
    "events": events_markdown,
}
#: Files that are generated as a whole.
FILES = {ROOT / "docs" / "reference" / "events.schema.json": events_schema}


def generated(page: Path) -> dict[str, str]:
    """The generated parts of a page, by name, as they are there."""
    return {name: text for _, name, text, _ in _GENERATED.findall(page.read_text())}


def made(name: str) -> str:
    """The generated part ``name``, as it should be."""
    return LISTS[name]().strip() + "\n"


def followed(page: Path, text: str) -> str:
    """``text`` of a page, its links to functions leading where these are defined now, if that is one place."""
    for link in filter(is_undefined, links(page)):
        found = successors(link)
        if len(found) == 1 and found[0][0] == link.text.strip("`"):
            target = os.path.relpath(found[0][1], page.parent)
            text = text.replace(f"[{link.text}]({link.target})", f"[{link.text}]({target})")
    return text


if __name__ == "__main__":
    for page in pages():
        text = page.read_text()
        fresh = _GENERATED.sub(lambda found: found[1] + made(found[2]) + found[4], followed(page, text))
        if fresh != text:
            page.write_text(fresh)
            print(page.relative_to(ROOT))
    for file, content in FILES.items():
        if not file.is_file() or file.read_text() != content():
            file.write_text(content())
            print(file.relative_to(ROOT))
