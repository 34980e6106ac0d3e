"""Moving a role's state between members."""

from .tree import Tree, join, split

__all__ = ["Tree", "join", "split"]
