"""Old name; see the imports."""

from __future__ import annotations

from .registry.mirror import Mirror as Mirror
