"""Stages whose shadows compute a part of them, so that no member has much more to do than another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .support.gpt_jobs import survive_in_turn as survive_gpt
from .support.precisions import BF16_ZERO
from .support.surviving import Reference, fault, survive_in_turn

AUTO = {"topology": {"blocks": "auto"}}


@pytest.mark.integration
def test_the_rest_of_a_job_is_divided(tmp_path: Path, reference: Reference) -> None:
    """Of five members with two layers each, one after the other is lost."""
    faults = [fault(2, 3, "BackwardPass", 1), fault(4, 6, "ForwardPass", 2)]
    result = survive_in_turn(tmp_path, reference, faults, 5, 1, bamboo=AUTO)
    divided = [plan for plan in result.events("plan") if plan["lent"]]
    assert divided, "no stage was divided"


@pytest.mark.integration
def test_a_gpt_is_divided(tmp_path: Path, reference: Reference) -> None:
    """Half precision, ZeRO stage 1, tied embeddings, activation checkpointing, dropout."""
    options = ("--dropout", "0.1", "--checkpoint-activations", "1", "--layers", "8", "--seed-layers")
    faults = [fault(3, 3, "BackwardPass", 1), fault(4, 6, "ForwardPass", 2)]
    result = survive_gpt(tmp_path, reference, faults, 4, 2, options, bamboo=AUTO, **BF16_ZERO)
    divided = [plan for plan in result.events("plan") if plan["lent"]]
    assert divided, "no stage was divided"
