"""Jobs with two tensor slices, each of which has a pipeline of its own."""

from __future__ import annotations

from functools import partial

from . import surviving
from .jobs import SUPPORT

TRAIN_SLICED = SUPPORT / "train_sliced.py"

survive = partial(surviving.survive, stages=2, pipelines=2, micro_batches=4, script=TRAIN_SLICED)
survive_in_turn = partial(surviving.survive_in_turn, pipelines=2, micro_batches=4, script=TRAIN_SLICED)
