"""What a worker tells that goes to etcd as it is: under which key, and as what record."""

from __future__ import annotations

from ..messages import LayoutReport, Message, Standing, StoreAddress, Suspicion
from ..registry.keys import Keys
from ..registry.records import LayoutRecord, Record, StandingRecord, StoreRecord, SuspicionRecord


def as_record(message: Message, member: str) -> tuple[str, Record] | None:
    """Key and record of a ``message`` of the worker of ``member``; ``None`` if it is not for etcd."""
    if isinstance(message, LayoutReport):
        return Keys.report(member), LayoutRecord(
            id=member, layout=message.layout, redundant=message.redundant, iterators=message.iterators
        )
    if isinstance(message, Standing):
        return Keys.standing(member), StandingRecord(
            id=member, epoch=message.epoch, replicas=tuple(message.replicas), place=message.place
        )
    if isinstance(message, StoreAddress):
        return Keys.store(message.epoch), StoreRecord(epoch=message.epoch, host=message.host, port=message.port)
    if isinstance(message, Suspicion):
        return Keys.suspect(message.member, member), SuspicionRecord(
            accused=message.member, by=member, epoch=message.epoch, reason=message.reason
        )
    return None
