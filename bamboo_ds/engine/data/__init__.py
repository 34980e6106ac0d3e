"""Micro-batches: drawn from the scripts' iterators, served to other members, and what iterations have consumed.

:class:`~.supply.BatchSupply` is for recovery and operations, :class:`~.batches.PipelineBatches` for passes.
"""
