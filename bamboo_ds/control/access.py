"""Old name; see the imports."""

from __future__ import annotations

from .registry.access import check_secret as check_secret
from .registry.access import embedded_etcd as embedded_etcd
from .registry.access import open_store as open_store
