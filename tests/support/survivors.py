"""Mutants of the schedule that no test can find, or none needs to: why, by function and change."""

from __future__ import annotations

#: By function of :mod:`bamboo_ds.schedule`, with its module.
SURVIVORS: dict[str, dict[str, str]] = {}
