"""The control plane: who is a member of the job, and which plan holds.

=================  ======================================================================================
:mod:`.agent`      the process of one slot: runs the worker, keeps its member registered, tells it of plans
:mod:`.leader`     what the agent does whose member leads: judges losses, writes plans, starts the job again
:mod:`.registry`   what a job keeps in etcd: keys, records, a mirror of all of them
:mod:`.notices`    who says that a node is about to vanish
:mod:`.settings`   what an agent is told: the job's settings, and its own circumstances
:mod:`.messages`   what agent and worker tell each other, over :mod:`.wire`
:mod:`.fencing`    when a worker may commit without etcd, and when the job may be started again
:mod:`.reporting`  events of the control plane
:mod:`.script`     runs the script of a worker, and sees how it ends
=================  ======================================================================================

Imports go down: ``agent`` uses ``leader``, both use ``registry``, and all use the modules beside them. The worker
(:mod:`bamboo_ds.worker`) uses messages, records and fencing. Nothing of etcd's client is imported before the worker is
there, since a process must not have loaded gRPC when it forks.
"""
