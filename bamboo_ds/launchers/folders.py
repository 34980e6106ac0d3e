"""The folder of a job's logs: its events, and a file for each worker and each agent."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace

from ..control.settings import MemberOptions
from ..errors import ConfigError
from ..variables import ENV_LOGS

logger = logging.getLogger("bamboo_ds.launchers")

#: Where the folders of jobs are unless the user says otherwise, below the working directory.
LOGS = "bamboo-logs"
#: Of the file of events in a job's folder.
EVENTS = "events.jsonl"


def folder_of(job: str, logs: str | None) -> str | None:
    """The folder of ``job`` below ``logs``, made if absent, for its owner alone; ``None`` without ``logs``.

    Raises:
        ConfigError: it cannot be written to.
    """
    if not logs:
        return None
    try:
        return _made(job, logs)
    except OSError as error:
        raise ConfigError(f"--logs {logs} ({ENV_LOGS}) cannot be written to ({error}): name another one") from error


def _made(job: str, logs: str) -> str:
    path = os.path.abspath(os.path.join(logs, job))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.makedirs(path, mode=0o700, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
    return path


def with_logs(options: MemberOptions, logs: str | None, default: bool = False) -> MemberOptions:
    """``options`` with the folder of the job's logs, and its file of events there unless they name one.

    Args:
        logs: folder of all logs, as the user has named it.
        default: without ``logs`` there is one below the working directory, unless that cannot be written to.

    Raises:
        ConfigError: see :func:`folder_of`.
    """
    folder = folder_of(options.job, logs)
    if folder is None and default:
        try:
            folder = _made(options.job, LOGS)
        except OSError as error:
            logger.warning("the job has no logs and no events: %s; name a folder with --logs", error)
    folder = folder or options.logs
    return replace(options, logs=folder, events=options.events or (folder and os.path.join(folder, EVENTS)))
