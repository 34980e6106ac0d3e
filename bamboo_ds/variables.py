"""Variables that ``bamboo launch`` and users set for the processes of a job: see the README. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import ConfigError

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
#: How many steps are checked, in place of ``redundancy.check_exact``; every worker that is told has it.
ENV_CHECK_EXACT = "BAMBOO_CHECK_EXACT"
#: Set in every worker: who has it is none of another launcher's processes.
ENV_MEMBER = "BAMBOO_MEMBER"


def checked_steps(environ: Mapping[str, str]) -> int | None:
    """The number in ``BAMBOO_CHECK_EXACT``, if it is set; raises :class:`ConfigError` if it is none."""
    text = environ.get(ENV_CHECK_EXACT)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{ENV_CHECK_EXACT} is {text!r}: set it to the number of steps to check, or not at all")
    return int(text)
