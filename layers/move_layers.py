"""Move the tests into their layers: python move_layers.py LAYERS [ROOT]

Each line of LAYERS is ``tests/test_x.py PLACE [PLACE]``, places below ``tests/``. A second place is for those tests of
the file that start processes: the file is split. What both parts use stays in the first, and the second imports it from
there. All that names the files follows: imports, paths, docs, ``durations.json``, ``matrix.py``, the Makefile.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

LAYERS = Path(sys.argv[1])
ROOT = Path(sys.argv[2] if len(sys.argv) > 2 else ".").resolve()
TESTS = ROOT / "tests"
BIN = Path("/work/main/.venv/bin")
STARTERS = {"etcd", "fork_server", "own_etcd", "store", "start", "reference", "make_hosts", "trio"}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@dataclass
class Part:
    """A statement of a module with the comments before it."""

    node: ast.stmt
    text: str
    defines: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)

    @property
    def is_import(self) -> bool:
        return isinstance(self.node, (ast.Import, ast.ImportFrom))

    @property
    def test(self) -> str | None:
        name = getattr(self.node, "name", "")
        return name if isinstance(self.node, (ast.FunctionDef, ast.AsyncFunctionDef)) and name[:5] == "test_" else None

    @property
    def fixture(self) -> str:
        """``"auto"``, ``"fixture"`` or nothing."""
        told = " ".join(ast.unparse(d) for d in getattr(self.node, "decorator_list", ()))
        return "auto" if "autouse=True" in told else "fixture" if "fixture" in told else ""


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(each.asname or each.name).split(".")[0] for each in node.names}
    if isinstance(node, (ast.If, ast.With, ast.Try, ast.For)):
        return {name for each in ast.walk(node) if isinstance(each, ast.stmt) and each is not node for name in defined(each)}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def used(node: ast.stmt) -> set[str]:
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.arg):
            found.add(each.arg)  # a fixture
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.update(re.findall(r"\w+", each.value) if len(each.value) < 200 else ())  # usefixtures, quoted types
    return found


def parts_of(text: str) -> list[Part]:
    lines, begin, found = text.splitlines(keepends=True), 0, []
    for node in ast.parse(text).body:
        found.append(Part(node, "".join(lines[begin : node.end_lineno]), defined(node), used(node)))
        begin = node.end_lineno or 0
    return found


def begins(parts: list[Part]) -> dict[str, bool]:
    """Whether each test of a module starts processes."""
    by_name = {name: part for part in parts for name in part.defines if not part.is_import}
    marks = next((ast.unparse(p.node) for p in parts if "pytestmark" in p.defines), "")

    def starts(part: Part, seen: frozenset[str] = frozenset()) -> bool:
        told = " ".join(ast.unparse(d) for d in getattr(part.node, "decorator_list", ()))
        arguments = getattr(part.node, "args", None)
        names = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)} if arguments else set()
        names |= {name for name in re.findall(r"usefixtures\(([^)]*)\)", told) for name in re.findall(r"\w+", name)}
        if "mark.integration" in told or names & STARTERS:
            return True
        known = [by_name[n] for n in names - seen if n in by_name and by_name[n].fixture]
        return any(starts(each, seen | names) for each in known)

    auto = any(starts(p) for p in parts if p.fixture == "auto")
    everything = "mark.integration" in marks or auto
    for name in re.findall(r"usefixtures\(([^)]*)\)", marks):
        for each in re.findall(r"\w+", name):
            everything |= each in STARTERS or (each in by_name and starts(by_name[each]))
    return {part.test: everything or starts(part) for part in parts if part.test}


def closure(parts: list[Part], roots: list[Part]) -> set[int]:
    """Indices of what these need."""
    by_name = defaultdict(list)
    for index, part in enumerate(parts):
        for name in part.defines:
            by_name[name].append(index)
    needed: set[int] = set()
    left = [parts.index(root) for root in roots]
    while left:
        index = left.pop()
        if index in needed:
            continue
        needed.add(index)
        for name in parts[index].uses:
            left += [i for i in by_name.get(name, ()) if not parts[i].test]
    return needed


def main() -> None:
    table: dict[str, list[str]] = {}
    for line in LAYERS.read_text().splitlines():
        file, *places = line.split()
        if (ROOT / file).exists():
            table[Path(file).name] = places
    there = {path.name for path in TESTS.glob("test_*.py")}
    assert there <= table.keys(), f"no layer for {sorted(there - table.keys())}"

    where: dict[tuple[str, str], str] = {}  # (file, what it defines): place
    home: dict[str, str] = {}  # file: place of most of its tests
    written: dict[tuple[str, str], str] = {}  # (place, file): text
    for name, places in sorted(table.items()):
        text = (TESTS / name).read_text()
        parts = parts_of(text)
        starting = begins(parts)
        count = list(starting.values()).count
        # One or two tests beside more that start processes stay with these.
        if len(places) == 2 and count(True) and (count(False) > 2 or count(False) >= count(True)):
            first, second = places
            jobs = [p for p in parts if p.test and starting[p.test]]
            units = [p for p in parts if p.test and not starting[p.test]]
            always = [p for p in parts if p.fixture == "auto" or "pytestmark" in p.defines]
            of_units, of_jobs = closure(parts, units + always), closure(parts, jobs + always)
            # Fixtures that both need are in both: an imported one looks unused.
            # And imported ones are in ``__all__``.
            always = [i for i, part in enumerate(parts) if part.defines & {"pytestmark", "__all__"}]
            twice = [*always, *(i for i in of_units & of_jobs if parts[i].fixture and i not in always)]
            shared = sorted(
                n for i in of_units & of_jobs - set(twice) if not parts[i].is_import for n in parts[i].defines
            )
            upper, lower = [], []
            for index, part in enumerate(parts):
                header = part.is_import or index == 0 or index in twice
                only_jobs = part in jobs or (index in of_jobs and index not in of_units)
                if header or not only_jobs:
                    upper.append(part.text)
                if header or only_jobs:
                    lower.append(part.text)
                for defines in () if part.is_import else part.defines:
                    where[name, defines] = second if only_jobs else first
            if shared:
                module = f"tests.{first.replace('/', '.')}.{name[:-3]}"
                last = max(i for i, t in enumerate(lower) if any(p.text == t and p.is_import for p in parts))
                lower.insert(last + 1, f"from {module} import {', '.join(shared)}\n")
            for index in twice:
                if index not in always:
                    print(f"{name}: both parts have the fixture {parts[index].node.name}")
            written[first, name], written[second, name] = "".join(upper), "".join(lower)
            home[name] = second if len(jobs) > len(units) else first
        else:
            place = places[-1] if any(starting.values()) else places[0]
            written[place, name] = text
            home[name] = place
            where |= {(name, defines): place for part in parts for defines in part.defines if not part.is_import}
            if place.partition("/")[0] in ("unit", "model") and any(starting.values()):
                print(f"{name} starts processes, but is in {place}")

    def path_of(file: str, test: str | None) -> str:
        return f"{where.get((file, test or ''), home[file])}/{file}"

    def imports(match: re.Match[str]) -> str:
        """``from .test_x import names`` from where each of them is now."""
        file, names, rest = f"{match[1]}.py", match[2].strip("()\n "), match[3]
        by_place = defaultdict(list)
        for name in filter(None, (each.strip() for each in names.split(","))):
            by_place[where.get((file, name), home[file])].append(name)
        return "\n".join(
            f"from tests.{place.replace('/', '.')}.{match[1]} import {', '.join(names)}{rest}"
            for place, names in by_place.items()
        )

    known = "|".join(re.escape(file[:-3]) for file in sorted(home, key=len, reverse=True))

    def follow(text: str) -> str:
        """Names of tests in any text, as they are now."""
        text = re.sub(
            rf"\btests/({known})\.py(?:::(test_\w+))?",
            lambda m: f"tests/{path_of(m[1] + '.py', m[2])}" + (f"::{m[2]}" if m[2] else ""),
            text,
        )
        return re.sub(rf"\btests\.({known})\b", lambda m: f"tests.{home[m[1] + '.py'].replace('/', '.')}.{m[1]}", text)

    def modules(match: re.Match[str], text: str) -> str:
        """``from . import test_x`` from where all that is used of it is now."""
        lines = []
        for module in match[1].split(", "):
            file = f"{module}.py"
            attributes = set(re.findall(rf"\b{module}\.(\w+)", text))
            places = {where.get((file, name), home[file]) for name in attributes} or {home[file]}
            assert len(places) == 1, f"{module}: {attributes} are in {places}"
            lines.append(f"from tests.{places.pop().replace('/', '.')} import {module}")
        return "\n".join(lines)

    def moved(text: str, place: str) -> str:
        depth = place.count("/") + 1
        text = re.sub(r"^from \.support\b", "from tests.support", text, flags=re.MULTILINE)
        text = re.sub(r"^( +)from \.support\b", r"\1from tests.support", text, flags=re.MULTILINE)
        text = re.sub(
            rf"^ *from (?:\.|tests\.)({known}) import (\([^)]*\)|[^#\n]*[^#\s])(.*)$", imports, text, flags=re.MULTILINE
        )
        text = re.sub(r"^from \. import (test_.*)$", lambda m: modules(m, text), text, flags=re.MULTILINE)
        text = re.sub(
            r"(Path\(__file__\)(?:\.resolve\(\))?)\.parents\[(\d)\]", lambda m: f"{m[1]}.parents[{int(m[2]) + depth}]", text
        )
        text = text.replace("Path(__file__).parent.parent", f"Path(__file__).parents[{depth + 1}]")
        text = re.sub(r"Path\(__file__\)\.parent\b(?!s)", f"Path(__file__).parents[{depth}]", text)
        return text.replace('"../README.md"', f'"{"../" * (depth + 1)}README.md"')

    for name in table:
        first = next(place for place, file in written if file == name)
        (TESTS / first).mkdir(parents=True, exist_ok=True)
        git("mv", f"tests/{name}", f"tests/{first}/{name}")
    for (place, name), text in written.items():
        folder = TESTS / place
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(moved(text, place))
    for place in {place for place, _ in written}:
        folder = TESTS / place
        while folder != TESTS:
            (folder / "__init__.py").touch()
            folder = folder.parent

    git("add", "-A", "tests")
    for file in git("ls-files").split("\n"):
        path = ROOT / file
        if not file or not path.is_file() or path.suffix not in (".py", ".md", ".toml", ".txt", "", ".json", ".cpp"):
            continue
        if file == "tests/durations.json":
            continue
        try:
            before = path.read_text()
        except UnicodeDecodeError:
            continue
        after = follow(before)
        if file.startswith("tests/real/"):
            after = re.sub(rf"^from \.\.({known}) import ([^#\n]*[^#\s])(.*)$", imports, after, flags=re.MULTILINE)
        if file == "docs/state.md":
            after = re.sub(
                rf"`({known})\.py(::(test_\w+))?",
                lambda m: f"`{path_of(m[1] + '.py', m[3])}" + (m[2] or ""),
                after,
            )
        if after != before:
            after = broken(after) if path.suffix == ".py" else after
            path.write_text(wrapped(after, before) if path.suffix == ".md" and file != "docs/state.md" else after)

    durations = TESTS / "durations.json"
    kept = {}
    for node, seconds in json.loads(durations.read_text()).items():
        file, _, test = node.removeprefix("tests/").partition("::")
        if file in home:
            kept[f"tests/{path_of(file, test.partition('[')[0])}::{test}"] = seconds
        elif "/" in file:
            kept[node] = seconds
    durations.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n")

    conftest = TESTS / "conftest.py"
    text = conftest.read_text()
    text = text.replace(
        '#: Seconds that tests took when ``make test-times``',
        '#: Layers of tests that start no process.\n_WITHOUT = {"unit", "model"}\n'
        '#: Seconds that tests took when ``make test-times``',
    )
    text = text.replace(
        "    if session.ON_NCCL:\n",
        "    misplaced = [i.nodeid for i in items if i.get_closest_marker(\"integration\") and _layer(i) in _WITHOUT]\n"
        '    assert not misplaced, f"these start processes: {misplaced}"\n\n    if session.ON_NCCL:\n',
        1,
    )
    text = text.replace(
        "@pytest.hookimpl(wrapper=True)  # pytest-xdist asks",
        'def _layer(item: pytest.Item) -> str:\n    """The folder of a test below ``tests``."""\n'
        "    return item.path.relative_to(Path(__file__).parent).parts[0]\n\n\n"
        "@pytest.hookimpl(wrapper=True)  # pytest-xdist asks",
    )
    conftest.write_text(text)

    contributing = ROOT / "docs" / "contributing.md"
    contributing.write_text(
        contributing.read_text().replace(
            "Tests that start processes carry the mark `integration`",
            "Tests stand in layers, the lower the faster:\n\n"
            "- `tests/unit`: single parts, in folders named like the package's; no process\n"
            "- `tests/model`: many drawn courses of members, losses and etcds, simulated in one process\n"
            "- `tests/process`: the wire, etcd, agents and commands in processes of their own, without training\n"
            "- `tests/job`: jobs that train, each with several faults\n"
            "- `tests/exhaustive`: matrices of such jobs, most of which `make exhaustive` runs\n"
            "- `tests/real`: on the tools that users have\n\n"
            "Tests that start processes carry the mark `integration`",
        )
    )

    ruff = [str(BIN / "ruff")]
    subprocess.run([*ruff, "check", "--fix", "--quiet", "tests"], cwd=ROOT, check=False)
    subprocess.run([*ruff, "format", "--quiet", "tests"], cwd=ROOT, check=True)
    subprocess.run([BIN / "python", "-m", "tests.support.docs"], cwd=ROOT, check=True)
    git("add", "-A")
    print(git("diff", "--cached", "--shortstat"))


def broken(text: str) -> str:
    """Code whose docstrings have too long lines: their last words are on the next line."""
    lines = text.split("\n")
    for index, line in enumerate(lines):
        if len(line) > 120 and ":mod:" in line:
            cut = line.rindex(" ", 0, 120)
            indent = re.match(r" *", line)[0]
            lines[index], rest = line[:cut], line[cut + 1 :]
            following = lines[index + 1]
            if following.strip() and '"""' not in following:
                lines[index + 1] = f"{indent}{rest} {following.lstrip()}"
            else:
                lines.insert(index + 1, indent + rest)
    return "\n".join(lines)


def wrapped(text: str, before: str) -> str:
    """Paragraphs of a page whose lines have become too long, broken again; code and links stay in one piece."""
    if all(len(line) <= 120 or line in before for line in text.splitlines()):
        return text
    blocks, fenced = [[]], False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if fenced or not line.strip() or re.match(r" *([#|<]|```)", line):
            blocks += [[line], []]
        elif re.match(r" *([-*]|\d+\.) ", line):
            blocks.append([line])
        else:
            blocks[-1].append(line)
    out = []
    for block in blocks:
        if not block:
            continue
        if all(len(line) <= 120 for line in block) or block[0].lstrip().startswith(("|", "#", "```", "<")):
            out += block
            continue
        indent = re.match(r" *", block[0])[0]
        bullet = re.match(r" *([-*]|\d+\.) ", block[0])
        rest = " " * len(bullet[0]) if bullet else indent
        joined = " ".join(line.strip() for line in block)
        joined = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda m: m[0].replace(" ", "\0"), joined)
        line = indent
        for word in joined.split(" "):
            if len(line) + 1 + len(word) > 120 and line.strip():
                out.append(line)
                line = rest + word
            else:
                line = f"{line} {word}" if line.strip() else line + word
        out.append(line)
    return "\n".join(out).replace("\0", " ") + ("\n" if text.endswith("\n") else "")


main()
