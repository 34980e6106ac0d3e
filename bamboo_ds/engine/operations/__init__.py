"""The calls of scripts: iterations, evaluations, checkpoints, visits of stages, and the code in between.

Each is an :class:`~bamboo_ds.engine.context.operation.Operation`, which ``recovery.takeover`` runs until it commits.
For the engine alone.
"""
