"""Profiles of measured jobs for the advisor."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from bamboo_ds.advise.measured import Job, Told, profile_of
from bamboo_ds.cli import advise_job
from bamboo_ds.cli.building import Built
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe.spans import Kind, Span
from bamboo_ds.simulate.profile import Profile

from .support.jobs import OF_TORCH, bamboo_command, environment
from .support.leaks import no_leaks
from .test_advise import TRACE


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
    return [*found, replace(odd, cut=True), replace(odd, redone=True), replace(odd, part=1), replace(odd, role=None)]


JOB = Job(
    name="mine", source="a test", device="none", pipelines=1, layers=(3, 2), parameters=(10, 30, 0, 5, 5),
    precision="bf16", optimizer="AdamW", zero=False, samples=12,
    # Of stage 0: a micro-batch keeps 300 bytes, two are under way, three boundary tensors are kept.
    told={0: Told((2.0, 1.0), 2 * 300 + 3 * 40, 40), 1: Told((), 100 + 3 * 40, 0)}, retains=True,
)  # fmt: skip


def test_a_profile_of_what_was_measured() -> None:
    profile = profile_of(JOB, spans())
    assert (profile.micro_batch, profile.global_batch, profile.stages) == (4, 12, 2)
    assert (profile.precision, profile.optimizer, profile.memory_bytes) == ("bf16", "AdamW", None)
    assert [profile_of(replace(JOB, zero=zero), spans()).zero for zero in (False, True)] == [False, True]
    # Blocks of one layer and of two, with two thirds and one third of the time.
    assert [layer.forward_s for layer in profile.each] == pytest.approx([2 / 3, 1 / 6, 1 / 6, 1.5, 1.5])
    assert [layer.backward_s for layer in profile.each] == pytest.approx([4 / 3, 1 / 3, 1 / 3, 2.0, 2.0])
    assert [layer.update_s for layer in profile.each] == pytest.approx([0.125, 0.375, 0, 0.25, 0.25])
    assert [layer.parameters for layer in profile.each] == [10, 30, 0, 5, 5]
    assert [layer.boundary_bytes for layer in profile.each] == [40] * 5
    assert [layer.kept_bytes for layer in profile.each] == [60, 60, 60, 10, 10]
    told = {0: Told((), 2 * (300 + 40), 40), 1: Told((), 100 + 40, 0)}
    bare = profile_of(replace(JOB, told=told, retains=False), spans())
    assert [layer.kept_bytes for layer in bare.each] == [layer.kept_bytes for layer in profile.each]
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    with pytest.raises(ConfigError, match="nothing was measured of stages 0, 1: raise --steps"):
        profile_of(JOB, spans(steps=2))
    with pytest.raises(ConfigError, match="13 samples of an iteration are not those of 3 equal micro-batches"):
        profile_of(replace(JOB, samples=13), spans())


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_script_is_measured(tmp_path: Path) -> None:
    """The demo's GPT, without a block, by the command; nothing of its job is left."""
    script = tmp_path / "train.py"
    script.write_text((Path(advise_job.__file__).with_name("demo_train.py")).read_text())
    config = tmp_path / "ds_config.json"
    optimizer = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}
    batches = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    config.write_text(json.dumps({**batches, "optimizer": optimizer, "steps_per_print": 10**9}))
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "tmp").mkdir()
    ask = [
        bamboo_command(),
        "advise",
        "--trace",
        "trace.csv",
        "--steps",
        "8",
        "--finalists",
        "1",
        "--seeds",
        "1",
        "--json",
    ]
    run_script = ["-n", "2", "train.py", "--deepspeed_config", str(config), "--stages", "2", "--out", str(tmp_path)]
    with no_leaks():
        done = subprocess.run(
            [*ask, *run_script, "--steps", "100000"],
            cwd=tmp_path,
            env={**environment(), "TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path / "tmp")},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    profile = Profile.model_validate_json((tmp_path / "train.profile.json").read_bytes())
    assert (profile.stages, profile.micro_batch, profile.global_batch, len(profile.each)) == (2, 8, 32, 10)
    # An embedding, eight blocks of 12 w^2 + 13 w parameters and their like, an output layer.
    assert [layer.parameters for layer in profile.each[1:9]] == [12 * 64**2 + 13 * 64] * 8
    assert all(layer.boundary_bytes == 8 * 64 * 64 * 4 for layer in profile.each)
    assert all(layer.forward_s > 0 and layer.backward_s > 0 and layer.update_s > 0 for layer in profile.each)
    assert "train.py --deepspeed_config" in profile.source
    advice = json.loads(done.stdout)
    assert advice["profile"] == "train" and advice["paste"]["ds_config"]["train_micro_batch_size_per_gpu"] == 8
    assert not (tmp_path / "losses-0.json").exists(), "it was ended before its own end"
    left = [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    assert not [path for path in left if not path.name.startswith(OF_TORCH)]


def test_scripts_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told what to do, and nothing is started."""
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr(advise_job, "DemoJob", None)
    for built, expected in (
        (Built(problem="the model is no deepspeed.pipe.PipelineModule: build it as one"), "no deepspeed.pipe.Pipeline"),
        (Built(unknown="the script ends without a call of deepspeed.initialize"), "write a profile by hand"),
        (Built(stages=2, slices=2, block=True), "has tensor slices, which are not simulated"),
        (Built(stages=2), 'its configuration has no "bamboo" block that is enabled: add "bamboo": {}'),
    ):
        monkeypatch.setattr(advise_job, "build", lambda *_, built=built: built)
        with pytest.raises(ConfigError, match=expected):
            advise_job.measure(str(script), [], 2, 10)


def test_a_configuration_without_the_block_gets_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"train_batch_size": 8}')
    folder = tmp_path / "folder"
    folder.mkdir()
    for given in (["--deepspeed_config", str(mine), "--x"], [f"--deepspeed_config={mine}", "--x"]):
        found = advise_job.with_block(given, folder)
        assert len(found) == len(given) and found[-1] == "--x"
        path = found[-2].rpartition("=")[2]
        assert json.loads(Path(path).read_text()) == {"train_batch_size": 8, "bamboo": {}}
    assert mine.read_text() == '{"train_batch_size": 8}', "the user's stays as it is"
    mine.write_text('{"bamboo": {"redundancy": {"mode": "none"}}}')
    given = ["--deepspeed_config", str(mine)]
    assert advise_job.with_block(given, folder) == given
    assert advise_job.with_block(["--lr", "1"], folder) == ["--lr", "1"]
