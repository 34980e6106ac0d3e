"""The way of a script that is behind its job: its calls are replayed until both are together.

:class:`~.replay.Replay` is what operations ask, for a member that joins and for all members after a restart.
"""
