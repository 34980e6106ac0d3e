"""The events of a job that never was, of any size: for what shows jobs."""

from __future__ import annotations

import math
import random
from datetime import datetime, timedelta, timezone

from bamboo_ds.observe import events as ev
from bamboo_ds.observe.view import MemberView, Overview
from bamboo_ds.topology.plan import Lent, Plan
from bamboo_ds.topology.roles import Layout

BEGIN = datetime(2026, 3, 1, 9, 0, tzinfo=timezone.utc)
#: Members of a host, and hosts of a zone.
HOST, ZONE = 8, 32
#: Of a stage.
BLOCKS = 6


class SyntheticJob:
    """Members ``m0-…`` own one stage each; the predecessor's owner is the shadow. All times are made up.

    Args:
        hosts: names of hosts; ``None``: ``node-000`` and so on.
    """

    def __init__(self, job: str, pipelines: int, stages: int, hosts: list[str] | None = None, seed: int = 1) -> None:
        self.job, self.pipelines, self.stages = job, pipelines, stages
        self._random = random.Random(seed)
        self._hosts = hosts
        self._now, self._epoch, self._step = BEGIN, 0, 0
        self.members = [self._id(slot) for slot in range(pipelines * stages)]
        self.owners = list(self.members)
        self.shadows: list[str | None] = []
        self.lent: list[tuple[int, int, int]] = []
        self._divided: list[int] = []
        self.copies: tuple[tuple[int, str], ...] = ()
        self.events: list[ev.Event] = []
        self._emit(ev.RunStarted, 0.0, members=len(self.members), command=["train.py", "--deepspeed_config", "ds.json"])
        for rank, member in enumerate(self.members):
            self._emit(ev.MemberJoined, 0.01, member_id=member, host=self.host(rank), rank=rank)
        self._plan("all members are there", known=False)
        self.shadows = [self.owners[self._predecessor(rank)] for rank in range(len(self.owners))]
        self._plan("every stage has a replica", 20.0)

    def _id(self, slot: int) -> str:
        return f"m{slot}-{self._random.getrandbits(32):08x}"

    def _predecessor(self, rank: int) -> int:
        return (rank - self.pipelines) % (self.pipelines * self.stages)

    def host(self, slot: int) -> str:
        """Where a slot is."""
        return f"node-{slot // HOST:03}" if self._hosts is None else self._hosts[slot % len(self._hosts)]

    def _emit(self, model: type[ev.EventBase], after_s: float, **fields: object) -> None:
        self._now += timedelta(seconds=after_s)
        base = {"job": self.job, "time": self._now, "epoch": self._epoch, "member": None}
        self.events.append(model.model_validate(base | fields))

    def _plan(self, reason: str, after_s: float = 0.05, lost: tuple[str, ...] = (), known: bool = True) -> None:
        self._epoch += 1
        fields = {"members": list(self.members), "owners": list(self.owners), "shadows": list(self.shadows)}
        pipelines = self.pipelines if known else None
        self._emit(ev.PlanWritten, after_s, **fields, pipelines=pipelines, lent=self.lent, lost=lost, reason=reason)

    def train(self, steps: int, seconds: float = 1.3) -> SyntheticJob:
        """So many steps."""
        for _ in range(steps):
            self._step += 1
            took = seconds * self._random.uniform(0.96, 1.08)
            loss = 2.2 + 3.5 * math.exp(-self._step / 90) + self._random.gauss(0, 0.03)
            covered = {"frc_done": 7 * len(self.owners), "frc_total": 8 * len(self.owners)}
            fields = {"step": self._step, "loss": loss, "seconds": took, **covered}
            self._emit(ev.Step, took, **fields, member=self.owners[-1])
        return self

    def save(self) -> SyntheticJob:
        """A checkpoint."""
        path = f"/checkpoints/{self.job}/global_step{self._step}"
        self._emit(ev.CheckpointSaved, 0.4, step=self._step, path=path, seconds=2.9, bytes=1_240_000_000)
        return self

    def lose(self, *ranks: int, reason: str = "signal", detail: str = "SIGKILL", divide: bool = False) -> SyntheticJob:
        """The owners of these ranks; their stages go to the shadows, which have them alone from then on.

        Args:
            divide: the heirs' shadows are to compute a third of it, once there are some.
        """
        victims = [self.owners[rank] for rank in ranks]
        for victim in victims:
            told = {"member_id": victim, "reason": reason, "detail": detail, "detection_seconds": 0.009}
            self._emit(ev.MemberLost, 0.6, **told)
        self.members = [member for member in self.members if member not in victims]
        self.shadows = [None if shadow in victims else shadow for shadow in self.shadows]
        moved = []
        for rank, owner in enumerate(self.owners):
            if owner in victims:
                heir = self.shadows[rank]
                assert heir is not None, "a fatal loss"
                self.owners[rank], self.shadows[rank] = heir, None
                moved.append((rank, owner, heir))
        names = ", ".join(victims)
        self._plan(f"lost: {names}", 0.02, tuple(victims))
        for rank, before, after in moved:
            role = (rank % self.pipelines, rank // self.pipelines)
            self._emit(ev.TakeoverPlanned, 0.0, role=role, **{"from": before, "to": after})
        for member in self.members:
            rebuild = self._random.uniform(0.06, 0.11)
            heir = any(member == after for _, _, after in moved)
            redone = {"forwards_redone": 3 * heir, "backwards_redone": 2 * heir, "mode": "resume"}
            times = {"detection_seconds": 0.009, "plan_seconds": 0.031, "rebuild_seconds": rebuild}
            whole = {"pause_seconds": 0.031 + rebuild, "redo_seconds": self._random.uniform(0.3, 0.9) + 0.4 * heir}
            self._emit(ev.Recovered, 0.0005, member=member, step=self._step + 1, **times, **whole, **redone)
        self.lent = [each for each in self.lent if self.shadows[each[0]] is not None]
        self._divided = [rank for rank, _, _ in moved] if divide else []
        return self

    def copy(self) -> SyntheticJob:
        """A copy is being made of every stage that has no shadow."""
        found = []
        for rank, shadow in enumerate(self.shadows):
            if shadow is None:
                near = [self.owners[self._predecessor(rank)], self.owners[(rank + self.pipelines) % len(self.owners)]]
                found.append((rank, next(each for each in (*near, *self.members) if each != self.owners[rank])))
        self.copies = tuple(found)
        self._plan("replicas are being built", 0.2)
        return self

    def heal(self) -> SyntheticJob:
        """Every stage gets a shadow again."""
        self.copy()
        for rank, member in self.copies:
            self.shadows[rank] = member
        self.copies = ()
        self.lent += [(rank, 0, BLOCKS // 3) for rank in self._divided]
        self._divided = []
        self._plan("healing: every stage has a replica again", 1.8)
        return self

    def join(self, *slots: int) -> SyntheticJob:
        """Members join as standbys."""
        for slot in slots:
            member = self._id(slot)
            self.members.append(member)
            self._emit(ev.MemberJoined, 0.4, member_id=member, host=self.host(slot), rank=0)
        self._plan("joined", 1.0)
        return self

    def notice(self, rank: int, detail: str) -> SyntheticJob:
        """The owner of ``rank`` hears that its node may vanish."""
        told = {"kind": "rebalance", "source": "aws", "deadline_seconds": None, "detail": detail, "leaves": False}
        self._emit(ev.NoticeReceived, 0.1, member=self.owners[rank], **told)
        return self

    def until_now(self) -> SyntheticJob:
        """Shift all times, so that the newest event has just happened."""
        shift = datetime.now(timezone.utc) - self._now
        self._now += shift
        self.events = [event.model_copy(update={"time": event.time + shift}) for event in self.events]
        return self

    def finish(self, code: int = 0) -> SyntheticJob:
        """The end."""
        self._emit(ev.RunFinished, 0.5, exit_code=code, run_seconds=(self._now - self.events[0].time).total_seconds())
        return self

    def overview(self) -> Overview:
        """What etcd would tell of the members."""
        slots = {member: int(member[1:].partition("-")[0]) for member in self.members}
        known = [
            MemberView(
                id=member,
                slot=slot,
                state="running",
                host=self.host(slot),
                zone=f"us-east-1{'abcd'[slot // (HOST * ZONE) % 4]}",
            )
            for member, slot in slots.items()
        ]
        plan = Plan(
            epoch=self._epoch,
            owners=tuple(self.owners),
            members=tuple(self.members),
            layout=Layout(self.pipelines, self.stages, sharded=True, blocks=(BLOCKS,) * self.stages),
            shadows=tuple(self.shadows),
            lent=tuple(Lent(rank, behind, "front") for rank, _, behind in self.lent),
            builders=self.copies,
        )
        return Overview(leader=self.members[0], members=tuple(known), plan=plan, step=self._step)


def four(job: str = "gpt-demo", hosts: list[str] | None = None) -> SyntheticJob:
    """Four members, of which two are lost one after the other; the copy for the second one is being made."""
    made = SyntheticJob(job, 1, 4, hosts or ["alpha", "beta"])
    made.train(60).save().train(30).lose(2, divide=True).train(1, 2.4).heal().train(40).save().train(12).join(4)
    made.train(13).lose(1, reason="lease", detail="ran out").train(1, 2.8).train(6, 1.9)
    return made.copy().train(4, 1.9)


def thousand(job: str = "gpt-1024") -> SyntheticJob:
    """128 pipelines of 8 stages on 128 hosts, with losses of members and of a host."""
    made = SyntheticJob(job, 128, 8)
    made.train(80).save().train(40).lose(200).train(1, 2.0).heal().train(60)
    made.lose(*range(512, 520), reason="lease", detail="ran out", divide=True).train(1, 2.5).heal().train(50).save()
    made.train(20).notice(90, "rebalance recommendation").lose(777, reason="hang", detail="300 s").train(1, 2.2)
    return made.train(12)
