"""Parts of GPT-NeoX, as far as it drives DeepSpeed, by their names and in their modules; no more of it."""

from __future__ import annotations

import torch


def print_rank_0(*message: object) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(*message, flush=True)


from .arguments import NeoXArgs  # noqa: E402

__all__ = ["NeoXArgs", "print_rank_0"]
