"""Old name; see the imports."""

from __future__ import annotations

from .agent.reexec import handle_signals as handle_signals
