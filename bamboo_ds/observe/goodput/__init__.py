"""Goodput: every second of every member in one category, while a job goes on and when it is over.

Others use :func:`account` for the events of a file, :class:`Accountant` for events as they come, and what these return:
:mod:`.accounted`, with the categories of :mod:`.lives`.
"""

from .accountant import Accountant, account

__all__ = ["Accountant", "account"]
