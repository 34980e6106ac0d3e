"""Old name; see the imports."""

from __future__ import annotations

from ..processes import boot_id as boot_id
from .registry.keys import Keys as Keys
from .registry.keys import slot_of as slot_of
from .registry.records import LeftRecord as LeftRecord
from .registry.records import MemberRecord as MemberRecord
from .registry.records import StopRecord as StopRecord
from .registry.records import in_slot_order as in_slot_order
