"""``bamboo run --dry-run``: what a script builds, and what is told of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bamboo_ds.cli import dry_run
from bamboo_ds.cli.building import Built
from bamboo_ds.launchers.run import LocalSlots
from tests.unit.cli.test_dry_run import build

pytestmark = pytest.mark.claim("guides/even-shares.md", "reference/cli.md")


@pytest.mark.integration
def test_what_a_script_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(tmp_path, monkeypatch, "all", "2")
    assert built == Built(
        pipelines=2,
        stages=2,
        layers=(3, 3),
        parameters=(220 + 10**12, 105 + 220),
        frozen=(10**6, 0),
        each=(220, 10**12, 0, 105, 220, 0),  # those tied within a stage count once
        optimizer="SGD without momentum",
        precision="bf16",
        block=True,
    )


@pytest.mark.integration
def test_problems_and_what_cannot_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, attribute, words in (
        (
            ("all", "3"),
            "problem",
            r"^the script's PipelineModule has 3 stages .* 4 ranks, .*: start it with 3 or 6 \(`-n`",
        ),
        (("refused", "2"), "problem", r'"sparse_gradients": remove it'),
        (("named", "2"), "problem", r'FusedAdam on processors .* use "torch_adam": true'),
        (
            ("raises", "2"),
            "problem",
            r"^the script, as one rank of 4 \(-n 4\), ends with code 1 before deepspeed\.initialize\n(.*\n)*"
            r"  \| .*RuntimeError: a test",
        ),
        (("picky", "2"), "unknown", r"^Picky cannot be built on torch's meta device: "),
        (("looks", "2"), "unknown", r"^the script needs values of parameters, .* meta device.*: .*item\(\).*"),
        (("early", "2"), "unknown", r"^the script ends without a call of deepspeed\.initialize$"),
    ):
        found = build(tmp_path, monkeypatch, *arguments)
        assert re.search(words, getattr(found, attribute) or ""), (arguments, found)
        assert not found.stages > 1


@pytest.mark.integration
def test_a_script_that_does_not_come_to_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with what it has started."""
    monkeypatch.setattr(dry_run, "_TIMEOUT_S", 0.0)
    popen = subprocess.Popen
    begun: list[Any] = []

    monkeypatch.setattr(dry_run.standard_input, "inherited", lambda: -9)

    def sleeping(command: list[str], **settings: Any) -> Any:
        assert settings["stdin"] == -9, "what workers would have"
        begun.append(popen([sys.executable, "-c", "input()"], **{**settings, "stdin": subprocess.PIPE}))
        return begun[-1]

    monkeypatch.setattr(dry_run.subprocess, "Popen", sleeping)
    built = dry_run.build("127.0.0.1", LocalSlots(1), ["x.py"])
    assert built.unknown == "the script has not come to deepspeed.initialize within 0 s"
    begun[0].stdin.close()
    assert begun[0].returncode == -9
