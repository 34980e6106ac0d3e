"""Roles, plans and the planner. Pure: no I/O, no torch."""

from .block_costs import BlockCosts, BlockSeconds, settled
from .costs import Candidate, Costs, Policy, predicted_s
from .division import divided
from .explain import explain, memory_of, short_of_memory, undivided
from .memory import StageMemory
from .moves import Move, builders_for, holders_of, moves, without_copies
from .plan import LONG_S, Lent, Plan, Side, part_hosts
from .planner import initial_plan, takeover, with_redundancy
from .roles import Layout, Role
from .room import Room, tightness_of, while_copying
from .sources import batch_sources, end_sources, ends, hungry, source_ends

# The function ``planner.plan`` is not here: it would hide the module ``plan``.
