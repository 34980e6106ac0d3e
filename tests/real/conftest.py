"""What these tests need of Debian, and the table of what ran on which version."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from ..support.hosts import why_not
from .machines import Machines


@dataclass(frozen=True)
class Tool:
    """A program of a Debian package, and the arguments with which it tells its version."""

    package: str
    program: str
    version: tuple[str, ...] = ("--version",)

    def path(self) -> str | None:
        """Where it is, apart from what pip has installed; servers are not on the PATH of every user."""
        own = Path(sys.prefix, "bin")
        folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder) != own]
        return shutil.which(self.program, path=os.pathsep.join([*folders, "/usr/sbin", "/sbin"]))

    @property
    def cure(self) -> str:
        """What installs it."""
        return f"apt-get install {self.package}"

    def number(self) -> str:
        """Its version, as it tells it."""
        path = self.path()
        if path is None:
            return f"missing: {self.cure}"
        done = subprocess.run([path, *self.version], capture_output=True, text=True, check=False, timeout=30)
        found = re.search(r"\d+(\.\d+)+\w*", done.stdout + done.stderr)
        return found.group() if found else "unknown"


@dataclass(frozen=True)
class Checker(Tool):
    """A package of PyPI that ``make real`` installs in an environment of its own; the program is its interpreter."""

    program: str = "python"

    def path(self) -> str | None:
        """The interpreter."""
        path = Path(sys.prefix, "recipes", "bin", self.program)
        return str(path) if path.exists() else None

    @property
    def cure(self) -> str:
        """What installs it."""
        return "make real"

    def number(self) -> str:
        """Its version."""
        program = f"from importlib.metadata import version; print(version({self.package!r}))"
        told = replace(self, version=("-c", program))
        return Tool.number(told)


@dataclass(frozen=True)
class Library(Checker):
    """A package of PyPI that ``make real`` installs in a folder of its own, for scripts to import."""

    def path(self) -> str | None:
        """The folder."""
        path = Path(sys.prefix, self.package)
        return str(path) if (path / ".installed").exists() else None

    def number(self) -> str:
        """Its version."""
        found = metadata.distributions(name=self.package, path=[str(self.path())])
        return next((each.version for each in found), "unknown")


TOOLS = {
    "sshd": Tool("openssh-server", "sshd", ("-V",)),
    "pdsh": Tool("pdsh", "pdsh", ("-V",)),
    "Slurm": Tool("slurm-wlm", "slurmctld", ("-V",)),
    "munge": Tool("munge", "munged", ("-V",)),
    "etcd": Tool("etcd-server", "etcd"),
    "etcdctl": Tool("etcd-client", "etcdctl", ("version",)),
    "openssl": Tool("openssl", "openssl", ("version",)),
    "systemd": Tool("systemd", "systemd-analyze"),
    "kubernetes-validate": Checker("kubernetes-validate"),
    "prometheus-operator": Checker("cloudcoil.models.prometheus_operator"),
    "helm-python-sdk": Checker("helm-python-sdk"),
    "SkyPilot": Checker("skypilot"),
    "transformers": Library("transformers"),
    "promtool": Tool("prometheus", "promtool"),
}
#: How each test ended.
_OUTCOMES: dict[str, str] = {}
_TESTS: dict[str, pytest.Item] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(600))
            _TESTS[item.nodeid] = item


def _tools(item: pytest.Item) -> list[str]:
    return [name for marker in item.iter_markers("tools") for name in marker.args]


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = [TOOLS[name] for name in _tools(item) if TOOLS[name].path() is None]
    if missing:
        packages = ", ".join(tool.package for tool in missing)
        pytest.fail(f"{packages} missing: {'; '.join(sorted({tool.cure for tool in missing}))}", pytrace=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.nodeid in _TESTS and (report.when == "call" or not report.passed):
        _OUTCOMES.setdefault(report.nodeid, report.outcome)
        if report.failed:
            _OUTCOMES[report.nodeid] = "failed"


def pytest_terminal_summary() -> None:
    if not _OUTCOMES:
        return
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    ours = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "deepspeed"))
    table = Table("what", "with", "result", box=box.MARKDOWN)
    table.title = f"{system}, Python {platform.python_version()}, {ours}"
    for nodeid, outcome in _OUTCOMES.items():
        item = _TESTS[nodeid]
        said = (item.function.__doc__ or item.name).partition("\n")[0].rstrip(".")
        versions = ", ".join(f"{name} {TOOLS[name].number()}" for name in _tools(item))
        table.add_row(said, versions, outcome)
    Console(width=200).print(table)


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Three hosts with an sshd each; they are gone after the test."""
    reason = why_not()
    if reason is not None:
        pytest.fail(reason, pytrace=False)
    with Machines(3) as made:
        yield made
