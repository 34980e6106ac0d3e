"""State that all parts of the engine share: the epoch, the progress of the job, what it has done, what is told of it.

:class:`~.shared.EngineContext` holds it; a part is an :class:`~.shared.InContext`. :class:`~.records.CurrentEpoch` is
the plan with its streams (:mod:`.channels`), :class:`~.records.Progress` how far the job is, :class:`~.history.History`
what its operations have given, :class:`~.operation.Operation` what all members do together, :class:`~.beats.Beats` and
:class:`~.recording.Recording` what the main thread tells. All of it is for every room above.
"""
