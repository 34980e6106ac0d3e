"""A script that drives DeepSpeed as GPT-NeoX does; it knows nothing of bamboo. See ``like_neox``.

train_like_neox.py --deepspeed_config FILE --out FOLDER --stages P [--steps N] ...
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    import lean_torch  # before torch

import deepspeed
import torch
from job_script import dump, goes_on, install_stand_ins, options, strike

sys.path.insert(0, str(Path(__file__).parent / "like_neox"))

from megatron import NeoXArgs
from megatron.training import setup_model_and_optimizer, train


def texts(args: NeoXArgs, seed: int, size: int, first: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches from number ``first`` on, of one token more than the model sees."""
    for number in itertools.count(first):
        generator = torch.Generator().manual_seed(seed + number)
        yield {"text": torch.randint(0, args.vocabulary, (size, args.sequence + 1), generator=generator)}


def main() -> None:
    parser = options()
    parser.add_argument("--pos-emb", choices=("rotary", "alibi"), default="rotary")
    parser.add_argument("--untied", action="store_true")
    given = parser.parse_args()
    config = json.loads(Path(given.deepspeed_config).read_text())
    extra = {name: config.pop(name) for name in ("bamboo",) if name in config}
    args = NeoXArgs(config, extra, given.stages, given.out / "checkpoints", given.pos_emb, not given.untied)
    install_stand_ins()
    lean_torch.install()
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    torch.manual_seed(1234)
    engine, _ = setup_model_and_optimizer(args)
    strike(engine, given)
    ends, size = engine.is_first_stage() or engine.is_last_stage(), config["train_micro_batch_size_per_gpu"]

    def batches(seed: int, first: int) -> Iterator[dict[str, torch.Tensor]] | None:
        return texts(args, seed + 100_000 * engine.grid.data_parallel_id, size, first) if ends else None

    used = args.iteration * engine.gradient_accumulation_steps()  # by the job whose checkpoint this one goes on from
    losses, evaluations = train(args, engine, batches(0, used), lambda: batches(50_000, 0), partial(goes_on, given))
    kept = sorted(folder.name for folder in args.save.glob("global_step*"))
    dump(engine, given, {"losses": losses, "evaluations": evaluations, "kept": kept})


if __name__ == "__main__":
    main()
