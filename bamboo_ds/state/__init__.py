"""Moving a role's state between members."""

from .tree import ARRAYS, SCALARS, Tree, join, split

__all__ = ["ARRAYS", "SCALARS", "Tree", "join", "split"]
