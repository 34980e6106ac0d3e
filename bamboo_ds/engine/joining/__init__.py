"""The way of a script that is behind its job, on a member that joins and on all members after a restart.

:class:`~.replay.Replay` draws the states that it goes through, and is what operations ask for the results of calls.
:class:`~.loading.Loader` loads checkpoints, :func:`~.loading.newest_whole` finds the one that a job goes on from.
"""
