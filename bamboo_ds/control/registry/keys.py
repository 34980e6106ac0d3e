"""The keys of a job in etcd, and the ids of its members."""

from __future__ import annotations

import os


def namespace(job: str) -> str:
    """Prefix of all keys of ``job``."""
    return f"/bamboo/{job}/"


class Keys:
    """The keys of a job, relative to :func:`namespace`."""

    SPEC = "spec"
    LEADER = "leader"
    PLAN = "plan"
    STOP = "stop"
    RESTART = "restart"
    MEMBERS = "members/"
    LEFT = "left/"
    REPORTS = "reports/"
    STANDINGS = "standings/"
    SUSPECTS = "suspects/"
    VOUCHERS = "vouchers/"
    EPOCHS = "epochs/"
    PROGRESS = "progress/"
    SLOTS = "slots/"
    NOTICES = "notices/"

    @classmethod
    def member(cls, member: str) -> str:
        """Key of a :class:`MemberRecord`."""
        return f"{cls.MEMBERS}{member}"

    @classmethod
    def left(cls, member: str) -> str:
        """Key of a :class:`LeftRecord`."""
        return f"{cls.LEFT}{member}"

    @classmethod
    def notice(cls, member: str) -> str:
        """Key of a :class:`NoticeRecord`."""
        return f"{cls.NOTICES}{member}"

    @classmethod
    def report(cls, member: str) -> str:
        """Key of a :class:`LayoutRecord`."""
        return f"{cls.REPORTS}{member}"

    @classmethod
    def slot(cls, slot: int) -> str:
        """Key that claims the number of a slot that joins."""
        return f"{cls.SLOTS}{slot}"

    @classmethod
    def standing(cls, member: str) -> str:
        """Key of a :class:`StandingRecord`."""
        return f"{cls.STANDINGS}{member}"

    @classmethod
    def suspect(cls, accused: str, by: str) -> str:
        """Key of a :class:`SuspicionRecord`."""
        return f"{cls.SUSPECTS}{accused}/{by}"

    @classmethod
    def voucher(cls, member: str) -> str:
        """Key of a :class:`VoucherRecord`."""
        return f"{cls.VOUCHERS}{member}"

    @classmethod
    def store(cls, epoch: int) -> str:
        """Key of a :class:`StoreRecord`."""
        return f"{cls.EPOCHS}{epoch}/store"

    @classmethod
    def timing(cls, epoch: int) -> str:
        """Key of a :class:`TimingRecord`."""
        return f"{cls.EPOCHS}{epoch}/timing"

    @classmethod
    def progress(cls, member: str) -> str:
        """Key of a :class:`ProgressRecord`."""
        return f"{cls.PROGRESS}{member}"


def new_member_id(slot: int) -> str:
    """A fresh member id for ``slot``; what follows the hyphen is its incarnation."""
    return f"m{slot}-{os.urandom(4).hex()}"


def slot_of(member: str) -> int:
    """The slot that a member's id was made for."""
    return int(member[1:].partition("-")[0])
