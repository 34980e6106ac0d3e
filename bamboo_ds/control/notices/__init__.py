"""Notices: a cloud, or an operator, says that this node is about to vanish.

The package costs nothing until a :class:`NoticeWatcher` with sources is started: only then is aiohttp loaded.
"""

from __future__ import annotations

from .build import build_sources
from .notice import Notice, NoticeSource
from .watcher import NoticeWatcher

__all__ = ["Notice", "NoticeSource", "NoticeWatcher", "build_sources"]
