"""torch.distributed as this package uses it: the stubs lack some of what it exports, and differ by version."""

from __future__ import annotations

from typing import Any

import torch.distributed

dist: Any = torch.distributed
#: ``torch.distributed.distributed_c10d``: the registry of groups.
registry: Any = torch.distributed.distributed_c10d
#: A ``torch.distributed.Store``.
Store = Any
