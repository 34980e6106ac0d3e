"""What a step depends on besides parameters and gradients (``docs/state.md``), where no other file tests it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import SUPPORT, TRAIN, run_bamboo, write_config

pytestmark = pytest.mark.claim("guides/exactness.md", "reference/guarantees.md", "reference/limits.md")


@pytest.mark.integration
def test_ranks_that_compute_with_different_settings_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "differing.py"
    script.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(SUPPORT)!r})\nimport lean_torch, torch\n"
        "torch.set_float32_matmul_precision('medium' if os.environ['RANK'] == '1' else 'highest')\n"
        f"runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
    )
    result = run_bamboo(tmp_path, 2, ["--stages", "2"], write_config(tmp_path, {}), script)
    assert result.exit_code == 1 and not result.events("step")
    assert "ConfigError: the members of this job compute with different settings: torch.set_float32_" in result.output
    assert "matmul_precision is highest on m0-" in result.output and " and medium on m1-" in result.output
