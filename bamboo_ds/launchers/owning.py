"""What a launcher owns while its job runs: etcd, or the job's name in it, and the job's file, secret and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ..control.registry.access import embedded_etcd
from ..control.registry.claims import claimed
from ..control.reporting import emit_or_log
from ..control.settings import MemberOptions
from ..errors import ConfigError
from ..observe.events import EventWriter, RunFinished
from ..secret import keep
from . import jobs

EMBEDDED = "embedded"


def open_events(path: str | None) -> EventWriter:
    """The writer of the launcher's events; raises :class:`ConfigError` if it cannot write there."""
    try:
        return EventWriter(path)
    except OSError as error:
        raise ConfigError(f"cannot write events to {path}: {error}") from error


def tell_finished(events: EventWriter, job: str, code: int, begin: float) -> None:
    """Emit the end of a job that began at ``begin`` (monotonic seconds)."""
    emit_or_log(events, RunFinished(job=job, epoch=0, exit_code=code, run_seconds=time.monotonic() - begin))


@contextmanager
def owned(options: MemberOptions, watch_etcd: Callable[[int], None]) -> Iterator[tuple[MemberOptions, str]]:
    """In the body the job of ``options`` is this process's: other commands find it, and no other one takes its name.

    Where the store is :data:`EMBEDDED` one is started, and ended with the body.

    Args:
        watch_etcd: told the process id of the supervisor of that.

    Returns:
        ``options`` with the URLs of etcd, and the path of the file that says where the job is.

    Raises:
        LaunchError: a job of this name runs.
        StoreError: etcd cannot be used.
    """
    with ExitStack() as stack:
        store = options.store
        if store == EMBEDDED:
            etcd = stack.enter_context(embedded_etcd(options.address, options.job, options.secret))
            watch_etcd(etcd.supervisor_pid)
            store = etcd.url
        else:
            stack.enter_context(claimed(store, options.job))
        state = jobs.this_process(options.job, store, events=options.events, logs=options.logs)
        state.write()
        stack.callback(state.remove)
        keep(options.job, options.secret)
        yield replace(options, store=store), str(state.path)
