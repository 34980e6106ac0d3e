"""``bamboo run --dry-run``: what a job would be, without starting it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from ..config import RedundancyMode, config_path_from_argv
from ..control import standard_input
from ..control.agent.command import place_variables
from ..control.leader.boundary import policy_of
from ..control.settings import MemberOptions
from ..launchers.network import LOOPBACK
from ..launchers.run import LocalSlots
from ..observe.words import counted
from ..topology import Candidate, Layout, initial_plan, short_of_memory, with_redundancy
from ..topology.memory import NEWEST_SUMS, StateBytes
from ..topology.planner import plan as best_plan
from ..topology.room import member_bytes, page_locked
from .building import Built
from .doctor import Finding, Patient, examine
from .output import console

_MIB, _GIB = 1 << 20, 1 << 30
#: Seconds that the script gets to come to ``deepspeed.initialize``.
_TIMEOUT_S = 300.0
#: Lines of a script's output that are told when it has failed.
_LINES = 15


def tell(options: MemberOptions, slots: LocalSlots, config: str | None) -> int:
    """Prints what the job would be; returns the exit code, 1 if there is a problem.

    Args:
        options: of its members.
        slots: what they are.
        config: of the command line.

    Raises:
        ConfigError: the sources of notices are wrong.
    """
    options.check_notices()
    script = options.command[2:]  # without the interpreter
    # The default one serves a job of this host alone, wherever its etcd is.
    address = None if options.address == LOOPBACK else options.address
    configuration = config or config_path_from_argv(script)
    findings = list(examine(Patient(options.store, address, configuration)))
    built = build(options.address, slots, script)
    if built.problem is not None:
        findings.append(Finding("script", "problem", built.problem))
    elif built.unknown is not None:
        findings.append(Finding("script", "warning", built.unknown))
    _tell_findings(findings)
    if options.bamboo.checkpoint.lacks_place:
        click.echo(
            f"checkpoint.every_s is {options.bamboo.checkpoint.every_s:g}: the job takes checkpoints of its own once "
            "its script has called save_checkpoint; for earlier ones set checkpoint.dir"
        )
    if built.problem is None:
        _tell_plan(options, slots, built)
    return int(any(finding.state == "problem" for finding in findings))


def _tell_findings(findings: Sequence[Finding]) -> None:
    wrong = [each for each in findings if each.state != "ok"]
    click.echo(f"{len(findings) - len(wrong)} checks of bamboo doctor are well" + (", but:" if wrong else ""))
    for each in wrong:
        click.echo(f"{each.state}: {each.check}: {each.found}" + (f"; {each.cure}" if each.cure else ""))


def _tell_plan(options: MemberOptions, slots: LocalSlots, built: Built) -> None:
    workers = slots.workers
    size = counted(workers, "member")
    if built.unknown is not None and slots.pipelines is None:
        click.echo(f"plan: {size}; how many stages there are only the script knows")
        return
    pipelines = built.pipelines if built.unknown is None else slots.pipelines or 1
    stages = built.stages if built.unknown is None else slots.world_size // pipelines
    layout = Layout(pipelines * built.slices, stages, slices=built.slices)
    here = socket.gethostname()
    limit = options.bamboo.topology.memory_limit
    members = [
        Candidate(f"m{slot}", slot, slots.host_of(slot) or here, options.zone, ranks[0], memory=limit)
        for slot, ranks in slots.started_by().items()
    ]
    redundancy = options.bamboo.redundancy
    state = StateBytes(
        precision=built.precision,  # type: ignore[arg-type]
        optimizer=built.optimizer,
        zero=built.zero == 1,
        pipelines=pipelines,
        fp32_gradients=built.fp32_gradients,
        eager_backwards=redundancy.mode.eager_backward,
        syncs=redundancy.mode.replicas and redundancy.sync_every != 0,
    )
    state = replace(state, parked=redundancy.parks and state.elementwise)
    known = bool(built.parameters)
    memory = tuple(state.of(*each) for each in zip_longest(built.parameters, built.frozen, fillvalue=0))
    # Further workers of a member leave as soon as the job runs.
    further = [
        replace(member, id=f"rank {rank}", script_rank=rank, leaving=True)
        for member in members
        for rank in slots.started_by()[member.slot][1:]
    ]
    there, redundant = sorted([*members, *further], key=lambda each: each.script_rank), redundancy.mode.replicas
    first, apart = initial_plan([each.id for each in there]), options.bamboo.topology.zones_apart
    plan = with_redundancy(first, layout, redundant, there, memory, apart)
    if further:
        plan = best_plan(plan, there, policy=policy_of(layout, redundant, options.bamboo))
    sliced = f" of {built.slices} slices" if built.slices > 1 else ""
    shape = f"{counted(pipelines, 'pipeline')} of {counted(stages, 'stage')}{sliced}"
    click.echo(f"plan: {shape} on {size}, redundancy {redundancy.mode.value}")
    if further:
        words = counted(len(further), "further worker")
        click.echo(f"so once the job runs: until then members start {words} for the ranks beyond their first")
    table = Table(box=None)
    for column in ("member", "host", "owns", "shadows"):
        table.add_column(column)
    frozen = any(built.frozen)
    sizes = ("own state", "replicas", "sum", *(("page-locked",) if state.parked else ()))
    for column in ("parameters", *(("frozen",) if frozen else ()), *sizes) if known else ():
        table.add_column(column, justify="right")
    costs = member_bytes(plan, memory) if known else {}
    locked = page_locked(plan, built.parameters, state) if known else Counter[str]()
    for member in members:
        owned, shadowed = plan.owned_by(member.id), plan.shadowed_by(member.id)
        row = [member.id, member.host, _listed(owned), _listed(shadowed)]
        if known:
            own, replicas = costs[member.id]
            for counts in (built.parameters, built.frozen) if frozen else (built.parameters,):
                row.append(f"{sum(counts[role.stage] for role in owned):,}")
            row += map(_size, (own, replicas, own + replicas, *([locked[member.id]] if state.parked else [])))
        table.add_row(*row)
    console().print(table)
    if known:
        optimizer = built.optimizer or "no optimizer that is known"
        taken = "" if state.known else ", taken for one like Adam"
        kind = f"{state.precision}, {optimizer}{taken}{', ZeRO-1' if state.zero else ''}"
        each = f"{state.owner:g} bytes per parameter of an own stage, {state.shadow:g} of a replica"
        each += f", {state.frozen:g} of a frozen one on either" if frozen else ""
        click.echo(f"state: {each} ({kind}); what passes keep comes on top")
        most = NEWEST_SUMS * state.gradient if state.syncs else state.clones
        copies = [f"{most} on owners, of copies of gradients"] if most else []
        copies += [f"{NEWEST_SUMS * state.gradient} on shadows, of sums of gradients"] if state.syncs else []
        if copies:
            click.echo(f"for a while also {'; '.join(copies)}, in bytes per parameter")
        if redundancy.parks:
            _tell_parked(redundancy.mode is RedundancyMode.AUTO and layout.ahead, state, members, costs)
        for line in short_of_memory(plan, members):
            click.echo(line)
    else:
        click.echo("memory: unknown, as the parameters of the stages are")


def _tell_parked(
    chooses: bool, state: StateBytes, members: Sequence[Candidate], costs: Mapping[str, tuple[int, int]]
) -> None:
    """Prints where parked replicas are; ``chooses``: others may compute ahead of a loss."""
    if not state.elementwise:
        click.echo(f"replicas stay on devices: {state.optimizer} may not compute each element by itself")
        return
    hosts: Counter[str] = Counter()
    for member in members:
        hosts[member.host] += costs[member.id][1]
    host, most = hosts.most_common(1)[0]
    click.echo(
        "replicas wait in host memory until they compute, where members have other devices than CPUs: "
        f"{_size(most)} on host {host}, the most; so much of a device is kept free for them (the event replicas_placed "
        "says where they are)"
    )
    click.echo(
        "page-locked, at most: gradients and sums of replicas that wait, and on their way to them; boundary tensors "
        "and slabs for steps come on top"
    )
    if chooses:
        click.echo(
            "they compute ahead of a loss on members with room for that, once passes have been measured "
            f"(redundancy.mode {RedundancyMode.AUTO.value})"
        )


def _size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def _listed(roles: Sequence[object]) -> str:
    return " ".join(map(str, roles)) or "-"


def build(address: str, slots: LocalSlots, script: Sequence[str]) -> Built:
    """Runs the script up to ``deepspeed.initialize``, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="bamboo-dry-run-") as folder:
        result, output = Path(folder, "result"), Path(folder, "output")
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", "bamboo_ds.cli.building", str(result), *script],
                env={**os.environ, **_environment(address, slots)},
                stdin=subprocess.DEVNULL if os.isatty(0) else standard_input.inherited(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return Built(unknown=f"the script has not come to deepspeed.initialize within {_TIMEOUT_S:.0f} s")
            finally:
                _end(process)
        if result.exists():
            told: dict[str, Any] = json.loads(result.read_text())
            told.update((name, tuple(each)) for name, each in told.items() if isinstance(each, list))
            return Built(**told)
        if code == 0:
            return Built(unknown="the script ends without a call of deepspeed.initialize")
        last = output.read_text(errors="replace").splitlines()[-_LINES:]
        size = f"-n {slots.workers}" if slots.ranks is None else f"--ranks {slots.ranks}"
        found = (
            f"the script, as one rank of {slots.world_size} ({size}), ends with code {code} before deepspeed.initialize"
        )
        return Built(problem="\n  | ".join([found, *last]))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the script, and what it has started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left
    finally:
        process.wait()


def _environment(address: str, slots: LocalSlots) -> dict[str, str]:
    """The environment of a worker of rank 0."""
    size = str(slots.world_size)
    told = place_variables(0, size, address, 29500) | {"RANK": "0", "WORLD_SIZE": size}
    if slots.pipelines is not None:
        told["BAMBOO_PIPELINES"] = str(slots.pipelines)
    return told if "OMP_NUM_THREADS" in os.environ else {**told, "OMP_NUM_THREADS": "1"}
