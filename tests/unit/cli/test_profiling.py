"""Profiles of jobs that were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bamboo_ds.cli import profile as command
from bamboo_ds.cli.building import Built
from bamboo_ds.cli.main import cli
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe.spans import Kind, Span
from bamboo_ds.simulate.profile import Profile
from bamboo_ds.simulate.profiling import Told

pytestmark = pytest.mark.claim("guides/worth-it.md")


def spans(steps: int = 5, micro_batches: int = 3) -> list[Span]:
    """Two stages: passes of 1 and 2 s, and of 3 and 4 s; steps of 0.5 s. The first iterations take longer."""
    found = []
    for step in range(1, steps + 1):
        more = 10.0 if step <= 2 else 0.0
        for stage, (forward, backward) in enumerate([(1.0, 2.0), (3.0, 4.0)]):
            for m in range(micro_batches):
                found.append(Span(Kind.FORWARD, step, 0.0, forward + more, (0, stage), 0, m))
                found.append(Span(Kind.BACKWARD, step, 5.0, 5.0 + backward + more, (0, stage), 0, m))
            found.append(Span(Kind.STEP, step, 0.0, 0.5 + more, (0, stage)))
    odd = Span(Kind.FORWARD, 3, 0.0, 99.0, (0, 0), 0, 0)
    left_out = odd._replace(cut=True), odd._replace(redone=True), odd._replace(part=1), odd._replace(role=None)
    return [*found, *left_out]


BUILT = Built(stages=2, layers=(3, 2), each=(10, 30, 0, 5, 5), precision="bf16", optimizer="AdamW")
#: Of stage 0: a micro-batch keeps 300 bytes, two are under way, three boundary tensors are kept.
TOLD = {0: Told((2.0, 1.0), 2 * 300 + 3 * 40, 40), 1: Told((), 100 + 3 * 40, 0)}


def profile(
    built: Built = BUILT, samples: int = 12, told: dict[int, Told] = TOLD, steps: int = 5, retains: bool = True
) -> Profile:
    return command.profile_of("mine", "a test", built, samples, told, spans(steps), retains)


def test_a_profile_of_what_was_measured() -> None:
    found = profile()
    assert (found.micro_batch, found.global_batch, found.stages) == (4, 12, 2)
    assert (found.precision, found.optimizer, found.memory_bytes) == ("bf16", "AdamW", None)
    assert [profile(replace(BUILT, zero=zero)).zero for zero in (0, 1)] == [False, True]
    # Blocks of one layer and of two, with two thirds and one third of the time.
    assert [layer.forward_s for layer in found.each] == pytest.approx([2 / 3, 1 / 6, 1 / 6, 1.5, 1.5])
    assert [layer.backward_s for layer in found.each] == pytest.approx([4 / 3, 1 / 3, 1 / 3, 2.0, 2.0])
    assert [layer.update_s for layer in found.each] == pytest.approx([0.125, 0.375, 0, 0.25, 0.25])
    assert [layer.parameters for layer in found.each] == [10, 30, 0, 5, 5]
    assert [layer.boundary_bytes for layer in found.each] == [40] * 5
    assert [layer.kept_bytes for layer in found.each] == [60, 60, 60, 10, 10]
    bare = profile(told={0: Told((), 2 * (300 + 40), 40), 1: Told((), 100 + 40, 0)}, retains=False)
    assert [layer.kept_bytes for layer in bare.each] == [layer.kept_bytes for layer in found.each]
    assert Profile.model_validate_json(found.model_dump_json()) == found
    with pytest.raises(ConfigError, match="nothing was measured of stages 0, 1: raise --steps"):
        profile(steps=2)
    with pytest.raises(ConfigError, match="13 samples of an iteration are not those of 3 equal micro-batches"):
        profile(samples=13)


def test_scripts_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what to do, and nothing is started."""
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(command, "DemoJob", None)
    for built, expected in (
        (Built(problem="the model is no deepspeed.pipe.PipelineModule: build it as one"), "no deepspeed.pipe.Pipeline"),
        (Built(unknown="the script ends without a call of deepspeed.initialize"), "write a profile by hand"),
        (Built(stages=2, slices=2, block=True), "has tensor slices, which are not simulated"),
        (Built(stages=2), 'its configuration has no "bamboo" block that is enabled: add "bamboo": {}'),
    ):
        monkeypatch.setattr(command, "build", lambda *_, built=built: built)
        with pytest.raises(ConfigError, match=expected):
            command.measure(str(script), [], 2, 10)
    for options, told in (
        (["-n", "4", "no.py"], "there is no script 'no.py'"),
        (["-n", "4", "-o", "no/x.json", str(script)], "--output no/x.json: there is no folder no"),
    ):
        assert told in str(CliRunner().invoke(cli, ["profile", *options]).exception)


def test_a_configuration_without_the_block_gets_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"train_batch_size": 8}')
    folder = tmp_path / "folder"
    folder.mkdir()
    for given in (["--deepspeed_config", str(mine), "--x"], [f"--deepspeed_config={mine}", "--x"]):
        found = command.with_block(given, folder)
        assert len(found) == len(given) and found[-1] == "--x"
        path = found[-2].rpartition("=")[2]
        assert json.loads(Path(path).read_text()) == {"train_batch_size": 8, "bamboo": {}}
    assert mine.read_text() == '{"train_batch_size": 8}', "the user's stays as it is"
    mine.write_text('{"bamboo": {"redundancy": {"mode": "none"}}}')
    given = ["--deepspeed_config", str(mine)]
    assert command.with_block(given, folder) == given
    assert command.with_block(["--lr", "1"], folder) == ["--lr", "1"]
