"""Checkpoints in stores of objects (S3 and others), by fsspec.

:mod:`.client` is all that talks to a store; :mod:`.objects` keeps checkpoints in one, as a
:class:`~..places.CheckpointPlace`; :mod:`.cache` brings them to this host.
"""
