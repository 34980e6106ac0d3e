"""Scripts that are written as others drive DeepSpeed's pipelines: as stock, with a loss of every stage."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs import SUPPORT
from tests.support.surviving import Reference, fault, survive_in_turn

pytestmark = pytest.mark.claim("guides/scripts.md")

#: What all of these scripts bring themselves.
BROUGHT: dict[str, Any] = {"optimizer": None, "scheduler": None}

survive = partial(survive_in_turn, micro_batches=4, **BROUGHT)


@pytest.mark.parametrize(
    ("arguments", "lost"),
    [
        pytest.param(("--untied",), (0, 2), id="rotary", marks=pytest.mark.exhaustive),
        pytest.param(("--pos-emb", "alibi"), (3, 1), id="alibi-tied"),
    ],
)
def test_like_gpt_neox(tmp_path: Path, reference: Reference, arguments: tuple[str, ...], lost: tuple[int, int]) -> None:
    """Tables of positions in plain attributes, means over ranks after each evaluation, the newest checkpoint kept."""
    faults = [fault(lost[0], 2, "ForwardPass", 1), fault(lost[1], 4, "BackwardPass", 1)]
    result = survive(tmp_path, reference, faults, 4, 1, arguments, script=SUPPORT / "train_like_neox.py")
    # Rank 0 alone removes those before, and nobody does so in its place. One comes back until the next is complete.
    assert {len(dump["kept"]) <= 2 for dump in result.ranks().values()} == {0 not in lost}


@pytest.mark.exhaustive
def test_like_qlora_pipe(tmp_path: Path, reference: Reference) -> None:
    """A loader of the script's own, a scheduler that comes later, stages with other groups, adapters of every stage."""
    faults = [fault(0, 2, "BackwardPass", 1), fault(3, 4, "ForwardPass", 2)]
    result = survive(tmp_path, reference, faults, 2, 2, script=SUPPORT / "train_like_qlora_pipe.py")
    undisturbed = reference(2, 2, 4, *result.length, script=SUPPORT / "train_like_qlora_pipe.py", **BROUGHT)
    found, expected = (adapter(each.out) for each in (result, undisturbed))
    assert len(expected) == 14 and found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    assert {tuple(dump["epochs"]) for dump in result.ranks().values()} == {tuple(undisturbed.ranks()[0]["epochs"])}


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    """What the script has put together in the end."""
    whole: dict[str, torch.Tensor] = torch.load(folder / "checkpoints/final/adapter_model.bin", weights_only=True)
    return whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("lost", [pytest.param((0, 2), id="both-ends"), pytest.param((1,), id="inner")])
def test_like_diffusion_pipe(tmp_path: Path, reference: Reference, lost: tuple[int, ...]) -> None:
    """Each end draws its own part; optimizer, scheduler and loss come after the engine; the schedule loads first."""
    faults = [fault(rank, 2 + 2 * n, "BackwardPass", 1) for n, rank in enumerate(lost)]
    script = SUPPORT / "train_like_diffusion_pipe.py"
    survive(tmp_path, reference, faults, 3, 1, script=script, gradient_clipping=1.0)
