"""What many members cost the control plane: real coordinators and leaders over one real etcd, without workers.

    python benchmarks/members.py --members 64 256 1024
    python benchmarks/members.py --members 1024 --real 64                  the others are records only
    python benchmarks/members.py --members 256 --package ../other          of another checkout of the package

For each size: requests that etcd serves while nothing happens; the time from the end of a member, of the leading one,
and of several at once to the moment at which all that are left have the plan without them; what its delivery takes
alone. The members are threads of some processes of this machine, and share its processors with etcd. A worker is
replaced by what it tells: that it has entered a plan, and its progress. Members of a job have hosts of their own: so
those of a process share a connection here, and parse each plan once. This machine cannot bear the threads of a
thousand: with ``--real`` the members in higher slots have no coordinators, but all that these and workers write.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import fields
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_SETTLED_S = 120.0
#: Seconds between two iterations of each member, and longest time that a plan is waited for.
_ITERATION_S, _PLAN_S = 1.0, 60.0
#: Seconds that a worker takes to enter a plan, from and to.
_ENTERED_S = 1.0, 2.0


class Members:
    """The members of one process.

    Args:
        numbers: their slots.
        world: number of all members.
        real: slots from this one on have no coordinator.
        speakers: whether only the owner of role 0 tells how far the job is.
    """

    def __init__(self, url: str, numbers: Sequence[int], world: int, real: int, ttl_s: float, speakers: bool) -> None:
        from bamboo_ds.control.agent.callbacks import Callbacks
        from bamboo_ds.control.agent.coordinator import Coordinator
        from bamboo_ds.control.leader.leader import Leader
        from bamboo_ds.control.registry.keys import Keys, namespace
        from bamboo_ds.observe.events import EventWriter
        from bamboo_ds.store import client
        from bamboo_ds.topology.plan import Plan
        from tests.support.records import member
        from tests.support.settings import agent

        Plan.from_json = functools.cache(Plan.from_json)  # type: ignore[method-assign]
        connect: Any = client.Connection
        connect.close = lambda connection: None
        client.Connection = functools.cache(lambda *how: connect(*how))  # type: ignore[assignment,misc]
        self._world, self._speakers = world, speakers
        self._lock = threading.Lock()
        self._seen: dict[int, dict[str, float]] = {}  # by epoch: when each member was told
        self.plan: Any = None
        self._coordinators: dict[str, Any] = {}
        self._lost: set[str] = set()
        self._others: dict[str, Any] = {}  # leases of members without coordinators
        self._pause_s = ttl_s * 0.2
        self._entering: list[tuple[float, str, Any]] = []
        nothing = {field.name: lambda *_: None for field in fields(Callbacks)}
        self._store = client.Store([url], namespace=namespace("j"), timeout_s=20.0)
        for slot in numbers:
            name = f"m{slot}-{slot:08x}"
            record = member(name, slot, host=f"h{slot}", script_rank=slot, incarnation=name[-8:])
            if slot >= real:
                self._add(record, ttl_s)
                continue
            store = client.Store([url], namespace=namespace("j"), timeout_s=20.0)
            settings = agent(world_size=world, slot=slot, lease_ttl_s=ttl_s, max_restarts=3)
            callbacks = Callbacks(**{**nothing, "on_plan": functools.partial(self._take, name)})
            self._coordinators[name] = Coordinator(
                store,
                Leader(store, EventWriter(None), settings, name),
                record,
                lease_ttl_s=ttl_s,
                callbacks=callbacks,
                last_heartbeat=lambda: None,
                settings=settings.settings,
            )
        for coordinator in self._coordinators.values():
            coordinator.start()
        if self._others:
            self._store.watch(Keys.PLAN, lambda event: self._take_for_others(Plan.from_json(event.kv.value)), 1)
        for work in (self._progress, self._enter, self._refresh):
            threading.Thread(target=work, daemon=True).start()

    def _add(self, record: Any, ttl_s: float) -> None:
        """A member without coordinator."""
        from bamboo_ds.control.registry.keys import Keys

        lease = self._others[record.id] = self._store.lease(ttl_s)
        self._store.put(Keys.member(record.id), record.to_json(), lease)

    def _refresh(self) -> None:
        while True:
            time.sleep(self._pause_s)
            for name, lease in self._others.items():
                if name not in self._lost:
                    lease.refresh()

    def _take_for_others(self, plan: Any) -> None:
        for name in self._others:
            if name not in self._lost:
                self._take(name, plan)

    def _write(self, name: str, key: str, record: Any) -> None:
        if name in self._others:
            self._store.put(key, record.to_json())
        else:
            self._coordinators[name].write(key, record)

    def _take(self, name: str, plan: Any) -> None:
        """As an agent and its worker."""
        from bamboo_ds.control.registry.records import LayoutRecord, WorkerState
        from bamboo_ds.topology import Layout

        now = time.monotonic()
        with self._lock:
            self._seen.setdefault(plan.epoch, {})[name] = now
            if self.plan is None or plan.epoch > self.plan.epoch:
                self.plan = plan
        record: Any
        if plan.layout is None:
            record = LayoutRecord(id=name, layout=Layout(8, self._world // 8), redundant=True, iterators=False)
        else:
            building = [rank for rank, builder in plan.builders if builder == name]
            held = sorted({*(plan.layout.rank(role) for role in plan.shadowed_by(name)), *building})
            record = WorkerState(id=name, epoch=plan.epoch, replicas=tuple(held))
        with self._lock:
            self._entering.append((now + random.uniform(*_ENTERED_S), name, record))

    def _enter(self) -> None:
        """Have workers tell that they have entered plans."""
        while True:
            time.sleep(0.02)
            now = time.monotonic()
            with self._lock:
                due = [each for each in self._entering if each[0] <= now]
                self._entering = [each for each in self._entering if each[0] > now]
            for _, name, record in due:
                self._write(name, record.key, record)

    def _progress(self) -> None:
        from bamboo_ds.control.registry.keys import Keys
        from bamboo_ds.control.registry.records import ProgressRecord

        for step in range(1, 1_000_000):
            time.sleep(_ITERATION_S)  # the pace of a job
            plan = self.plan
            for name in (*self._coordinators, *self._others):
                if plan is not None and name in plan.members and (not self._speakers or plan.owners[0] == name):
                    self._write(name, Keys.progress(name), ProgressRecord(id=name, step=step))

    def lose(self, names: Sequence[str]) -> None:
        """End those of ``names`` that are here, as their agents do when workers are killed."""
        from bamboo_ds.control.registry.keys import Keys
        from tests.support.records import left

        for name in names:
            record = left(name, int(name[1:].split("-")[0]), reason="signal", detail="SIGKILL", reaped=True)
            if name in self._coordinators:
                self._lost.add(name)
                self._coordinators[name].leave(record)
            elif name in self._others:
                self._lost.add(name)
                self._store.put(Keys.left(name), record.to_json())
                self._others[name].revoke()

    def told(self, epoch: int) -> dict[str, float]:
        """When members here were told of a plan of ``epoch`` or a later one."""
        with self._lock:
            found: dict[str, float] = {}
            for each in sorted(self._seen):
                if each >= epoch:
                    found = {**self._seen[each], **found}
            return {name: at for name, at in found.items() if name not in self._lost}


def serve(pipe: Connection, packages: str, *arguments: Any) -> None:
    """One process: obeys until the pipe ends."""
    sys.path.insert(0, packages)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(0.0005)  # many threads, each of which stands for a host
    members = Members(*arguments)
    while True:
        what, given = pipe.recv()
        if what == "lose":
            members.lose(given)
        elif what == "told":
            pipe.send(members.told(given))
        elif what == "plan":
            pipe.send(members.plan)
        else:
            return


class Job:
    """A job of ``size`` members in ``processes`` processes."""

    def __init__(
        self, etcd: Any, size: int, real: int, processes: int, package: str, ttl_s: float, speakers: bool
    ) -> None:
        self._etcd, self.size = etcd, size
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number in range(processes):
            mine, theirs = context.Pipe()
            given = (theirs, package, etcd.url, range(number, size, processes), size, real, ttl_s, speakers)
            process = context.Process(target=serve, args=given, daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def ask(self, what: str, given: Any = None) -> list[Any]:
        """What each process answers."""
        for pipe in self._pipes:
            pipe.send((what, given))
        for pipe in self._pipes:
            assert wait([pipe], _PLAN_S), f"no answer to {what}"
        return [pipe.recv() for pipe in self._pipes]

    def plan(self) -> Any:
        """The newest plan that any member was told of."""
        plans = [plan for plan in self.ask("plan") if plan is not None]
        return max(plans, key=lambda plan: plan.epoch, default=None)

    def until(self, ready: Callable[[Any], bool], seconds: float) -> Any:
        """The first plan of which ``ready`` is true."""
        end = time.monotonic() + seconds
        while (plan := self.plan()) is None or not ready(plan):
            assert time.monotonic() < end, f"not within {seconds} s; the newest plan: {plan and plan.epoch}"
            time.sleep(0.1)
        return plan

    def lose(self, names: Sequence[str]) -> tuple[float, float]:
        """Seconds until the first and the last of all others have a plan without ``names``."""
        begin = time.monotonic()
        for pipe in self._pipes:
            pipe.send(("lose", names))
        plan = self.until(lambda plan: not set(names).intersection(plan.members), _PLAN_S)
        told: dict[str, float] = {}
        end = time.monotonic() + _PLAN_S
        while len(told) < len(plan.members):
            assert time.monotonic() < end, f"{len(told)} of {len(plan.members)} members know the plan"
            told = {name: at for part in self.ask("told", plan.epoch) for name, at in part.items()}
            time.sleep(0.1)
        assert not plan.lost_roles
        return min(told.values()) - begin, max(told.values()) - begin

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def served(etcd: Any) -> dict[str, int]:
    """How many requests etcd has served, by kind, and how many changes its watches have sent."""
    with urllib.request.urlopen(f"{etcd.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, int] = {}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith("grpc_server_msg_received_total{"):
            method = name.split('grpc_method="')[1].split('"')[0]
            found[method] = found.get(method, 0) + int(float(value))
        elif name.startswith("etcd_debugging_mvcc_events_total"):
            found["events"] = int(float(value))
    return found


def measure(arguments: argparse.Namespace, size: int) -> dict[str, Any]:
    """One job."""
    from tests.support.etcd import EtcdServer

    with tempfile.TemporaryDirectory() as folder, EtcdServer(Path(folder)) as etcd:
        speakers = arguments.progress == "one"
        begin = time.monotonic()
        job = Job(etcd, size, arguments.real or size, arguments.processes, arguments.package, arguments.ttl, speakers)
        try:
            job.until(lambda plan: plan.layout is not None, _SETTLED_S + _PLAN_S)
            found: dict[str, Any] = {"members": size, "started_s": time.monotonic() - begin}
            # Until they have entered it, and an absence would be trusted.
            time.sleep(max(3.0, arguments.ttl * 0.2 + 2.0))
            before, at = served(etcd), time.monotonic()
            time.sleep(arguments.steady)
            seconds = time.monotonic() - at
            rates = {kind: (n - before.get(kind, 0)) / seconds for kind, n in served(etcd).items()}
            found["per_s"] = {kind: round(rate, 1) for kind, rate in sorted(rates.items()) if rate >= 0.05}
            requests = sum(rate for kind, rate in rates.items() if kind not in ("LeaseKeepAlive", "events"))
            found["requests_per_s"], found["keep_alive_per_s"] = requests, rates.get("LeaseKeepAlive", 0.0)
            found["events_per_s"] = rates.get("events", 0.0)
            for what, count in (("one", 1), ("one", 1), ("leader", 1), ("many", arguments.losses)):
                plan, leader = job.plan(), leading(etcd)
                names = [m for m in plan.members if m != leader][:: max(1, (len(plan.members) - 1) // count)][:count]
                first, last = job.lose([leader] if what == "leader" else names)
                found.setdefault(what, []).append((round(first, 3), round(last, 3)))
                time.sleep(2.0 + _ENTERED_S[1])
        finally:
            job.close()
    return found


def leading(etcd: Any) -> str:
    """The member that leads."""
    from bamboo_ds.control.registry.keys import Keys, namespace
    from bamboo_ds.control.registry.mirror import Mirror
    from bamboo_ds.store.client import Store

    with Store([etcd.url], namespace=namespace("j")) as store:
        found = Mirror(store.get_prefix(Keys.LEADER)).leader
    assert found is not None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[64, 256], help="sizes, multiples of 8")
    parser.add_argument("--real", type=int, help="members that have coordinators; all, if it is left out")
    parser.add_argument("--processes", type=int, default=4, help="that the members are spread over")
    parser.add_argument("--ttl", type=float, default=20.0, help="seconds of a lease")
    parser.add_argument("--losses", type=int, default=8, help="at once, in the last measurement")
    parser.add_argument("--steady", type=float, default=15.0, help="seconds for which requests are counted")
    parser.add_argument("--progress", choices=("one", "all"), default="one", help="members that tell of each step")
    parser.add_argument("--package", default=str(Path(__file__).resolve().parents[1]), help="checkout to measure")
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.package)
    for size in arguments.members:
        print(json.dumps(measure(arguments, size)), flush=True)


if __name__ == "__main__":
    main()
