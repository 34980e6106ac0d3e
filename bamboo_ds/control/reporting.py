"""Events of the control plane."""

from __future__ import annotations

import logging

from ..observe.events import Event, EventWriter

logger = logging.getLogger("bamboo_ds.control.reporting")


def emit_or_log(events: EventWriter, event: Event) -> None:
    """Write ``event``; a file that cannot be written (disk full) must not end the job, so it is logged."""
    try:
        events.emit(event)
    except OSError as error:
        logger.error("cannot write the event %s: %s", event.event, error)
