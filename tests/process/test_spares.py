"""A script that deletes older checkpoints before the new one is complete loses none that it would need."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bamboo_ds.state import spares
from bamboo_ds.state.checkpoints import newest_complete
from bamboo_ds.state.publish import take_over
from tests.support.savers import WAIT_S, Member, members, rest
from tests.unit.state.test_spares import ALONE, begin_to_delete, delete_the_one_before, held, keep_one

pytestmark = pytest.mark.claim("guides/checkpoints.md")

__all__ = ["members"]  # a fixture


def _die(folder: Path, mark: Path, rule: Callable[[Path], None]) -> None:
    """In a process of its own: save step 2, delete step 1 as a script does, and be killed while step 2 is written."""
    with pytest.MonkeyPatch.context() as patch:
        held(patch)
        Member(folder, 0).save(2, layout=ALONE)
        rule(folder)
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)


def loads(folder: Path) -> None:
    spares.settle_for_loading(folder, None)


def restarts(folder: Path) -> None:
    take_over(folder, "job", ("", 0))
    spares.settle(folder, "job")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("rule", "comes_back"), [(keep_one, loads), (delete_the_one_before, restarts), (begin_to_delete, restarts)]
)
def test_a_kill_while_the_new_one_is_written(
    members: Callable[..., Member], tmp_path: Path, rule: Callable[[Path], None], comes_back: Callable[[Path], None]
) -> None:
    folder, mark = tmp_path / "checkpoints", tmp_path / "struck"
    members(0).save(1, layout=ALONE).wait()
    victim = multiprocessing.get_context("fork").Process(target=_die, args=(folder, mark, rule))
    victim.start()
    victim.join(WAIT_S)
    assert victim.exitcode == -signal.SIGKILL and mark.read_text() == str(victim.pid)
    assert newest_complete(folder) is None, "the rule has deleted what it takes for an old one"
    comes_back(folder)
    newest = newest_complete(folder, checksums=True)
    assert newest is not None and newest.tag == "step1" and newest.latest
    after = members(0)
    after.save(3, layout=ALONE).wait()
    assert [result.step for result in after.complete] == [3] and rest(folder) == []
