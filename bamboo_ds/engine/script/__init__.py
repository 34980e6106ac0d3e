"""What scripts change between two calls of their engine, and what of it all copies of a stage can follow.

:mod:`.changes` compares a stage before and after the script's code (:class:`~.changes.Weights`,
:class:`~.changes.Adjustable`), :mod:`.assigned` follows attributes, :mod:`.flags` are settings of the process, and
:mod:`.replaced` refuses scripts that replace DeepSpeed's code.
"""
