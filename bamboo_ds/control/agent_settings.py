"""Old name; see the imports."""

from __future__ import annotations

from .agent.command import script_command as script_command
from .settings import AgentSettings as AgentSettings
from .settings import MemberOptions as MemberOptions
from .settings import parse_arguments as parse_arguments
