"""The work of the agent whose member holds the ``leader`` key. All but :mod:`.leader` is pure.

===================  ====================================================================================
:mod:`.leader`       contests the leadership, asks for the next action, brings it into etcd
:mod:`.last_lead`    what one does that is lost itself
:mod:`.view`         the job as the leader sees it
:mod:`.actions`      what a leader may do next
:mod:`.decisions`    which of that: take over, change the plan, start again, stop, wait
:mod:`.boundary`     changes at a boundary: healing, admission, rebalancing, leaving
:mod:`.departures`   members that leave on notice
:mod:`.failures`     when workers fail by themselves too often
:mod:`.restarts`     how the job starts again after a fatal loss
:mod:`.pruning`      garbage collection of keys
===================  ====================================================================================
"""
