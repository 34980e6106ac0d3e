"""Copies of what other workers have, over connections of their own: one offers (:mod:`.offers`), others copy
(:mod:`.copying`)."""
