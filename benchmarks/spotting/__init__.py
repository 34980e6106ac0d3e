"""Parts of ``spot.py``: the market (:mod:`.market`), the systems, and what is told of them."""
