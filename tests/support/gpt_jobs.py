"""Jobs of the GPT of ``train_gpt.py``."""

from __future__ import annotations

from functools import partial

from . import surviving
from .jobs import SUPPORT

TRAIN_GPT = SUPPORT / "train_gpt.py"

survive = partial(surviving.survive, micro_batches=4, script=TRAIN_GPT)
survive_in_turn = partial(surviving.survive_in_turn, micro_batches=4, script=TRAIN_GPT)
