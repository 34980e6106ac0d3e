"""Old name; see the imports."""

from __future__ import annotations

from ..processes import process_space as process_space
from ..processes import started as started
from .agent.neighbours import report_dead_agent as report_dead_agent
