"""Roles, plans and the planner. Pure: no I/O, no torch."""

from .block_costs import BlockCosts, BlockSeconds, settled
from .costs import Candidate, Costs, Policy, predicted_s
from .division import divided
from .explain import explain, undivided
from .moves import Move, holders_of, learners_for, moves
from .plan import Lent, Plan, Side, part_hosts
from .planner import initial_plan, takeover, with_redundancy
from .roles import Layout, Role
from .sources import batch_sources, ends, hungry

# The function ``planner.plan`` is not here: it would hide the module ``plan``.
__all__ = [
    "BlockCosts",
    "BlockSeconds",
    "Candidate",
    "Costs",
    "Layout",
    "Lent",
    "Move",
    "Plan",
    "Policy",
    "Role",
    "Side",
    "batch_sources",
    "divided",
    "ends",
    "explain",
    "holders_of",
    "hungry",
    "initial_plan",
    "learners_for",
    "moves",
    "part_hosts",
    "predicted_s",
    "settled",
    "takeover",
    "undivided",
    "with_redundancy",
]
