"""The documentation names only what exists: files, headings, functions, commands, options, settings; its generated
lists are those of the code."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import click
import pytest

from tests.support.docs import (
    FILES,
    LISTS,
    ROOT,
    Link,
    code_blocks,
    code_spans,
    commands,
    generated,
    headings,
    is_undefined,
    links,
    made,
    options_of,
    pages,
    settings_markdown,
    successors,
)

pytestmark = pytest.mark.claim("contributing.md", "reference/events.md", "reference/settings.md")

#: Settings of DeepSpeed's that are in a block of a name that ours has, too.
_DEEPSPEEDS = {"checkpoint.writer", "checkpoint.load_universal"}
#: First words of the lines in blocks of code that are looked at.
_PROGRAMS = {"bamboo", "make", ".venv/bin/python"}


@pytest.fixture(params=pages(), ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@cache
def package() -> str:
    """All of the package's code."""
    return "\n".join(file.read_text() for file in (ROOT / "bamboo_ds").rglob("*.py"))


@cache
def settings() -> set[str]:
    """Names of all settings."""
    return set(re.findall(r"^- `([\w.]+)`", settings_markdown(), re.MULTILINE))


def is_dead(link: Link) -> bool:
    if not link.file.exists():
        return True
    return bool(link.anchor) and link.anchor not in headings(link.file)


def test_links_lead_somewhere(page: Path) -> None:
    dead = [str(link) for link in links(page) if is_dead(link)]
    assert not dead, "\n".join(dead)


def test_names_of_functions_are_defined_where_their_links_lead(page: Path) -> None:
    missing = []
    for link in filter(is_undefined, links(page)):
        like = [f"{name} in {file.relative_to(ROOT)}" for name, file in successors(link)]
        missing.append(f"{link}: {', '.join(like) or 'nothing of this name is left'}")
    assert not missing, "`make docs` follows what was moved:\n" + "\n".join(missing)


@pytest.mark.parametrize(("name", "least"), [("takeover", 30), ("change-map", 20), ("fencing", 8)])
def test_maps_of_the_code_name_functions(name: str, least: int) -> None:
    assert len([link for link in links(ROOT / "docs" / f"{name}.md") if link.file.suffix == ".py"]) >= least


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = {link.file for each in new for link in links(each) if link.file.suffix == ".md"} - reached
    assert set(pages()) <= reached, set(pages()) - reached


def test_generated_lists_are_those_of_the_code() -> None:
    found = {name: text for each in pages() for name, text in generated(each).items()}
    assert set(found) == set(LISTS)
    stale = [name for name, text in found.items() if text != made(name)]
    stale += [file.name for file, content in FILES.items() if file.read_text() != content()]
    assert not stale, f"run `make docs`: {', '.join(stale)}"


def lines_of(block: str) -> list[list[str]]:
    """The commands in a block of code, in words, without comments; with prompts, only what follows one."""
    lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found = []
    for line in prompted or lines:
        text = re.sub(r"^(\w+=\S+ )+", "", line).removesuffix(" &")
        if text.split(" ")[0] in _PROGRAMS:
            found.append(shlex.split(text.replace("…", ""), comments=True))
    return found


def wrong_options(words: list[str]) -> str | None:
    """What is wrong with the words after ``bamboo``."""
    name, *arguments = words
    command = commands().get(name)
    if command is None:
        return f"there is no command {name}"
    if "--help" in arguments:
        return None
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        command.make_parser(context).parse_args(arguments)
    except click.UsageError as error:
        return error.format_message()
    return None


def wrong(words: list[str]) -> str | None:
    """What is wrong with a command of a page."""
    program, *arguments = words
    if program == "bamboo":
        return wrong_options(arguments)
    if program == "make":
        rules = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return None if arguments[0] in rules else f"the Makefile has no target {arguments[0]}"
    if arguments[0] == "-m":
        return None
    file = ROOT / arguments[0]
    if not file.is_file():
        return f"there is no {arguments[0]}"
    shared = file.with_name("bench.py")  # which has the options of all experiments of its folder
    text = file.read_text() + (shared.read_text() if shared.exists() else "")
    unknown = [a for a in arguments[1:] if a.startswith("--") and a != "--help" and f'"{a}"' not in text]
    return f"{arguments[0]} has no {unknown}" if unknown else None


def test_commands_in_blocks_of_code_exist(page: Path) -> None:
    found = [(words, wrong(words)) for block in code_blocks(page) for words in lines_of(block)]
    problems = [f"{shlex.join(words)}: {problem}" for words, problem in found if problem]
    assert not problems, "\n".join(problems)


def test_wrong_commands_would_be_found() -> None:
    block = "\n".join(
        [
            "bamboo run -n 4 --chek-exact 3 train.py --anything",
            "bamboo rum -n 4 train.py",
            "make demonstration   # of all",
            ".venv/bin/python benchmarks/nothing.py",
            ".venv/bin/python benchmarks/soak.py --fault 3",
            "bamboo run -n 4 --check-exact 3 train.py --anything",
        ]
    )
    assert [wrong(words) is not None for words in lines_of(block)] == [True] * 5 + [False]


def test_commands_in_text_exist(page: Path) -> None:
    problems = []
    for span in code_spans(page):
        words = re.sub(r"[\[\]…]|\.\.\.", " ", span).split(" -- ")[0].split()
        if len(words) > 1 and words[0] == "make" and (problem := wrong(words)):
            problems.append(f"{span}: {problem}")
        if len(words) > 1 and words[0] == "bamboo":
            command = commands().get(words[1])
            known = {name for option in options_of(command) for name in option.opts} if command else set()
            if command is None or {word for word in words if word.startswith("-")} - known - {"--help", "--"}:
                problems.append(span)
    assert not problems, "\n".join(problems)


def test_every_command_has_its_line() -> None:
    listed = re.findall(r"^- `bamboo \w.*", (ROOT / "docs" / "reference" / "cli.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`bamboo (\w+)", "\n".join(listed))) == sorted(commands())


def test_settings_variables_and_files_in_text_exist(page: Path) -> None:
    blocks = {name.partition(".")[0] for name in settings() if "." in name}
    problems = []
    for span in code_spans(page):
        named = re.match(r"(\w+)\.(?!py\b)\w+", span)
        if named and named[1] in blocks and named[0] not in settings() | _DEEPSPEEDS:
            problems.append(f"there is no setting {named[0]}")
        if re.fullmatch(r"(bamboo_ds|benchmarks|configs|tests)/[\w./-]+", span) and not (ROOT / span).exists():
            problems.append(f"there is no file {span}")
        variables = re.findall(r"BAMBOO_[A-Z_]+", span)
        problems += [f"there is no variable {name}" for name in variables if f'"{name}"' not in package()]
    assert not problems, "\n".join(problems)


def is_known(dotted: str) -> bool:
    """Whether a dotted name is a module of the package, or something that one has."""
    parts = dotted.split(".")
    while parts:
        file = ROOT.joinpath(*parts)
        for module in (file.with_suffix(".py"), file / "__init__.py"):
            if module.is_file():
                rest = dotted.removeprefix(".".join(parts)).lstrip(".")
                return re.search(rf"\b{rest}\b", module.read_text()) is not None
        parts.pop()
    return False


def test_dotted_names_exist(page: Path) -> None:
    named = set(re.findall(r"\bbamboo_ds(?:\.\w+)+", page.read_text()))
    unknown = sorted(name for name in named if not is_known(name))
    assert not unknown, ", ".join(unknown)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
