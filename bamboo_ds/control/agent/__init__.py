"""The process of one slot: ``python -m bamboo_ds.control.agent``.

======================  ================================================================================
:mod:`.agent`           runs one worker to its end
:mod:`.waiting`         waits for the job's restart, without a worker
:mod:`.rejoin`          an evicted member's way back into the job
:mod:`.reexec`          goes on as another agent in the same process
:mod:`.coordinator`     the side towards etcd: registration, plans, leadership
:mod:`.worker_process`  the worker: spawned, signalled, reaped; :mod:`.command` says what is executed
:mod:`.watchdog`        whether the worker hangs
:mod:`.ending`          what the worker's end means
:mod:`.leaving`         leaving on notice
:mod:`.data_workers`    further workers, which only draw batches
:mod:`.neighbours`      agents of the same host that die
:mod:`.admission`       what a member needs that is not in the plan yet
======================  ================================================================================
"""
