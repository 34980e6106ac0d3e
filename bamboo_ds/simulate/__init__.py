"""Discrete events over the product's planner, schedules, decisions and accounting: ``bamboo simulate``.

================  ==========================================================================
:mod:`.market`    which nodes there are, and when: traces of two formats, a generator
:mod:`.profile`   what a model's layers cost; presets
:mod:`.terms`     figures that are assumed: bandwidths, pauses, start times, prices
:mod:`.pace`      how long iterations take under a plan, whole and interrupted; memory
:mod:`.training`  what all simulated jobs share: nodes, steps, checkpoints, events
:mod:`.bamboo`    a job of this package
:mod:`.baselines` checkpoint and restart, sample dropping, and the limits
:mod:`.run`       policies over a market, by seeds, as a report
:mod:`.measured`  predictions against what jobs have done
================  ==========================================================================
"""
