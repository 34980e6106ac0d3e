"""Tables, picture and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import console, new_figure, save_figure, save_json
from rich.table import Table

from bamboo_ds.chaos.faults import Fault, FaultKind
from bamboo_ds.observe.goodput.lives import Category

from .market import Work, members_over_time
from .outcome import Outcome

EMULATED = "EMULATED devices: layers hold their device without using the CPU; processes, kills and messages are real"
_MAPPINGS = {
    "replace": "nodes beyond the job's members wait, and take the place of one that goes (as bamboo chaos does)",
    "scale": "every n-th node of the trace is in the market, so that the job is full at the window's begin",
}


def facts(source: str, training: str, work: Work, mapping: str, compress: float, seconds: float | None,
          steps: int | None, spares: int, faults: Sequence[Fault]) -> list[str]:  # fmt: skip
    """Lines that say what is measured."""
    within = [fault for fault in faults if seconds is None or fault.at_s < seconds]
    kills = sum(fault.kind is FaultKind.KILL_AGENT for fault in within)
    if seconds is None:
        length, pace = f"{steps} steps", "no trace"
        nodes = "each node that goes is replaced by a new one at the same moment"
        nodes += f"; {spares} more than a full job needs" if spares else ""
    else:
        length = f"{seconds:.0f} s, {kills} losses and {len(within) - kills} joins"
        pace = f"{compress:g} times as fast as the trace: a second here stands for {compress:g} s"
        nodes = _MAPPINGS[mapping]
    return [
        f"{source}: {length}",
        f"{work.shape.pipelines} pipelines of {work.shape.stages} stages of {work.layers / work.shape.stages:g} "
        f"layers, {training}, {work.micro_batches} micro-batches of {work.size}; "
        f"a layer {work.layer_s * 1000:g} ms forward and {work.layer_s * 2000:g} ms backward",
        EMULATED,
        f"{pace}; pauses and checkpoints take the time that they take, the start of a process {work.start_s:g} s more",
        f"nodes: {nodes}",
    ]


def _share(value: float) -> str:
    return f"{value:.3f}"


def tables(outcomes: Sequence[Outcome], work: Work) -> list[Table]:
    """What each system has made of it, and what its members' time was spent on."""
    full = outcomes[0]
    main = Table(title="Samples and cost (EMULATED devices)", title_justify="left")
    columns = ("seconds", "samples", "samples/s", "of on-demand", "of live members' limit", "losses", "joins",
               "restarts", "redone", "dropped", "cost per million", "of on-demand's")  # fmt: skip
    main.add_column("system")
    for column in columns:
        main.add_column(column, justify="right")
    for each in outcomes:
        if each.failed is not None:
            main.add_row(each.system, each.failed.partition(":")[0])
            continue
        main.add_row(
            each.system,
            f"{each.seconds:.1f}",
            str(each.samples),
            f"{each.samples_per_s:.2f}",
            _share(each.samples_per_s / full.samples_per_s),
            _share(each.limit_share(full.samples_per_s, work.shape.size)),
            str(each.losses),
            str(each.joins),
            str(each.restarts),
            str(each.redone),
            str(each.dropped),
            f"{each.cost:.2f}",
            _share(each.cost / full.cost),
        )
    measured = [each for each in outcomes if each.failed is None]
    goodput = Table(title="Member-seconds (categories of bamboo goodput)", title_justify="left")
    goodput.add_column("category")
    for each in measured:
        goodput.add_column(each.system, justify="right")
        goodput.add_column("share", justify="right")
    for category in Category:
        if any(each.goodput.get(category) for each in measured):
            cells = []
            for each in measured:
                value, total = each.goodput.get(category, 0.0), sum(each.goodput.values())
                cells += [f"{value:.1f}", f"{value / total:.1%}"]
            goodput.add_row(category.value, *cells)
    proofs = Table(title="Results", title_justify="left")
    for column in ("system", "claim", "holds", "steps compared", "bit-equal", "largest difference", ""):
        proofs.add_column(column)
    for each in measured:
        proof = each.proof
        if proof is not None:
            holds = "[green]yes[/green]" if proof.holds else "[red]no[/red]"
            largest = "" if proof.largest is None else f"{proof.largest:.2g}"
            proofs.add_row(
                each.system, proof.claim, holds, str(proof.compared), str(proof.equal), largest, proof.detail
            )
    return [main, goodput, proofs]


def as_json(outcome: Outcome, full: Outcome, work: Work) -> dict[str, Any]:
    """Everything that was measured of a system."""
    content = asdict(outcome) | {"goodput": {k.value: v for k, v in outcome.goodput.items()}}
    if outcome.failed is not None:
        return content
    return content | {
        "samples": outcome.samples,
        "samples_per_s": outcome.samples_per_s,
        "limit_share": outcome.limit_share(full.samples_per_s, work.shape.size),
        "redone_samples": outcome.redone,
        "dropped_samples": outcome.dropped,
        "node_seconds": outcome.node_seconds,
        "cost_per_million": outcome.cost,
    }


def tell(out: Path, name: str, lines: Sequence[str], outcomes: Sequence[Outcome], work: Work,
         faults: Sequence[Fault], more: dict[str, Any]) -> None:  # fmt: skip
    """Print tables and findings; write ``<name>.json`` and ``<name>.png``."""
    for table in tables(outcomes, work):
        console.print(table)
    for each in outcomes:
        for note in each.notes:
            console.print(f"{each.system}: {note}", highlight=False, markup=False)
    findings = compared(outcomes, work)
    for text in findings:
        console.print(text, highlight=False)
    seconds = max(each.seconds for each in outcomes)
    content = {
        "what": list(lines),
        "emulated": EMULATED,
        "work": asdict(work),
        "events": [
            {
                "at_s": f.at_s,
                "kind": "join" if f.kind is FaultKind.JOIN else "lose",
                "node": f.target.name if f.target else "",
            }
            for f in faults
            if f.at_s < seconds
        ],
        "findings": findings,
        "systems": {each.system: as_json(each, outcomes[0], work) for each in outcomes},
        **more,
    }
    save_json(out / f"{name}.json", content)
    draw(out / f"{name}.png", lines[0], outcomes, work, faults)


def compared(outcomes: Sequence[Outcome], work: Work) -> list[str]:
    """bamboo against the others, as far as both are there."""
    found = {each.system: each for each in outcomes if each.failed is None and each.samples}
    bamboo, full = found.get("bamboo"), found.get("on-demand")
    if bamboo is None or full is None:
        return []
    texts = [f"bamboo's cost per sample is 1/{full.cost / bamboo.cost:.2f} of on-demand's"]
    for name, other in found.items():
        if name not in ("bamboo", "on-demand"):
            texts.append(f"bamboo trains {bamboo.samples_per_s / other.samples_per_s:.2f} times the samples of {name}")
            texts.append(
                f"bamboo takes {other.samples_per_s / bamboo.samples_per_s:.2f} of the time of {name} per sample"
            )
    return texts


def draw(path: Path, title: str, outcomes: Sequence[Outcome], work: Work, faults: Sequence[Fault]) -> None:
    """Members and throughput over time of all systems, below each other."""
    measured = [each for each in outcomes if each.failed is None]
    figure, axes = new_figure(len(measured), 1, figsize=(12, 1.2 + 1.9 * len(measured)), sharex=True, squeeze=False)
    seconds = max(each.seconds for each in measured)
    width = max(1.0, seconds / 120)
    planned = members_over_time(faults, work.shape.size)
    for axis, each in zip(axes[:, 0], measured, strict=True):
        bins = [0.0] * (int(each.seconds / width) + 1)
        for step in each.kept:  # the samples of a step are spread over its time
            length = max(step.end - step.begin, 1e-6)
            for number in range(max(0, int(step.begin / width)), min(len(bins) - 1, int(step.end / width)) + 1):
                overlap = min(step.end, (number + 1) * width) - max(step.begin, number * width)
                bins[number] += step.samples * max(0.0, overlap) / length / width
        edges = [number * width for number in range(len(bins))]
        axis.fill_between(edges, bins, step="post", alpha=0.5, color="tab:green")
        axis.set_ylabel("samples/s")
        axis.set_ylim(0, 1.3 * max(1e-9, measured[0].samples_per_s))
        members = axis.twinx()
        points = each.changes if each.changes else planned
        points = [*(point for point in points if point[0] <= each.seconds), (each.seconds, points[-1][1])]
        members.step([at for at, _ in points], [count for _, count in points], where="post", color="tab:blue", lw=1)
        members.set_ylim(0, 1.3 * work.shape.size)
        members.set_ylabel("members", color="tab:blue")
        label = f"{each.system}: {each.samples} samples, {each.samples_per_s:.1f}/s"
        axis.set_title(label, fontsize=9, loc="left")
    axes[-1, 0].set_xlabel("seconds")
    axes[-1, 0].set_xlim(0, seconds)
    figure.suptitle(f"{title} (EMULATED devices)", fontsize=10)
    save_figure(figure, path)
