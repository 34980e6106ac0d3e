"""Names of the environment variables that an agent gives to its worker."""

from __future__ import annotations

#: The worker's end of the channel.
ENV_FD = "BAMBOO_CHANNEL_FD"
ENV_MEMBER = "BAMBOO_MEMBER"
ENV_JOB = "BAMBOO_JOB"
ENV_ADDRESS = "BAMBOO_ADDRESS"
ENV_HEARTBEAT_TIMEOUT = "BAMBOO_HEARTBEAT_TIMEOUT"
ENV_JOINER = "BAMBOO_JOINER"
#: Number of the job's restart that the worker belongs to; not set before the first one.
ENV_RESTARTS = "BAMBOO_RESTART_COUNT"
#: Folder of the checkpoint that a restart goes on from, if there is one.
ENV_RESTART_FROM = "BAMBOO_RESTART_FROM"
#: Settings that the command line gives in place of those of the script's block: JSON, values by path.
ENV_OVERRIDES = "BAMBOO_OVERRIDES"
#: Number of steps that are checked, in place of ``redundancy.check_exact``.
ENV_CHECK_EXACT = "BAMBOO_CHECK_EXACT"
