"""Discrete events over the product's planner, schedules, decisions and accounting: ``bamboo simulate``.

================  ==========================================================================
:mod:`.given`     what options and files give
:mod:`.market`    which nodes there are, and when: traces of two formats, a generator
:mod:`.profile`   what a model's layers cost; presets
:mod:`.terms`     figures that are assumed: bandwidths, pauses, start times, prices
:mod:`.pace`      how long iterations take under a plan, whole and interrupted; memory
:mod:`.training`  what all simulated jobs share: nodes, steps, checkpoints, events
:mod:`.bamboo`    a job of this package
:mod:`.baselines` checkpoint and restart, sample dropping, and the limits
:mod:`.run`       policies over a market, by seeds, as a report
:mod:`.instances` instance types, with what is simulated on them
:mod:`.sweep`     every policy in its best arrangement
:mod:`.results`   what comes out of that: ranks, the verdict, the block to paste
:mod:`.profiling` a profile, from what a running job has measured
================  ==========================================================================
"""
