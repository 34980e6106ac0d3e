"""A job in simulated time: the real coordinators, leaders and agents over an etcd, hosts and workers made of nothing.

What decides is the package's: :class:`Coordinator`, :class:`Leader` (with its deciders), the handlers of
:class:`Agent` and :class:`WaitingAgent`, :class:`Slot` and :class:`Rejoin`, :mod:`~bamboo_ds.control.fencing`,
:mod:`~bamboo_ds.generations` and the folder of checkpoints. Modelled: etcd (transactions, leases, watches, one
revision for all), the network between hosts, clocks, processes that are stopped or killed, and workers, which do
nothing but enter plans, commit, tell of it and publish.

A schedule is a list of :class:`Step`: everything that happens follows from it. All is one thread. A process that is
held in the middle of a request to etcd is a nested loop of the world, in which all others go on.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from bamboo_ds.control.agent.coordinator import Coordinator
from bamboo_ds.control.leader import restarts as restart
from bamboo_ds.control.leader.leader import Leader
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.records import JobRecord, RestartRecord, StopRecord
from bamboo_ds.control.settings import AgentSettings, MemberOptions
from bamboo_ds.generations import supersede
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.launchers.join import Starters
from bamboo_ds.state import publish
from bamboo_ds.state.checkpoints import (
    MANIFEST,
    CheckpointError,
    Manifest,
    SaveRecord,
    Status,
    list_checkpoints,
    read_manifest,
)
from bamboo_ds.state.shared_folder import SharedFolder
from bamboo_ds.state.writer import Save, check_lineage
from bamboo_ds.topology import Plan
from bamboo_ds.topology.plan import UNSTARTED

from .settings import block
from .simulated_etcd import TTL_S, Etcd
from .simulated_members import STAGES, Broken, Host, Party, Worker

__all__ = ["Broken", "Step", "World", "draw", "quiet", "run"]

FENCE_S = 5.0
#: Seconds between two looks at everybody.
TICK_S = 0.4
#: Seconds for which a job may stand still once nothing is broken any more.
HEALED_S = 60.0
JOB = "job"
SETTINGS = JobSettings(values=block(lease_ttl_s=TTL_S, fence_s=FENCE_S, max_restarts=1000))
FOLDER = "checkpoints"
#: How long steps take, and how fast clocks run.
SECONDS = (0.4, 1.2, 3.0, 7.0, 12.0)
RATES = (1.0, 0.97, 1.03)
#: What may be switched off, to see that it is needed.
FENCES = ("pause", "lineage", "wait", "mark", "clean", "stop", "swap", "remove", "unseen", "missed")


class Step(NamedTuple):
    """One thing that happens; ``one``, ``other`` choose who, ``seconds`` how long."""

    kind: str
    one: int = 0
    other: int = 0
    seconds: float = 1.0


#: Kinds of steps by how often a schedule has them.
KINDS: dict[str, int] = {
    "pass": 8,
    "cut": 4,  # a host from etcd
    "cut all": 3,  # every host of the plan from etcd
    "mend": 3,
    "separate": 2,  # two hosts from each other
    "etcd": 2,  # goes away, or comes back
    "hold": 3,  # an agent in one of its next requests
    "lose": 2,  # the answer to an agent's next request
    "mute": 2,  # an agent's watch, or not any more
    "stop": 3,  # all processes of a host, or not any more
    "stop worker": 2,
    "stop all": 1,  # the hosts of the plan
    "kill worker": 2,
    "kill host": 2,
    "kill all": 1,  # the hosts of the plan
    "fail": 1,  # a script
    "join": 4,
    "save": 3,  # a checkpoint is published; its writer may be stopped while it writes, or just before the rename
    "tell": 2,  # the next member that tells of a step is stopped just before
}


class World:
    """A job of two stages on hosts of their own, and what goes wrong.

    Args:
        rates: speed of each host's clock.
        off: fences that are switched off, of :data:`FENCES`.
        first: so many members start the job, which come one by one as by ``bamboo join --start``; 0: a launcher has.

    Attributes:
        happened: faults that have had an effect, by kind.
    """

    def __init__(self, rates: Sequence[float] = (1.0,), off: Iterable[str] = (), first: int = 0) -> None:
        self.first = first
        self.now = 100.0
        self.rates, self.off = tuple(rates), frozenset(off)
        self.etcd = Etcd(self)
        self.hosts: list[Host] = []
        self.workers: dict[str, Worker] = {}
        self.at_once: list[Callable[[], None]] = []
        self.happened: Counter[str] = Counter()
        self.apart: set[frozenset[int]] = set()
        self.folder = Path(tempfile.mkdtemp(prefix="fencing-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        (self.folder / FOLDER).mkdir()
        self._ids = self._turns = 0
        self.hold_tell = 0.0
        self._sent: dict[tuple[int, int, str], int] = {}
        self.plan: Plan | None = None
        self.gone: set[str] = set()  # members that plans have listed, and a later one did not
        self.assigned = UNSTARTED if first else 0  # the newest restart
        self.committed = 0  # the newest generation that did
        self.restarted_after = -1  # the epoch that the newest restart has followed
        self.commits = 0
        self.late: dict[int, tuple[int, int]] = {}  # by generation: epoch and step of its commit after a restart
        self.published: dict[str, str] = {}  # newest save by tag
        self.begun: set[int] = set()  # generations that have taken the folder over
        for number in range(first or STAGES):
            self._come(first) if first else self._start_host(self.settings(slot=number))
        if first:
            return
        record = JobRecord(job=JOB, world_size=STAGES, pipelines=1, settings=SETTINGS)
        self.etcd.put(Keys.SPEC, record.to_json(), None, "")

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def new_id(self, slot: int) -> str:
        self._ids += 1
        return f"m{slot}-{self._ids:08x}"

    def _start_host(
        self, settings: AgentSettings | None, comes: tuple[MemberOptions, Starters | None] | None = None
    ) -> None:
        host = Host(self, len(self.hosts))
        self.hosts.append(host)
        Party(host, settings, comes)

    def _come(self, start: int | None) -> None:
        """A host with a member that comes by ``bamboo join``."""
        starters = None if start is None else Starters(start, STAGES)
        self._start_host(None, (MemberOptions(job=JOB, command=("x",), settings=SETTINGS, store="x"), starters))

    def settings(self, slot: int, **more: Any) -> AgentSettings:
        values: dict[str, Any] = {
            "job": JOB,
            "command": ("x",),
            "settings": SETTINGS,
            "slot": slot,
            "world_size": STAGES,
            "store": "x",
            "parent_pid": 1,
            "pipelines": 1,
            "host": f"h{slot}",
        }
        return AgentSettings(**{**values, **more})

    @property
    def parties(self) -> list[Party]:
        return [party for host in self.hosts for party in host.parties]

    # -- invariants ---------------------------------------------------------------------------------------

    def check_write(self, key: str, value: str, by: str) -> None:
        """Nobody outside the plan stops the job, nor comes back; plans and restarts follow each other one by one."""
        plan = self.plan
        if key == Keys.PLAN:
            new = Plan.from_json(value)
            if new == plan:
                return  # in place of a forged one
            if plan is not None and (new.epoch, new.origin) != (plan.epoch + 1, plan.origin):
                raise Broken(f"plan {new.epoch} follows {plan.epoch}")
            if new.generation == UNSTARTED and plan is None and (new.epoch or Keys.SPEC in self.etcd.keys):
                raise Broken("a job begins that has been started")
            if plan is not None and new.generation < plan.generation:
                raise Broken(f"generation {new.generation} follows {plan.generation}")
            if plan is not None:
                self.gone |= set(plan.members).difference(new.members)
            if back := self.gone.intersection(new.members):
                raise Broken(f"{', '.join(sorted(back))}, gone before, is a member again in plan {new.epoch}")
            self.plan = new
        elif key == Keys.RESTART:
            record = RestartRecord.from_json(value)
            if record.generation != self.assigned + 1:
                raise Broken(f"restart {record.generation} follows {self.assigned}")
            if plan is not None and plan.generation == UNSTARTED and len(record.ranks) < self.first:
                raise Broken(f"the first start is on slots {list(record.ranks)} alone")
            self.assigned, self.restarted_after = record.generation, record.after_epoch
        elif key == Keys.STOP and plan is not None:
            stop = StopRecord.from_json(value)
            if by not in plan.members and not plan.lost_roles and "failed" in stop.reason:
                raise Broken(f"{by} has stopped the job, which plan {plan.epoch} does not list: {stop.reason}")

    def _commit(self, worker: Worker) -> None:
        plan = worker.plan
        assert plan is not None
        generation, newer = plan.generation, max(self.committed, self.assigned)
        if generation == UNSTARTED:
            raise Broken(f"{worker.member} commits before the first start")
        if generation < newer:
            # What a worker had contributed to before it was seen to end, and nothing else.
            ended = any(self.workers[member].status is not None for member in plan.members)
            at = plan.epoch, worker.step
            if not ended or self.late.setdefault(generation, at) != at:
                raise Broken(f"{worker.member} commits for start {generation} when start {newer} has begun")
            self.happened["late"] += 1
        self.committed = max(self.committed, generation)
        self.commits += 1
        worker.step += 1
        if worker.plan.owners[0] != worker.member:
            return
        held, self.hold_tell = self.hold_tell, 0.0
        if held and not self._stop_for(worker, held, 1):
            return
        # Whoever reads the events tells by their epochs which of them a restart has replaced.
        replaced = worker.plan.epoch <= self.restarted_after
        if replaced != (generation < self.assigned):
            raise Broken(f"start {generation} tells in epoch {worker.plan.epoch}, {self.assigned} has begun")
        self._begin(worker)
        if held:
            self._publish(worker, None, 0)  # as a script may after each step

    def _begin(self, worker: Worker) -> None:
        """What every start does first in a folder; then it chooses the checkpoint that it goes on from."""
        assert worker.plan is not None
        lineage = worker.plan.lineage
        if lineage[1] not in self.begun:
            self.begun.add(lineage[1])
            supersede(self.folder / FOLDER, lineage)
            if "clean" not in self.off:
                publish.clean(self.folder / FOLDER, JOB, lineage=lineage)
            if lineage[1] == max(self.begun) > 0:
                self._publish(worker, None, 0)

    def _publish(self, worker: Worker, seconds: float | None, whom: int) -> None:
        """A checkpoint gets its name; the process may be stopped for ``seconds`` in the middle of that."""
        plan = worker.plan
        if plan is None or plan.layout is None or plan.lost_roles or not worker.runs or worker.step == 0:
            return
        self._ids += 1
        origin, generation = plan.lineage
        tag = "best" if self._ids % 2 else f"step{self._ids}"
        fields = {"job": JOB, "save_id": f"s{self._ids}", "tag": tag, "step": worker.step, "layout": plan.layout}
        record = SaveRecord.model_validate({**fields, "origin": origin, "generation": generation})
        written = {"serial": self._ids, "roles": {}, "files": {}, "time": "2026-01-01T00:00:00Z"}
        manifest = Manifest.model_validate({**fields, **written})
        root = self.folder / FOLDER
        try:
            save = Save(SharedFolder(root), record, plan.owners, leads=True, timeout_s=1.0)
            if "mark" not in self.off:
                check_lineage(save)
            folder = publish.open_partial(root, record)
            here = partial(self._stop_for, worker, seconds, whom // 2 % 3)
            if whom % 2 and not here():  # anywhere while it writes
                return
            publish.write_atomically(folder / MANIFEST, manifest.to_json())
            if "mark" not in self.off:
                check_lineage(save)
            if not whom % 2 and not here():  # at the worst instant
                return
            publish.publish(folder, root, manifest)
        except (CheckpointError, FileNotFoundError):
            self.happened["refused"] += 1
            self._check_checkpoints()
            return
        self.happened["published"] += 1
        if any(later > generation for later in self.begun):
            raise Broken(f"start {generation} publishes {record.tag} when start {max(self.begun)} has begun")
        self.published[tag] = record.save_id
        (root / tag / "notes").touch()  # a script's own file
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        """What has got its name is there."""
        complete = [each for each in list_checkpoints(self.folder / FOLDER) if each.status is Status.COMPLETE]
        found = {info.tag: read_manifest(info.path).save_id for info in complete}  # others may be written anew beside
        for tag, save_id in self.published.items():
            if found.get(tag) != save_id:
                raise Broken(f"checkpoint {tag} of save {save_id} is gone")

    def _stop_for(self, worker: Worker, seconds: float | None, whom: int) -> bool:
        """A worker's host is stopped at this instant, and (1) those of its plan, too, or (2) these are killed.

        Args:
            seconds: for so long; ``None``: not at all.

        Returns:
            Whether the worker lives on.
        """
        if seconds is None:
            return True
        others = [host for host in self._of_plan() if host is not worker.host] if whom else []
        self.happened["writer stopped"] += 1
        for host in others:
            host.stopped = host.alive
            if whom == 2:
                self._kill_host(host, Step("kill host"))
        worker.host.stopped = True
        self.advance(seconds)
        for host in (worker.host, *others):
            host.stopped = False
        return worker.status is None

    # -- time ---------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let so much time pass, in which everybody acts that can."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + TICK_S)
            self._tick()

    def _tick(self) -> None:
        self.etcd.expire()
        self._turns += 1
        parties = self.parties
        for party in parties[self._turns % len(parties) :] + parties[: self._turns % len(parties)]:
            party.act()
        if self._turns % 2:
            self._train()
        pending, self.at_once = self.at_once, []
        for action in pending:
            action()

    def linked(self, one: Host, other: Host) -> bool:
        return frozenset((one.number, other.number)) not in self.apart

    def _train(self) -> None:
        live = [worker for worker in self.workers.values() if worker.runs]
        for worker in live:
            worker.look()
        self._attach(live)
        for worker in live:
            if worker.plan is not None and worker.entering is None and worker.plan.layout is not None:
                self._contribute(worker)
        for worker in live:
            if worker.status is None and worker.plan is not None and worker.entering is None:
                self._complete(worker)

    def _attach(self, live: Sequence[Worker]) -> None:
        """Those enter a plan together whom it lists, if all of them are there."""
        for plan in {w.entering.epoch: w.entering for w in live if w.entering is not None}.values():
            here = [w for w in live if w.entering is not None and w.entering.epoch == plan.epoch]
            missing = [m for m in plan.members if m not in {w.member for w in here}]
            split = [w for w in here if not all(self.linked(w.host, other.host) for other in here)]
            if missing or split:
                for worker in here:
                    worker.miss([m for m in missing if self._silent(worker, m)])
                continue
            step = max(w.step for w in here)
            for worker in here:
                worker.step = step
                worker.entered(plan)

    def _silent(self, worker: Worker, member: str) -> bool:
        peer = self.workers.get(member)
        return peer is None or not peer.runs or not self.linked(worker.host, peer.host)

    def _contribute(self, worker: Worker) -> None:
        plan = worker.plan
        assert plan is not None
        key = plan.epoch, worker.step, worker.member
        if key not in self._sent and worker.await_fence():
            self._sent[key] = worker.newest.epoch if worker.newest else 0

    def _complete(self, worker: Worker) -> None:
        plan = worker.plan
        assert plan is not None
        told = [self._sent.get((plan.epoch, worker.step, member)) for member in plan.members]
        others = [member for member in plan.members if member != worker.member]
        apart = [m for m in others if m not in self.workers or not self.linked(worker.host, self.workers[m].host)]
        gone = [m for m in others if m in self.workers and self.workers[m].status is not None]
        if None in told or apart:
            worker.miss([m for m in others if m in apart or m in gone or not self.workers[m].runs])
            return
        worker.miss([])
        if not worker.await_fence():
            self.happened["paused"] += 1
            return
        self._commit(worker)
        due = worker.newest
        if due is not None and min(epoch for epoch in told if epoch is not None) >= due.epoch > plan.epoch:
            worker.enter(due)

    # -- what goes wrong ----------------------------------------------------------------------------------

    def do(self, step: Step) -> None:
        """One step of a schedule."""
        host = self.hosts[step.one % len(self.hosts)]
        effect = getattr(self, "_" + step.kind.replace(" ", "_"), None)
        if step.kind != "pass" and effect is not None and effect(host, step) is not False:
            self.happened[step.kind] += 1
        if step.kind not in ("save",):
            self.advance(step.seconds)

    def _of_plan(self) -> list[Host]:
        members = self.plan.members if self.plan else ()
        return [h for h in self.hosts if any(p.worker and p.worker.member in members for p in h.parties)]

    def _cut(self, host: Host, step: Step) -> bool:
        host.etcd, before = False, host.etcd
        return before

    def _cut_all(self, host: Host, step: Step) -> bool:
        return any([self._cut(each, step) for each in self._of_plan()])

    def _mend(self, host: Host, step: Step) -> None:
        self.apart.clear()
        for each in self.hosts:
            each.etcd = True
        self._compact(step)

    def _compact(self, step: Step) -> None:
        """Those who have not followed get no changes, but what is there, or their watches are refused for once."""
        if step.other % 2:
            self.etcd.compacted = self.etcd.revision
        elif step.other == 4:
            self.etcd.refusals += 1

    def _separate(self, host: Host, step: Step) -> bool:
        other = self.hosts[step.other % len(self.hosts)]
        self.apart ^= {frozenset((host.number, other.number))} if other is not host else set()
        return other is not host

    def _etcd(self, host: Host, step: Step) -> None:
        self.etcd.up = not self.etcd.up
        if self.etcd.up:
            self.etcd.leases = {lease: self.now + TTL_S for lease in self.etcd.leases}

    def _hold(self, host: Host, step: Step) -> bool:
        host.hold_s, host.hold_at = 2 * step.seconds, ("", "", Keys.PLAN, Keys.RESTART)[step.other % 4]
        return False  # counted when it takes place

    def _lose(self, host: Host, step: Step) -> bool:
        host.lose = True
        return False

    def _mute(self, host: Host, step: Step) -> None:
        host.mute = not host.mute
        self._compact(step)

    def _stop(self, host: Host, step: Step) -> bool:
        host.stopped = host.alive and not host.stopped
        return host.alive

    def _stop_all(self, host: Host, step: Step) -> None:
        for each in self._of_plan():
            each.stopped = each.alive

    def _stop_worker(self, host: Host, step: Step) -> bool:
        workers = [p.worker for p in host.parties if p.worker is not None and p.worker.status is None]
        for worker in workers:
            worker.stopped = not worker.stopped
            worker.stopped_at = self.now if worker.stopped else None
        return bool(workers)

    def _kill_worker(self, host: Host, step: Step) -> bool:
        workers = [p.worker for p in host.parties if p.worker is not None and p.worker.status is None]
        for worker in workers:
            worker.kill(signal.SIGKILL)
        return bool(workers)

    def _kill_host(self, host: Host, step: Step) -> bool:
        alive, host.alive = host.alive, False
        for party in host.parties:
            party.over = True
            if party.worker is not None:
                party.worker.kill(signal.SIGKILL)
        return alive

    def _kill_all(self, host: Host, step: Step) -> bool:
        return any([self._kill_host(each, step) for each in self._of_plan()])

    def _fail(self, host: Host, step: Step) -> bool:
        workers = [p.worker for p in host.parties if p.worker is not None and p.worker.runs]
        if step.other % 2:
            host.hold_s, host.hold_at = 2 * step.seconds, Keys.STOP
        for worker in workers:
            worker.exit(1, failed=True)
        return bool(workers)

    def _join(self, host: Host, step: Step) -> bool:
        plan = self.plan
        if plan is None or len(self.hosts) > STAGES + 2:
            return False
        if self.first or (plan.layout is None and not plan.lost_roles):
            # Some with another number of members, who have to find that out.
            self._come((None, *[self.first] * 3, self.first + 1)[step.other % 5] if self.first else None)
            return True
        slot = next(n for n in itertools.count(STAGES) if Keys.slot(n) not in self.etcd.keys)
        self.etcd.put(Keys.slot(slot), "joiner", None, "")
        fatal = bool(plan.lost_roles)
        waits = {"waiting": True, "after_epoch": plan.epoch, "generation": self.assigned}
        self._start_host(self.settings(slot, **(waits if fatal else {"script_rank": step.other % STAGES})))
        return True

    def _save(self, host: Host, step: Step) -> bool:
        members = self.plan.members if self.plan else ()
        leads = [w for w in self.workers.values() if w.plan is not None and w.plan.owners[0] == w.member and w.runs]
        for worker in leads[-1:]:
            self._publish(worker, 3 * step.seconds, step.one + step.other)
        return bool(members and leads)

    def _tell(self, host: Host, step: Step) -> None:
        self.hold_tell = 3 * step.seconds

    # -- the end ------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Nothing is broken any more; raises :class:`Broken` if the job neither ends nor goes on."""
        self.apart.clear()
        self.hold_tell = 0.0
        self.etcd.up or self._etcd(self.hosts[0], Step("etcd"))
        for host in self.hosts:
            host.etcd, host.mute, host.stopped, host.hold_s, host.lose = True, False, False, 0.0, False
        for worker in self.workers.values():
            worker.stopped, worker.stopped_at = False, None
        begin, end = self.commits, self.now + HEALED_S * (2 if self.first else 1)
        while self.now < end:
            if self.first:  # as a cluster does
                for _ in range(self.first - len([party for party in self.parties if not party.over])):
                    self._come(self.first)
            self.advance(1.0)
            if Keys.STOP in self.etcd.keys or (not self.first and all(party.over for party in self.parties)):
                return
            plan = self.plan
            if plan is None or plan.lost_roles or self.commits <= begin + 3 or self.committed != plan.generation:
                continue
            if not self._outside(plan):
                return
        outside = self._outside(self.plan) if self.plan is not None else []
        keys = [key for key in self.etcd.keys if "/" in key]
        raise Broken(f"the job stands still, or does so for {outside}: plan {self.plan}, members {keys}")

    def _outside(self, plan: Plan) -> list[str]:
        """Members that the plan does not list, registered or not."""
        members = [key.removeprefix(Keys.MEMBERS) for key in self.etcd.keys if key.startswith(Keys.MEMBERS)]
        there = [party.process._id for party in self.parties if not party.over and party.process is not None]
        return [member for member in dict.fromkeys([*members, *there]) if member not in plan.members]


def draw(seed: int, length: int = 8) -> tuple[list[Step], tuple[float, ...]]:
    """A schedule and speeds of clocks, from a seed."""
    dice = random.Random(seed)
    kinds = dice.choices(list(KINDS), list(KINDS.values()), k=length)
    steps = [Step("pass", seconds=dice.choice((2.0, 4.0)))]
    steps += [Step(kind, dice.randrange(5), dice.randrange(5), dice.choice(SECONDS)) for kind in kinds]
    return steps, tuple(dice.choice(RATES) for _ in range(3))


def run(
    steps: Sequence[Step], rates: Sequence[float] = (1.0,), off: Iterable[str] = (), first: int = 0
) -> Counter[str]:
    """Carry a schedule out; returns what has happened. Raises :class:`Broken`. For the arguments see :class:`World`."""
    world = World(rates, off, first)
    switched_off = ExitStack()
    try:
        if "wait" in world.off:
            switched_off.enter_context(patch.object(restart, "restart_wait_s", lambda *_: 0.0))
        if "remove" in world.off:
            switched_off.enter_context(patch.object(Leader, "_remove_lost", lambda *_: False))
        if "missed" in world.off:
            switched_off.enter_context(patch.object(Coordinator, "_check_seen", lambda *_: None))
        world.advance(3 * TICK_S)
        for step in steps:
            world.do(step)
        world.heal()
        world.happened["restarts"] += max(0, world.assigned)
        world.happened["commits"] += world.commits
        return world.happened
    finally:
        switched_off.close()
        world.close()


def quiet() -> None:
    """Keep the package's log to itself: these jobs have much to tell."""
    logging.getLogger("bamboo_ds").setLevel(logging.CRITICAL + 1)
