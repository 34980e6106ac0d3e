"""Old name; see the imports."""

from __future__ import annotations

from .registry.claims import claim as claim
from .registry.claims import claimed as claimed
from .registry.claims import release as release
