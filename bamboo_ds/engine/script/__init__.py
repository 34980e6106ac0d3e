"""Changes by scripts between two calls of their engine, and those that all copies of a stage can follow.

:mod:`.changes` compares a stage before and after the script's code (:class:`~.changes.Weights`,
:class:`~.changes.Adjustable`), :mod:`.assigned` follows attributes, :mod:`.flags` are settings of the process, and
:mod:`.replaced` refuses scripts that replace DeepSpeed's code.
"""
