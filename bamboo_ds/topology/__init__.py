"""Roles, plans and the planner. Pure: no I/O, no torch."""

from .plan import Plan
from .planner import initial_plan, takeover, with_redundancy
from .roles import Layout, Role

__all__ = ["Layout", "Plan", "Role", "initial_plan", "takeover", "with_redundancy"]
