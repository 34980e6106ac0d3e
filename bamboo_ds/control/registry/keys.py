"""The keys of a job in etcd, and the ids of its members."""

from __future__ import annotations

import os

#: Prefix of the keys of all jobs.
ROOT = "/bamboo/"


def namespace(job: str) -> str:
    """Prefix of all keys of ``job``."""
    return f"{ROOT}{job}/"


class Keys:
    """The keys of a job, relative to :func:`namespace`."""

    SPEC = "spec"
    LEADER = "leader"
    PLAN = "plan"
    STOP = "stop"
    RESTART = "restart"
    MEMBERS = "members/"
    KNOWN = "known/"
    HOSTS = "hosts/"
    LEFT = "left/"
    REPORTS = "reports/"
    WORKERS = "workers/"
    SUSPECTS = "suspects/"
    ASKED = "asked/"
    HEALTH = "health/"
    EPOCHS = "epochs/"
    PROGRESS = "progress/"
    SLOTS = "slots/"
    NOTICES = "notices/"
    LEAVE = "leave/"
    WEB = "web"

    @classmethod
    def member(cls, member: str) -> str:
        """Key of a :class:`~.records.MemberRecord`."""
        return f"{cls.MEMBERS}{member}"

    @classmethod
    def known(cls, member: str) -> str:
        """Key of a :class:`~.records.MemberRecord` that outlives the lease."""
        return f"{cls.KNOWN}{member}"

    @classmethod
    def host(cls, space: str, member: str = "") -> str:
        """Key of the :class:`~.records.MemberRecord` of a joiner whose agent runs in the process space ``space``."""
        return f"{cls.HOSTS}{space}/{member}"

    @classmethod
    def left(cls, member: str) -> str:
        """Key of a :class:`~.records.LeftRecord`."""
        return f"{cls.LEFT}{member}"

    @classmethod
    def notice(cls, member: str) -> str:
        """Key of a :class:`~.records.NoticeRecord`."""
        return f"{cls.NOTICES}{member}"

    @classmethod
    def leave(cls, member: str) -> str:
        """Key of a :class:`~.records.LeaveRecord`."""
        return f"{cls.LEAVE}{member}"

    @classmethod
    def report(cls, member: str) -> str:
        """Key of a :class:`~.records.LayoutRecord`."""
        return f"{cls.REPORTS}{member}"

    @classmethod
    def slot(cls, slot: int) -> str:
        """Key that claims the number of a slot that joins."""
        return f"{cls.SLOTS}{slot}"

    @classmethod
    def worker(cls, member: str) -> str:
        """Key of a :class:`~.records.WorkerState`."""
        return f"{cls.WORKERS}{member}"

    @classmethod
    def suspect(cls, by: str) -> str:
        """Key of a :class:`~.records.SuspicionRecord`."""
        return f"{cls.SUSPECTS}{by}"

    @classmethod
    def asked(cls, member: str) -> str:
        """Key of a :class:`~.records.HealthRequest`."""
        return f"{cls.ASKED}{member}"

    @classmethod
    def health(cls, member: str) -> str:
        """Key of a :class:`~.records.HealthReply`."""
        return f"{cls.HEALTH}{member}"

    @classmethod
    def timing(cls, epoch: int) -> str:
        """Key of a :class:`~.records.TimingRecord`."""
        return f"{cls.EPOCHS}{epoch}/timing"

    @classmethod
    def progress(cls, member: str) -> str:
        """Key of a :class:`~.records.ProgressRecord`."""
        return f"{cls.PROGRESS}{member}"


def new_member_id(slot: int) -> str:
    """A fresh member id for ``slot``; what follows the hyphen is its incarnation."""
    return f"m{slot}-{os.urandom(4).hex()}"


def slot_of(member: str) -> int:
    """The slot that a member's id was made for."""
    return int(member[1:].partition("-")[0])
