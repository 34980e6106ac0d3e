"""The instructions of an iteration: passes, exchanges, reductions, the commit, the step.

Each part executes some instructions of :mod:`bamboo_ds.schedule`; the map is
:attr:`~bamboo_ds.engine.pipeline_engine.BambooPipelineEngine.HANDLERS`. A part raises
:class:`~bamboo_ds.errors.EpochChanged` where a loss interrupts it, and knows nothing of how the iteration goes on.
"""
