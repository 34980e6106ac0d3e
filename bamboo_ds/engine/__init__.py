"""The pipeline engine that survives the loss of its neighbours.

The engine itself (:mod:`.pipeline_engine`) is what scripts and DeepSpeed see. It delegates to parts, which live in
rooms and which :mod:`.parts` puts together; each gets the context that all share, and the parts that it calls. A room
may use those below it (``pyproject.toml`` has the contract), and its docstring says what it has for the others::

    script ---> BambooPipelineEngine <--- DeepSpeed's own methods
                   |
    operations     | training, evaluation, checkpointing, visits, and the script's code in between
                   v
    joining        the calls of a script that is behind its job, replayed
                   |
    recovery       takeover: attempts an operation, recovers, attempts it again, finishes it
                   |  protocol: one recovery (plan, channels, roles, reports, decision)
                   v
    iteration      the instructions of an operation: passes, boundaries, reduction, replication, commit, step
                   |
    data           micro-batches      checkpoints  what a member contributes to them
    replicas       further roles      script       what scripts change
                   |
    context        the epoch (plan, channels, agreement), the job's progress and history, signs of life, timelines
    stage          one stage on this member: what DeepSpeed's methods compute

All parts belong to the main thread.
"""

from .pipeline_engine import BambooPipelineEngine

__all__ = ["BambooPipelineEngine"]
