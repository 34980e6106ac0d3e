"""The process of one slot: ``python -m bamboo_ds.control.agent``. What state it is in says :mod:`.slot`.

======================  ================================================================================
:mod:`.slot`            the state machine: starting, running, leaving, waiting, rejoining, ended
:mod:`.agent`           starting, running and leaving: runs one worker to its end
:mod:`.waiting`         waiting for the job's restart, without a worker
:mod:`.rejoin`          rejoining: the way back into the job
:mod:`.reexec`          goes on as another agent in the same process
:mod:`.mailbox`         what the main thread is to do
:mod:`.coordinator`     the side towards etcd: registration, plans, leadership; :mod:`.lease` keeps it alive
:mod:`.membership`      where the member stands in the job: the state machine that the coordinator acts on
:mod:`.assembly`        puts that side together
:mod:`.worker_process`  the worker: spawned, signalled, reaped; :mod:`.command` says what is executed
:mod:`.watchdog`        whether the worker hangs
:mod:`.leaving`         leaving on notice
:mod:`.data_workers`    further workers, which only draw batches
:mod:`.neighbours`      agents of the same host that die
:mod:`.following`       which keys of the job the coordinator follows
:mod:`.health`          answers for a member that is accused
======================  ================================================================================
"""
