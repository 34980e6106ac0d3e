"""``bamboo ledger``: verify that every micro-batch was consumed exactly once."""

from __future__ import annotations

import json
import sys

import click

from ..errors import ConfigError
from ..observe.audit import audit, compare
from ..observe.ledger import ledger_files, read_ledger

#: Problems that are printed; the others are counted.
_SHOWN = 20


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True))
@click.option(
    "--against", multiple=True, type=click.Path(exists=True), help="Ledger of a run that must have consumed the same."
)
@click.option("--steps", type=click.IntRange(min=1), help="Global step that the job must have ended with.")
@click.option("--distinct", is_flag=True, help="No two micro-batches may have the same contents.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ledger(paths: tuple[str, ...], against: tuple[str, ...], steps: int | None, distinct: bool, as_json: bool) -> None:
    """Verify the ledger of a job: files, or the folder that bamboo.observe.ledger names.

    Every step must account for every micro-batch of every pipeline exactly once, no sample may be used twice in a pass
    over the data, and with --against every micro-batch must contain what it contained in the other run. Steps that were
    undone because a checkpoint was loaded count in neither.

    Exit code 1 if something is wrong.
    """
    for given in (paths, against):
        if given and not ledger_files(given):
            raise ConfigError(f"{', '.join(given)}: no files of a ledger (*.jsonl)")
    lines, problems = read_ledger(paths)
    found = audit(lines, distinct, steps)
    problems += found.problems
    if against:
        others, wrong = read_ledger(against)
        other = audit(others)
        problems += [f"the other ledger: {problem}" for problem in [*wrong, *other.problems]]
        problems += compare(found, other)
    facts = {
        "steps": len(found.history),
        "undone_steps": found.steps - len(found.history),
        "micro_batches": found.micro_batches,
        "samples": found.samples or None,
        "micro_batches_like_one_before": found.alike,
        "runs": len(found.runs),
        "lines_written_twice": found.repeated,
    }
    if as_json:
        click.echo(json.dumps({**facts, "problems": problems}, indent=2))
    else:
        click.echo(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in facts.items() if value is not None))
        for problem in problems[:_SHOWN]:
            click.echo(problem, err=True)
        if len(problems) > _SHOWN:
            click.echo(f"and {len(problems) - _SHOWN} problems more", err=True)
        click.echo("wrong" if problems else "each consumed exactly once" + (", as in the other run" if against else ""))
    sys.exit(1 if problems else 0)
