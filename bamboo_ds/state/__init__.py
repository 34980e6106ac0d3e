"""Moving a role's state between members."""

from .tree import ARRAYS, Tree, join, split

__all__ = ["ARRAYS", "Tree", "join", "split"]
