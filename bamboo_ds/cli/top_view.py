"""A job's :class:`~bamboo_ds.observe.view.LiveView` for a terminal. Pure: the time and the size are passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..observe.view import LiveView, MemberView, RoleState, RoleView
from ..observe.words import counted, duration
from .output import printable

#: State of the job: its sign, and how it is printed.
_STATES = {
    "starting": ("○", "blue"),
    "building": ("◐", "blue"),
    "training": ("▶", "green"),
    "recovering": ("↻", "red"),
    "waiting": ("…", "yellow"),
    "restarting": ("↻", "yellow"),
    "ended": ("■", "bold"),
    "reading": ("◔", "blue"),
}
_ROLE: dict[RoleState, str] = {"shadowed": "", "copying": "blue", "unshadowed": "bold yellow", "lost": "bold red"}
#: Load from which a member counts as one with more than its share.
_HEAVY = 1.25
#: Lines that a list of what is not as it should be has at most.
_LISTED = 8
#: Lines that the frame needs besides the stages and the members.
_OTHER_LINES = 16
#: Lines for stages and members where nothing limits them.
_FEW_ROWS = 24
#: Characters of a line of the story on a terminal.
_LONGEST = 140


def frame(view: LiveView, now: float, width: int, height: int | None, processes: bool = False) -> RenderableType:
    """A frame of ``bamboo top``.

    Args:
        now: in seconds since 1970.
        width: columns; below 80 lines are cut.
        height: lines of the terminal; ``None``: as many as it takes, within reason.
        processes: tell the members' processes, and the folder of the newest checkpoint.
    """
    rows = _FEW_ROWS if height is None else max(4, height - _OTHER_LINES)
    listed = len(view.members) if processes and height is None else rows - (view.pipelines or 0)
    name = _names(view)
    roles = _grid(view, name, width, rows // 2)
    members = _members(view, width, listed, processes)
    parts: list[RenderableType] = [_head(view, now), *_flowing(_figures(view, now), width), Text()]
    parts += [part for part in (roles, Text(), members, Text()) if part is not None]
    if processes and view.checkpoint_path is not None:
        parts += [_line(f"newest checkpoint: {view.checkpoint_path}", cut=False), Text()]
    parts += [*_next_loss(view), Text(), *_story(view, height)]
    return Group(*parts)


def _names(view: LiveView) -> Callable[[str], str]:
    known = {member.id: member.name for member in view.members}
    return lambda member: known.get(member, member.partition("-")[0])


# -- the head ---------------------------------------------------------------------------------------------


def _line(*parts: tuple[str, str] | str | None, cut: bool = True) -> Text:
    """One line; what does not fit is cut, or goes on in the next one."""
    line = Text(no_wrap=cut, overflow="ellipsis" if cut else "fold")
    for part in parts:
        if part is not None:
            line.append_text(printable(*(part if isinstance(part, tuple) else (part,))))
    return line


def _head(view: LiveView, now: float) -> Text:
    sign, style = _STATES[view.state]
    what = f"ended, exit code {view.exit_code}" if view.state == "ended" else view.state
    if view.stopping:
        what, style = f"stopping ({view.stopping})", "yellow"
    since = "" if view.started is None else f"   for {_long((view.ended or now) - view.started)}"
    busy = [member for member in view.members if member.doing]
    doing = f"   {busy[0].name} {busy[0].doing}" if busy else ""
    return _line((f"job {view.job}", "bold"), "   ", (f"{sign} {what}", style), f"   epoch {view.epoch}{since}{doing}")


def _figures(view: LiveView, now: float) -> list[str]:
    pace, totals, time, saved = view.pace, view.totals, view.ended or now, view.checkpoint
    step = "-" if view.step is None else f"{view.step:,}"
    if view.global_step is not None and view.global_step != view.step:
        step += f" (DeepSpeed's {view.global_step:,})"
    if view.time is None:
        return [f"step {step}", "no events of the job are on this host, and etcd tells no times"]
    goodput = view.account.goodput if view.account is not None else None
    age = None if view.last_step_time is None or view.ended is not None else time - view.last_step_time
    found = [
        f"step {step}" + ("" if age is None else f", {_long(max(0.0, age))} ago"),
        None if pace.seconds is None else f"iteration {duration(pace.seconds)}",
        None if pace.median_seconds is None else f"median {duration(pace.median_seconds)}",
        None if pace.samples_per_second is None else f"{pace.samples_per_second:,.1f} samples/s",
        f"goodput {'-' if goodput is None else f'{goodput:.1%}'}",
        f"losses {totals.losses}",
        f"pauses {duration(totals.pause_seconds)}" if totals.losses else None,
        f"restarts {totals.restarts}" if totals.restarts else None,
        "no checkpoint"
        if saved is None
        else f"checkpoint of step {saved.step:,}, {_long(max(0.0, time - saved.time))} old",
        None if view.coverage.ratio is None else f"{view.coverage.ratio:.0%} of redundant passes ahead",
    ]
    return [each for each in found if each is not None]


def _flowing(figures: Sequence[str], width: int) -> list[Text]:
    """The figures in as few lines as they fit in."""
    lines: list[str] = []
    for figure in figures:
        longer = f"{lines[-1]}   {figure}" if lines else figure
        lines[-1:] = [longer] if not lines or len(longer) <= width else [lines[-1], figure]
    return [_line(line) for line in lines]


def _long(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 119.5:
        return duration(seconds)
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# -- stages x pipelines -----------------------------------------------------------------------------------


def _grid(view: LiveView, name: Callable[[str], str], width: int, rows: int) -> RenderableType:
    if view.pipelines is None or view.stages is None or not view.roles:
        return _line("the engines are not built yet")
    cells = [_cell(view, role, name) for role in view.roles]
    side = len(f"pipeline {view.pipelines - 1}") if view.pipelines > 1 else 0
    needed = side + view.stages * (2 + max(len(f"stage {view.stages - 1}"), *(len(cell) for cell in cells)))
    if needed > width or view.pipelines > max(2, rows):
        return _summary(view, name)
    table = _table()
    if view.pipelines > 1:
        table.add_column()
    for stage in range(view.stages):
        table.add_column(f"stage {stage}")
    for pipeline in range(view.pipelines):
        row = [cells[stage * view.pipelines + pipeline] for stage in range(view.stages)]
        table.add_row(*([Text(f"pipeline {pipeline}", "dim")] if view.pipelines > 1 else []), *row)
    return Group(
        table, _line(("owner/shadow   ! no replica   (m1) copies it   [2/6] blocks lent to the shadow", "dim"))
    )


def _cell(view: LiveView, role: RoleView, name: Callable[[str], str]) -> Text:
    """``m1/m0 [2/6]``."""
    if role.state == "lost":
        return printable(f"{name(role.owner)} × lost", _ROLE["lost"])
    held = "" if role.shadow is None else f"/{name(role.shadow)}"
    if role.shadow is None and role.copying:
        held = f"/({','.join(map(name, role.copying))})"
    if not held and view.unshadowed is not None:
        held = "/- !"
    lent = ""
    if role.lent is not None:
        lent = f" [{role.lent[1] - role.lent[0]}/{role.blocks or '?'}]"
    return printable(f"{name(role.owner)}{held}{lent}", _ROLE[role.state] if view.unshadowed is not None else "")


def _summary(view: LiveView, name: Callable[[str], str]) -> RenderableType:
    """Counts, where there are too many to show."""
    states = Counter(role.state for role in view.roles)
    lent = sum(role.lent is not None for role in view.roles)
    shape = f"{counted(view.pipelines or 0, 'pipeline')} of {counted(view.stages or 0, 'stage')}"
    if view.unshadowed is None:
        return _line(f"{shape}, without redundancy")
    told = ", ".join(f"{states[state]} {state}" for state in _ROLE if states[state])
    lines = [_line((shape, "bold"), f": {told}" + (f"; {lent} divided" if lent else ""))]
    wrong = [role for role in view.roles if role.state != "shadowed"]
    for role in wrong[:_LISTED]:
        where = f"  stage {role.stage} of pipeline {role.pipeline}: "
        lines.append(_line(where, (f"{role.state}, owner {name(role.owner)}", _ROLE[role.state])))
    return Group(*lines, *_rest(len(wrong)))


def _rest(count: int) -> list[Text]:
    return [_line((f"  and {count - _LISTED} more", "dim"))] if count > _LISTED else []


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)


# -- members ----------------------------------------------------------------------------------------------


def _members(view: LiveView, width: int, rows: int, processes: bool) -> RenderableType:
    present = [member for member in view.members if member.present]
    hosts, zones = {member.host for member in present}, {member.zone for member in present if member.zone}
    places = f" on {counted(len(hosts), 'host')}" + (f" in {counted(len(zones), 'zone')}" if zones else "")
    head = _line((counted(len(present), "member"), "bold"), places if present else "")
    if len(present) > max(4, rows):
        return Group(head, *_crowd(present))
    most = max(0, rows - len(present)) if processes else max(0, min(4, rows - len(present)))
    gone = [member for member in view.members if not member.present][-most or None :]
    table = _table()
    for column in ("member", "host", "state", *(("worker", "agent") if processes else ()), "owns", "shadows", "load"):
        table.add_column(column, no_wrap=True, overflow="ellipsis", max_width=22 if width < 110 else None)
    for member in [*present, *(gone if rows > len(present) else ())]:
        table.add_row(
            printable(member.name + (" *" if member.leader else "")),
            printable(_place(member)),
            printable(member.state, "" if member.state == "running" else "yellow" if member.present else "dim"),
            *((str(member.pid or "-"), str(member.agent_pid or "-")) if processes else ()),
            _listed(view, member.roles),
            _listed(view, member.shadows),
            _load(member.load) if member.present else Text(),
        )
    return Group(head, table)


def _place(member: MemberView) -> str:
    return (member.host or "-") + (f", {member.zone}" if member.zone else "")


def _listed(view: LiveView, roles: Sequence[tuple[int, int]]) -> str:
    """``1, 2`` where there is one pipeline, else ``0.1, 0.2``."""
    several = (view.pipelines or 1) > 1
    return ", ".join(f"{pipeline}.{stage}" if several else str(stage) for pipeline, stage in roles) or "-"


def _load(load: float | None) -> Text:
    if load is None:
        return Text("-")
    return Text(
        f"{'█' * max(1, round(4 * min(load, 2))) if load else '':8} {load:.2f}", "yellow" if load > _HEAVY else ""
    )


def _crowd(present: Sequence[MemberView]) -> Iterable[Text]:
    """Counts, and the members that differ from the others."""
    states = Counter(member.state for member in present)
    yield _line("  " + ", ".join(f"{count} {state}" for state, count in states.most_common(6)))
    loads = Counter(round(member.load, 1) for member in present if member.load is not None)
    if loads:
        shares = ", ".join(f"{count} with {load:g}" for load, count in sorted(loads.items())[:6])
        yield _line(f"  stages' worth of work: {shares}" + (", …" if len(loads) > 6 else ""))
    busy = [each for each in present if each.state != "running" or (each.load or 0) > _HEAVY or each.notice]
    for member in sorted(busy, key=lambda each: -(each.load or 0))[:_LISTED]:
        load = "" if member.load is None else f", load {member.load:.2f}"
        notice = f", notice: {member.notice}" if member.notice else ""
        yield _line(f"  {member.name} on {_place(member)}: ", (f"{member.state}{load}{notice}", "yellow"))
    yield from _rest(len(busy))


# -- what next, and what before ---------------------------------------------------------------------------


def _next_loss(view: LiveView) -> list[Text]:
    owners = [member for member in view.members if member.present and member.roles]
    if view.ended is not None or not view.roles or not owners:
        return []
    fatal = [member for member in owners if member.fatal]
    if not fatal:
        return [_line(("next loss: ", "bold"), ("any one member can be lost", "green"))]
    what = "any member" if len(fatal) == len(owners) else f"one of {counted(len(fatal), 'member')}"
    back = "the beginning" if view.checkpoint is None else f"the checkpoint of step {view.checkpoint.step:,}"
    head = ("next loss: ", "bold"), (f"that of {what} would be fatal", "bold yellow"), f" (back to {back})"
    lines = [_line(*head, cut=False)]
    for member in fatal[: _LISTED // 2]:
        lines.append(_line(f"  ! {member.name} alone holds {_stages(view, member.fatal)}"))
    if len(fatal) > _LISTED // 2:
        lines.append(_line((f"  and {len(fatal) - _LISTED // 2} more", "dim")))
    return lines


def _stages(view: LiveView, roles: Sequence[tuple[int, int]]) -> str:
    several = (view.pipelines or 1) > 1
    named = [f"stage {stage} of pipeline {pipeline}" if several else f"stage {stage}" for pipeline, stage in roles]
    return ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")


def _story(view: LiveView, height: int | None) -> list[Text]:
    newest = view.story[-5 if height is None or height > 30 else -3 :]
    whole = height is None
    shown = [(n.time, n.text if whole or len(n.text) < _LONGEST else f"{n.text[:_LONGEST]}…") for n in newest]
    return [_line((f"{datetime.fromtimestamp(time):%H:%M:%S} ", "dim"), text, cut=False) for time, text in shown]
