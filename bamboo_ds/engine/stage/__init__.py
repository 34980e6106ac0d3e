"""One stage on this member, which DeepSpeed's methods compute.

A :class:`~.runtime.StageRuntime` is all that an engine needs to compute a role; :class:`~.runtime.RuntimeBinding` puts
one of several into DeepSpeed's engine. What a stage consists of: its modules (:mod:`.layers`, :mod:`.blocks`,
:mod:`.attributes`, :mod:`.tied`), its optimizer (:mod:`.optimizers`, :mod:`.sharded`, :mod:`.wrappers`,
:mod:`.clones`), its scheduler, its random numbers (:mod:`.rng`), its process groups. :mod:`.deepspeed_adapter` is the
only way to DeepSpeed's engine, :mod:`.commit` the vector of a commit. Nothing here knows of members, plans or epochs.
"""
