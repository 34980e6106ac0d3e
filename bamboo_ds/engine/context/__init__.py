"""What all parts of the engine share: the epoch, the progress of the job, and what the job has done.

:class:`~.records.CurrentEpoch` is the plan with its streams (:mod:`.lanes`), :class:`~.records.Progress` how far the
job is, :class:`~.history.History` what its operations have given, and :class:`~.operation.Operation` what all members
do together. All of it is for every room above.
"""
