"""Calls of scripts to ``torch.distributed``: collectives that survive losses, on groups that are known by their names.

:class:`~.script.ScriptCollectives` is what an engine has of it; :mod:`~bamboo_ds.comm.backend` executes the calls.
"""
