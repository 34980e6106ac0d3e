"""One worker process: the script of the user, with what it has of its job.

=====================  ==================================================================================
:mod:`.job`            the job of this process: entering epochs, waiting for plans, who speaks for a rank
:mod:`.exit`           how the script ends, and with which exit code
:mod:`.channel`        this end of the channel to the agent: plans come in, reports and heartbeats go out
:mod:`.activity`       what the main thread does, for heartbeats, and where it stands still, for the log
:mod:`.plan_changes`   what a script may learn of changes of the plan
=====================  ==================================================================================

A worker knows no etcd: what it tells of itself are records (:mod:`bamboo_ds.control.registry.records`) and messages
(:mod:`bamboo_ds.control.messages`) to its agent.
"""

HOW_TO_START = (
    "start the job with `bamboo run -n WORKERS SCRIPT ARGS`, `bamboo launch`, deepspeed, torchrun or srun, and let "
    "deepspeed.init_distributed() create the process groups (or bamboo_ds.init_distributed(config) if the "
    "configuration is a dict in the script)"
)
