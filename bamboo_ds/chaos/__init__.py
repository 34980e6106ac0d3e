"""Faults against a running job, and the account of how it bore them.

Pure: :mod:`.faults` and :mod:`.schedule` (what is to happen when), :mod:`.sparing` (whom it may hit), :mod:`.verify`
(how the job bore it). :mod:`.injections`, :mod:`.joiners` and :mod:`.processes` carry faults out, :mod:`.runner` puts
the two together. Only :mod:`.victim` runs inside a worker, and only where a script asks for it.
"""
