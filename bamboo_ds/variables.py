"""Names of the environment variables of a job's processes. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import ConfigError

# Users and ``bamboo launch`` set these, see ``docs/guides/launchers.md``.
#: etcd's URLs, separated by commas; the option ``--store`` of commands comes before it.
ENV_STORE = "BAMBOO_STORE"
ENV_JOB = "BAMBOO_JOB"
ENV_ADDRESS = "BAMBOO_ADDRESS"
ENV_EVENTS = "BAMBOO_EVENTS"
ENV_LOGS = "BAMBOO_LOGS"
ENV_TEE = "BAMBOO_TEE"
#: ``bamboo launch`` itself: its process id, when it began, and the space of process ids, with blanks between.
ENV_LAUNCH = "BAMBOO_LAUNCH"
#: The configuration whose block counts, where the script's is not on its command line.
ENV_CONFIG = "BAMBOO_CONFIG"
#: How many steps are checked, in place of ``redundancy.check_exact``.
ENV_CHECK_EXACT = "BAMBOO_CHECK_EXACT"

# An agent sets these, and some of the above, for its worker.
#: Who has it is none of another launcher's processes.
ENV_MEMBER = "BAMBOO_MEMBER"
#: The failure domain, if it is another one than the machine by its name.
ENV_HOST = "BAMBOO_HOST"
#: The worker's end of the channel.
ENV_FD = "BAMBOO_CHANNEL_FD"
#: The worker's listening socket and its token, see :class:`~bamboo_ds.comm.places.Listener`.
ENV_LISTENER = "BAMBOO_LISTENER"
ENV_JOINER = "BAMBOO_JOINER"
#: Number of the job's restart that the worker belongs to; not set before the first one.
ENV_RESTARTS = "BAMBOO_RESTART_COUNT"
#: Folder of the checkpoint that a restart goes on from, if there is one.
ENV_RESTART_FROM = "BAMBOO_RESTART_FROM"
#: The job's settings: JSON, see :class:`~bamboo_ds.job_settings.JobSettings`.
ENV_SETTINGS = "BAMBOO_SETTINGS"
#: The options by which DeepSpeed's launcher, as older ones of torch, tells a script its ``LOCAL_RANK``.
LOCAL_RANK_OPTIONS = ("--local_rank", "--local-rank")


def checked_steps(environ: Mapping[str, str]) -> int | None:
    """The number in ``BAMBOO_CHECK_EXACT``, if it is set; raises :class:`ConfigError` if it is none."""
    text = environ.get(ENV_CHECK_EXACT)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{ENV_CHECK_EXACT} is {text!r}: set it to the number of steps to check, or not at all")
    return int(text)
