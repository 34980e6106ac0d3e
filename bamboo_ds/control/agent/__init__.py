"""The process of one slot: ``python -m bamboo_ds.control.agent``. :mod:`.states` has its states.

======================  ================================================================================
:mod:`.states`          the life of a member: states, events, and what follows; two walk it:
:mod:`.slot`            the agent's view: what it hears, and what the end of its worker means
:mod:`.membership`      the coordinator's: where the member stands by the plans, and which keys it follows
:mod:`.agent`           runs one worker to its end
:mod:`.waiting`         waiting for the job's restart, without a worker
:mod:`.rejoin`          rejoining: the way back into the job
:mod:`.reexec`          goes on as another agent in the same process
:mod:`.mailbox`         actions for the main thread
:mod:`.coordinator`     the side towards etcd: registration, plans, leadership; :mod:`.lease` keeps it alive
:mod:`.assembly`        puts that side together
:mod:`.worker_process`  the worker: spawned, signalled, reaped; :mod:`.command` says what is executed
:mod:`.watchdog`        whether the worker hangs
:mod:`.leaving`         leaving on notice
:mod:`.data_workers`    further workers, which only draw batches
:mod:`.neighbours`      agents of the same host that die
:mod:`.health`          answers for a member that is accused
======================  ================================================================================
"""
