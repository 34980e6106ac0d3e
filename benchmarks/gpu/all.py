"""All experiments of this folder in order, within one limit of time; ``gpu-all.json`` is the index of their results.

Each has a share of what is left, by its weight among those that are still to come. See ``--help``.
"""

from __future__ import annotations

import click
from bench import Experiment, experiment
from turns import Turns, run_in_turn

EXPERIMENTS: Turns = {
    "smoke": (("smoke",), 4),
    "exact": (("exact",), 1.5),
    "copies": (("copies",), 1),
    "memory": (("memory",), 4),
    "plain": (("plain",), 0.5),
    "nccl": (("nccl",), 6),
    "syncs": (("syncs",), 4),
    "overhead": (("overhead",), 7),
    "recovery": (("recovery",), 8),
    "sums": (("recovery", "--kills", "6", "--micro-batches", "32", "--sync-every", "4", "--at", "0.75"), 5),
}


@experiment("all")
@click.option("--only", type=click.Choice(list(EXPERIMENTS)), multiple=True, help="[default: all]")
def main(run: Experiment, only: tuple[str, ...]) -> None:
    """Run all experiments, or some."""
    run_in_turn(run, {name: EXPERIMENTS[name] for name in EXPERIMENTS if not only or name in only})


if __name__ == "__main__":
    main()
