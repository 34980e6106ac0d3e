"""Old name; see the imports."""

from __future__ import annotations

from ..processes import adopt_orphans as adopt_orphans
from ..processes import die_with_parent as die_with_parent
from ..processes import end_descendants as end_descendants
from ..processes import reap_adopted as reap_adopted
