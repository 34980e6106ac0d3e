"""The contents of etcd of a job, under ``/bamboo/<job>/``.

==================  ===================================================================================
:mod:`.keys`        the keys, and ids of members
:mod:`.records`     the values, one schema per fact
:mod:`.mirror`      a local copy of all of them, kept current by a watch
:mod:`.access`      how processes get at etcd, and whether they know the job's secret
:mod:`.claims`      a job's keys are claimed when it starts and removed after its end
:mod:`.vacancies`   the slot and the rank of a member that joins
==================  ===================================================================================
"""
