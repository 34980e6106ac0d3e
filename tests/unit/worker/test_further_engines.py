"""Engines without the block in a job with it: what a loss leaves of them is an error, or right."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from bamboo_ds.comm.calls.participants import founding
from bamboo_ds.errors import PeerLost, UnsupportedError
from bamboo_ds.topology import Layout, Plan
from bamboo_ds.worker.further import engine_class

pytestmark = pytest.mark.claim("reference/limits.md")


# -- without processes ----------------------------------------------------------------------------------


def test_its_groups_are_those_of_the_processes_that_have_built_it() -> None:
    """Whoever owns the stages now, and whoever else runs as one of the ranks."""
    plan = Plan(epoch=5, owners=("b", "x"), members=("a", "b", "x"), layout=Layout(1, 2), script_ranks=(0, 1, 1))
    group = founding(plan, (0, 1), {0: "a", 1: "b"})
    assert group.complete and group.members == ("a", "b")
    with pytest.raises(PeerLost, match=r"the processes of ranks \[1\] are gone"):
        founding(replace(plan, members=("a", "x"), script_ranks=(0, 1)), (0, 1), {0: "a", 1: "b"})


def test_a_worker_that_joins_is_told() -> None:
    plan = SimpleNamespace(members=("a", "b"), script_ranks=(0, 1))
    channel = SimpleNamespace(joiner=True, world_size=2, newest_plan=plan, need_every_rank=lambda: None)
    attachment = SimpleNamespace(founders=None, among_founders=lambda *_: nullcontext())
    session = SimpleNamespace(plan=plan, attachment=attachment)
    job = Mock(channel=channel, session=session)
    engine = type("Engine", (), {"forward": lambda self: "computed"})
    with pytest.raises(UnsupportedError, match="a worker that joins cannot compute what it has computed"):
        engine_class(job, engine, pipeline=True)
    assert engine_class(job, engine, pipeline=False)().forward() == "computed"
