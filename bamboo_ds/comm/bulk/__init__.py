"""Copies of other workers' state, over connections of their own: one offers (:mod:`.offers`), others copy
(:mod:`.copying`)."""
