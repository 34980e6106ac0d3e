"""Names of the environment variables that an agent gives to its worker."""

from __future__ import annotations

from ..variables import ENV_ADDRESS as ENV_ADDRESS
from ..variables import ENV_CHECK_EXACT as ENV_CHECK_EXACT
from ..variables import ENV_JOB as ENV_JOB
from ..variables import ENV_MEMBER as ENV_MEMBER

#: The worker's end of the channel.
ENV_FD = "BAMBOO_CHANNEL_FD"
ENV_HEARTBEAT_TIMEOUT = "BAMBOO_HEARTBEAT_TIMEOUT"
ENV_JOINER = "BAMBOO_JOINER"
#: Number of the job's restart that the worker belongs to; not set before the first one.
ENV_RESTARTS = "BAMBOO_RESTART_COUNT"
#: Folder of the checkpoint that a restart goes on from, if there is one.
ENV_RESTART_FROM = "BAMBOO_RESTART_FROM"
#: Settings that the command line gives in place of those of the script's block: JSON, values by path.
ENV_OVERRIDES = "BAMBOO_OVERRIDES"
