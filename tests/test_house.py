"""The package's own rules that linters do not know."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import bamboo_ds

PACKAGE = Path(bamboo_ds.__file__).parent
#: Lines of a file, files of a folder, and parameters of a constructor in the engine, at most.
LINES, FILES, PARAMETERS = 450, 24, 8


def classes(folder: Path = PACKAGE) -> Iterator[ast.ClassDef]:
    for path in sorted(folder.rglob("*.py")):
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def test_no_class_name_occurs_twice() -> None:
    """A reader who meets a name looks for one class, and finds it."""
    names = Counter(each.name for each in classes())
    assert not {name for name, count in names.items() if count > 1}


def test_files_and_folders_fit_in_the_head() -> None:
    long = [str(path) for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > LINES]
    files = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    assert not long
    assert not {str(folder): count for folder, count in files.items() if count > FILES}


def test_the_engine_s_classes_are_given_few_things() -> None:
    """Of a dataclass without a constructor these are its fields that have no default."""
    wide = {}
    for each in classes(PACKAGE / "engine"):
        init = next((f for f in each.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
        made = any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list)
        if init is not None:
            given = len(init.args.args) + len(init.args.kwonlyargs) - 1
        else:
            given = sum(isinstance(f, ast.AnnAssign) and f.value is None for f in each.body) if made else 0
        if given > PARAMETERS:
            wide[each.name] = given
    assert not wide


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import bamboo_ds, bamboo_ds.config", "torch deepspeed grpc etcd3 hjson"),
        ("import bamboo_ds.worker.channel", "torch grpc etcd3"),
        ("import bamboo_ds.control.web.server, bamboo_ds.control.web.display", "torch"),
        (
            "from bamboo_ds.config import NoticesConfig\n"
            "from bamboo_ds.control.loop import AgentLoop\n"
            "from bamboo_ds.control.notices import NoticeWatcher, build_sources\n"
            "sources = ['aws', 'gcp', 'azure', 'file', 'http', 'nvml']\n"
            "assert len(build_sources(NoticesConfig(sources=sources, file='/f', url='http://h/'), {})) == 6\n"
            "watcher = NoticeWatcher([], print, AgentLoop())\n"
            "watcher.start()\n"
            "watcher.stop()",
            "torch aiohttp pynvml",
        ),
    ],
    ids=["the package", "a worker's channel", "the web server", "notices without a source"],
)
def test_what_is_not_imported(code: str, unwanted: str) -> None:
    """Every process of a job would wait for it."""
    told = f"{code}\nimport sys; print(*sorted({set(unwanted.split())} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"
