"""Micro-batches: drawn from the scripts' iterators, served to other members, accounted for in the ledger.

:class:`~.supply.BatchSupply` is for recovery and operations, :class:`~.batches.Batches` for passes,
:class:`~.accounts.Accounts` for the commit.
"""
