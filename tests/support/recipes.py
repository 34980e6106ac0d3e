"""The recipes in ``configs/cluster``, as their tools read them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CLUSTER = Path(__file__).resolve().parents[2] / "configs" / "cluster"
#: What a shell has made of a variable or a command in a command line.
EXPANDED = "1"


def files() -> set[str]:
    """All files of the recipes, by their paths below the folder."""
    return {str(path.relative_to(CLUSTER)) for path in CLUSTER.rglob("*") if path.is_file()}


def text(name: str) -> str:
    """What is in a file."""
    return (CLUSTER / name).read_text()


def documents(name: str) -> list[Any]:
    """The documents of a file of YAML."""
    return list(yaml.safe_load_all(text(name)))


def by_kind(objects: list[Any]) -> dict[tuple[str, str], Any]:
    """Objects of Kubernetes by kind and name; raises ``AssertionError`` if two have the same."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    assert len(found) == len(objects)
    return found


def commands(script: str) -> list[list[str]]:
    """The commands of ``bamboo`` in a shell script, without comments, in words, from the program's name on."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        program = re.search(r"(?:^|[\s/])(bamboo \w+ .*?)(?:; do)?$", line)
        if program:
            plain = re.sub(r"\$\([^)]*\)|\$\{[^}]*\}|\$[\w@]+", EXPANDED, program[1])
            found.append(shlex.split(plain))
    return found


def variables_of(script: str) -> set[str]:
    """The variables of this package that a text names."""
    return set(re.findall(r"\bBAMBOO_[A-Z_]+\b", script))


class Unit:
    """A unit of systemd.

    Attributes:
        settings: by section and key, in the order of the file.
    """

    def __init__(self, name: str) -> None:
        self.settings: dict[str, dict[str, list[str]]] = {}
        section = ""
        for line in text(name).replace("\\\n", " ").splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif line and line[0] not in "#;":
                key, _, value = line.partition("=")
                self.settings.setdefault(section, {}).setdefault(key, []).append(value)

    def one(self, key: str, section: str = "Service") -> str:
        """The only value of a setting."""
        (value,) = self.settings[section][key]
        return value

    def command(self, key: str, instance: str, environ: Mapping[str, str]) -> list[str]:
        """A command line in words, with the instance's name for ``%i`` and with variables as systemd expands them.

        ``${NAME}`` is a part of one word; ``$NAME`` alone is split into words. A variable that is missing is an error.
        """
        words = []
        for word in shlex.split(self.one(key).replace("%i", instance)):
            if re.fullmatch(r"\$\w+", word):
                words += environ[word[1:]].split()
            else:
                words.append(re.sub(r"\$\{(\w+)\}", lambda found: environ[found[1]], word).replace("$$", "$"))
        return words


def environment_file(name: str) -> dict[str, str]:
    """What systemd reads in a file of variables."""
    lines = [line for line in text(name).splitlines() if line and line[0] not in "#;"]
    return dict(line.split("=", 1) for line in lines)
