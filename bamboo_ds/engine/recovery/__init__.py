"""Losses and planned changes: how the members of a new plan agree, and go on.

:class:`~.takeover.Takeover` runs operations until they commit, :class:`~.protocol.RecoveryProtocol` is one recovery,
:mod:`.reports` what members tell each other in it, :class:`~.copies.Copies` brings replicas to where a plan wants them.
Operations use ``Takeover``, ``Copies`` and :class:`~.announcements.Announcements`.
"""
