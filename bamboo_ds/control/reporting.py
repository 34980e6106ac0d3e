"""Events of the control plane."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable

from pydantic import ValidationError

from ..observe.events import Event, EventWriter, MemberFailed, parse_event
from .messages import EventReport
from .registry.records import LeftRecord, TimingRecord
from .settings import AgentSettings

logger = logging.getLogger("bamboo_ds.control.reporting")


def emit_or_log(events: EventWriter, event: Event) -> None:
    """Writes ``event``; a file that cannot be written (disk full) must not end the job, so it is logged."""
    try:
        events.emit(event)
    except OSError as error:
        logger.error("cannot write the event %s: %s", event.event, error)


def tell_failure(
    events: EventWriter, settings: AgentSettings, epoch: int, departure: LeftRecord, error: str | None, log: str | None
) -> None:
    """Writes that the worker of an agent with ``settings`` has failed; ``log``: where its output is."""
    event = MemberFailed(
        job=settings.job,
        member=departure.id,
        epoch=epoch,
        member_id=departure.id,
        host=settings.host or socket.gethostname(),
        rank=settings.rank,
        exit_code=departure.code,
        reason=departure.reason,
        detail=departure.detail,
        error=error,
        log=log,
    )
    emit_or_log(events, event)


def forward(
    events: EventWriter, report: EventReport, job: str, member: str, timing: Callable[[object], TimingRecord | None]
) -> None:
    """Writes an event of the worker of ``member``, completed by what only the control plane knows.

    Args:
        timing: how the loss that made an epoch was learnt, where that is known.
    """
    fields = {"job": job, "member": member, **report.fields}
    if report.kind == "recovered":
        record = timing(fields.get("epoch"))
        if record is not None:
            known = {"detection_seconds": record.detection_s, "plan_seconds": record.plan_s}
            fields.update({k: v for k, v in known.items() if fields.get(k) is None})
    try:
        event = parse_event(json.dumps({"event": report.kind, **fields}))
    except ValidationError as error:
        logger.error("the worker sent an event that is none: %s", error)
        return
    emit_or_log(events, event)
