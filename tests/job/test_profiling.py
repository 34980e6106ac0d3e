"""Profiles of jobs that were measured."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bamboo_ds.cli import profile as command
from bamboo_ds.simulate.profile import Profile
from tests.support.jobs import OF_TORCH, bamboo_command, environment
from tests.support.leaks import no_leaks

pytestmark = pytest.mark.claim("guides/worth-it.md")


@pytest.mark.exhaustive
@pytest.mark.integration
def test_a_script_is_measured(tmp_path: Path) -> None:
    """The demo's GPT, without a block, by the command; nothing of its job is left."""
    script = tmp_path / "train.py"
    script.write_text(Path(command.__file__).with_name("demo").joinpath("train.py").read_text())
    config = tmp_path / "ds_config.json"
    optimizer = {"type": "Adam", "params": {"lr": 3e-3, "torch_adam": True}}
    batches = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    config.write_text(json.dumps({**batches, "optimizer": optimizer, "steps_per_print": 10**9}))
    (tmp_path / "tmp").mkdir()
    run = [bamboo_command(), "profile", "-n", "2", "--steps", "8", "train.py", "--deepspeed_config", str(config)]
    with no_leaks():
        done = subprocess.run(
            [*run, "--stages", "2", "--out", str(tmp_path), "--steps", "100000"],
            cwd=tmp_path,
            env={**environment(), "TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path / "tmp")},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = Profile.model_validate_json((tmp_path / "train.profile.json").read_bytes())
    assert (found.stages, found.micro_batch, found.global_batch, len(found.each)) == (2, 8, 32, 10)
    # An embedding, eight blocks of 12 w^2 + 13 w parameters and their like, an output layer.
    assert [layer.parameters for layer in found.each[1:9]] == [12 * 64**2 + 13 * 64] * 8
    assert all(layer.boundary_bytes == 8 * 64 * 64 * 4 for layer in found.each)
    assert all(layer.forward_s > 0 and layer.backward_s > 0 and layer.update_s > 0 for layer in found.each)
    assert "train.py --deepspeed_config" in found.source
    assert not (tmp_path / "losses-0.json").exists(), "it was ended before its own end"
    left = [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]
    assert not [path for path in left if not path.name.startswith(OF_TORCH)]
