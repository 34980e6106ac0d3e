"""Which job is the cheapest on a spot market, and whether it is worth it: ``bamboo advise``.

================  ============================================================================
:mod:`.instances` instance types: prices, memory, speed; given as options or in a file
:mod:`.offers`    instance types, with what is simulated on them
:mod:`.setups`    what can be chosen, and the setups that a model and a number of nodes allow
:mod:`.screen`    estimates of setups, by the planner's plans and without discrete events
:mod:`.search`    from all setups to few that are simulated, over several seeds
:mod:`.alternatives`  stock DeepSpeed on demand, and checkpoint-restart on the same nodes
:mod:`.verdict`   whether it is worth it, as a sentence
:mod:`.advice`    what comes out of it, and the block to paste
:mod:`.measured`  a profile, from what a running job has measured
================  ============================================================================

Only :mod:`bamboo_ds.simulate` knows how a job fares. What is estimated here decides nothing but what is simulated.
"""
