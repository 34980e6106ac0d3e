"""Further roles on a member: built as the local one was, copied, restored.

:class:`~.building.StageBuilder` builds them, :func:`~.replica.capture` and :func:`~.replica.restore` move a role's
state, :class:`~.construction.Construction` is one that is under way, and :mod:`.refusals` names what could not be
built twice.
"""
