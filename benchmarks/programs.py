"""What it costs a member to build its program of an iteration, by what it computes. Needs no job.

A *new* program is the first of a plan, or of a loss; after that it is looked up.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace

import click
from common import console
from rich.table import Table

from bamboo_ds.schedule import member_program
from bamboo_ds.topology import Layout, Lent, Plan, Role, initial_plan, takeover, with_redundancy


def cases(layout: Layout, job: int) -> dict[str, tuple[Plan, str]]:
    """Plans of a job, and the member whose program is built."""
    stage, last = layout.stages // 2, layout.pipelines - 1
    plan = with_redundancy(initial_plan([f"m{rank}-{job}" for rank in range(layout.size)]), layout, True)
    inner, first = Role(last, stage), Role(last, 0)
    lost = takeover(plan, [plan.owner(inner)])
    lent = replace(plan, lent=(Lent(layout.rank(inner), 2, "front"),))
    ends = takeover(plan, [plan.owner(first)])
    found = {
        "undisturbed": (plan, plan.owner(inner)),
        "an inner stage was lost: its new owner": (lost, lost.owner(inner)),
        "the same: another member": (lost, lost.owner(first)),
        "a part of an inner stage is lent: who computes it": (lent, lent.computers(inner)[0]),
        "the first stage was lost: its new owner, which has the last one": (ends, ends.owner(first)),
    }
    if last:
        owners = [plan.owner(Role(0, stage)) if role == inner else plan.owner(role) for role in layout.roles]
        both = replace(plan, owners=tuple(owners))
        found["two pipelines are connected: the member that computes in both"] = (both, both.owner(inner))
        found["these: a member of one of them"] = (both, both.owner(first))
    return found


@click.command(help=__doc__)
@click.option("--pipelines", default=8, show_default=True, help="Pipelines.")
@click.option("--stages", default=64, show_default=True, help="Stages of each.")
@click.option("--micro-batches", default=256, show_default=True, help="Micro-batches of each in an iteration.")
@click.option("--repetitions", default=5, show_default=True, help="Plans; the shortest time counts.")
def main(pipelines: int, stages: int, micro_batches: int, repetitions: int) -> None:
    layout = Layout(pipelines, stages, blocks=(4,) * stages)
    table = Table(title=f"Programs: D = {pipelines}, P = {stages}, M = {micro_batches}", title_justify="left")
    table.add_column("plan and member")
    for column in ("new, ms", "seen, ms", "instructions"):
        table.add_column(column, justify="right")
    new, seen, counts = defaultdict(list), defaultdict(list), {}
    for job in range(repetitions):
        for name, (plan, member) in cases(layout, job).items():
            came = Plan.from_json(plan.to_json())
            for times in (new, seen):
                begin = time.perf_counter()
                counts[name] = len(member_program(came, member, micro_batches))
                times[name].append((time.perf_counter() - begin) * 1000)
    for name, count in counts.items():
        table.add_row(name, f"{min(new[name]):.1f}", f"{min(seen[name]):.2f}", str(count))
    console.print(table)


if __name__ == "__main__":
    main()
