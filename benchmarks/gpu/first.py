"""What to run first where a GPU can be had for ten minutes: what tells most, each with its JSON as soon as it is there.

Jobs whose engine reduces over NCCL, with kills, come first; ``gpu-first.json`` has the results of all, also of a run
that is cut off. See ``--help``.
"""

from __future__ import annotations

import click
from bench import Experiment, experiment
from turns import Turns, run_in_turn

LAZY = "lazy-frc-lazy-brc"
STEPS: Turns = {
    "plain": (("plain",), 0.6),
    "nccl": (("smoke", "--case", "fp32-2x2", "--backend", "nccl"), 1.6),
    "three": (("smoke", "--case", "fp32-2x3", "--backend", "nccl", "--no-kill"), 1.0),
    "eager": (("smoke", "--case", "fp32-2x1", "--mode", "eager-frc-eager-brc"), 1.0),
    "lazy": (("smoke", "--case", "bf16-zero1-2x2", "--mode", LAZY), 1.5),
    "loss": (("nccl", "--when", "reduce", "--repetitions", "1", "--watch-s", "65"), 1.6),
    "exact": (("exact", "--repetitions", "40"), 0.5),
    "copies": (("copies", "--megabytes", "16", "--megabytes", "256", "--repetitions", "3"), 0.5),
    "kills": (("recovery", "--kills", "6", "--backend", "nccl"), 1.8),
}


@experiment("first", minutes=9.5)
@click.option("--only", type=click.Choice(list(STEPS)), multiple=True, help="[default: all]")
def main(run: Experiment, only: tuple[str, ...]) -> None:
    """Run what tells most, in ten minutes."""
    run_in_turn(run, {name: STEPS[name] for name in STEPS if not only or name in only})


if __name__ == "__main__":
    main()
