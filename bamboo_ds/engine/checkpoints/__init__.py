"""A member's contributions to checkpoints: its roles' files, and when they are complete.

:class:`~.saving.Saves` is for commits and for the operation that saves; :mod:`.kept` is what a restart needs besides
DeepSpeed's files.
"""
