"""Old name; see the imports."""

from __future__ import annotations

from .leader.boundary import ready_copies as ready_copies
