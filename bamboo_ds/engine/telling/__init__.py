"""What the main thread tells of its work: signs of life, timelines, monitors, differing replicas.

:class:`~.beats.Beats`, :class:`~.recording.Recording`, :class:`~.monitors.Monitors` and
:class:`~.mismatches.Mismatches` listen. Nothing that is computed depends on them.
"""
