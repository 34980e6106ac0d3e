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
from collections import Counter
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
#: Commands that start members, whose options the documentation lists.
_STARTING = {"run", "join", "launch"}
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


def options_markdown() -> str:
    """The options of the commands that start members: those that several commands share, then those of each alone."""
    shown = {
        name: [_option(each) for each in options_of(command) if not each.hidden]
        for name, command in sorted(commands().items())
    }
    owners: dict[str, tuple[str, ...]] = {}
    for name in shown:
        for option in shown[name]:
            owners[option] = (*owners.get(option, ()), name)
    lines: list[str] = []
    for names in sorted(set(owners.values()), key=lambda names: (len(names) == 1, names)):
        if not _STARTING & set(names):
            continue
        heading = f"Of {', '.join(names)}" if len(names) > 1 else f"`bamboo {names[0]}`"
        lines += [f"### {heading}", "", *(option for option, of in owners.items() if of == names), ""]
    return "\n".join(lines)


def _option(option: click.Option) -> str:
    """An option: its spellings, and its meaning with the default and the variable, or the setting that it gives."""
    spelled = ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts))
    meaning = " ".join((option.help or "").split())
    told = re.search(r" \[default: (.*)\]$", meaning)
    default = told[1] if told else f"`{option.default}`" if option.show_default and not option.is_flag else ""
    meaning = meaning[: told.start()] if told else meaning
    setting = re.search(r"In place of bamboo\.([\w.]+)\.$", meaning)
    meaning = f"`{setting[1]}` of the block." if setting else meaning
    notes = [default] if default else []
    notes += [f"`{option.envvar}`"] if option.envvar else []
    return f"- {spelled}: {meaning}{' (' + '; '.join(notes) + ')' if notes else ''}"


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


def schema_markdown() -> str:
    """All kinds of events and their fields. What more than three kinds have alike is described once."""
    models = [model for model in get_args(Event)]
    own = {model: [name for name in model.model_fields if name not in EventBase.model_fields] for model in models}
    uses = Counter(_field(name, model) for model in models for name in own[model])
    shared = {line for line, times in uses.items() if times > 3}
    lines = ["### Of every event", "", *(_field(name, EventBase) for name in EventBase.model_fields), ""]
    lines += ["### Of several events", "", *(line for line in uses if line in shared), ""]
    lines += ["### `consumed`", "", "A field of `step` and `recovered`, `null` without `observe.checksums`:", ""]
    lines += [*(_field(name, Consumed) for name in Consumed.model_fields), ""]
    for model in models:
        lines += [f"### `{model.model_fields['event'].default}`", "", " ".join((model.__doc__ or "").split()), ""]
        lines += [line for name in own[model] if (line := _field(name, model)) not in shared]
        known = [f"`{name}`" for name in own[model] if _field(name, model) in shared]
        lines += [f"- {', '.join(known)}", ""] if known else [""]
    return "\n".join(lines)


def _field(name: str, model: type[BaseModel]) -> str:
    info = model.model_fields[name]
    return f"- `{info.alias or name}` ({_type_name(info.annotation)}): {info.description}"


def _type_name(kind: Any) -> str:
    """The JSON name of a field's type, with ``?`` where it may be null."""
    if kind is Consumed:
        return "`consumed`"
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(str(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in inner if part is not type(None)) + "?" * (type(None) in inner)
    if origin is tuple:
        return f"[{','.join(map(_type_name, inner))}]"
    if origin is list:
        return f"[{_type_name(inner[0])}…]"
    names = {str: "string", bool: "bool", int: "int", float: "float", datetime: "string"}
    return names[kind]


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


def claims() -> dict[str, list[str]]:
    """The files of tests that prove what a page claims, by the page's path below ``docs``: the marker ``claim``."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.claim":
                for page in map(ast.literal_eval, node.args):
                    found.setdefault(page, []).append(file.relative_to(ROOT / "tests").as_posix())
    return found


def page_of(claim: str) -> Path:
    """The page that a marker ``claim`` names."""
    return ROOT / claim if claim == "README.md" else ROOT / "docs" / claim


def claims_markdown() -> str:
    """Which tests prove what a page claims: the names of a folder's files in braces, as shells read them."""
    lines = []
    for claim, files in sorted(claims().items()):
        target = os.path.relpath(page_of(claim), ROOT / "docs")
        names: dict[str, list[str]] = {}
        for file in files:
            folder, _, name = file.rpartition("test_")
            names.setdefault(folder, []).append(name.removesuffix(".py"))
        braced = ((folder, f"{{{','.join(own)}}}" if len(own) > 1 else own[0]) for folder, own in names.items())
        lines.append(f"- [{claim}]({target}): {', '.join(f'`{folder}test_{own}.py`' for folder, own in braced)}")
    return "\n".join(lines)


LISTS = {
    "claims": claims_markdown,
    "settings": settings_markdown,
    "events": schema_markdown,
    "options": options_markdown,
}


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
