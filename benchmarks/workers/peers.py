"""Worker of gpu/nccl.py: one of some members that reduce tensors on one device and lose one of them.

It speaks with the program by lines of JSON: on standard output what happens, on standard input what it is to do. All
that is measured goes through the package's own data plane (:class:`.Session`), without agents.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from bamboo_ds.comm import groups as groups_module
from bamboo_ds.comm.inner import BEHIND, kind_for
from bamboo_ds.comm.session import Session
from bamboo_ds.devices.nccl import prepare
from bamboo_ds.errors import BambooError
from bamboo_ds.topology import Plan

LIMIT = timedelta(seconds=120)
ADDRESS = "127.0.0.1"
#: Libraries write to the standard output; theirs goes to the standard error.
_OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def say(**facts: Any) -> None:
    """One line."""
    _OUT.write(json.dumps(facts) + "\n")


class Member:
    """This member.

    Args:
        name: of the member, which ends with its number.
        device: of its tensors.
        count: elements of a tensor.
    """

    def __init__(self, name: str, device: torch.device, count: int) -> None:
        self.name, self.device, self.kind = name, device, kind_for(device)
        self.session = Session(name, ADDRESS, LIMIT, lambda member, reason: None)
        self.tensor = torch.empty(count, device=device)
        self.plans: queue.Queue[dict[str, Any]] = queue.Queue()
        self.inner: Any = None
        self.claimed = self.wrong = 0
        self.attach_s = 0.0

    def listen(self) -> None:
        """Obey the program: a plan ends the epoch before it at once, on this thread, as in a job."""
        for line in sys.stdin:
            order = json.loads(line)
            if order["epoch"] > 1:
                begin = time.monotonic()
                self.session.abort("a member was killed", order["epoch"] - 1)
                say(aborted_s=time.monotonic() - begin)
            self.plans.put(order)

    def enter(self) -> Sequence[str]:
        """Enter the next plan's epoch, once the communicators of the one before are aborted; returns its members."""
        order = self.plans.get(timeout=LIMIT.total_seconds())
        members = tuple(order["members"])
        script_ranks, places = tuple(range(len(members))), tuple(order["places"])
        plan = Plan(epoch=order["epoch"], owners=members, members=members, script_ranks=script_ranks, places=places)
        begin = time.monotonic()
        self.session.attach(plan)
        self.attach_s = time.monotonic() - begin
        self.session.meet()
        return members

    def reduce(self, members: Sequence[str]) -> None:
        """One all-reduce; counts it if it claims to be complete, and if it then is not right."""
        epoch = self.session.current
        self.tensor.fill_(int(self.name[1:]) + 1)
        group = epoch.groups.get("peers", members, self.kind, LIMIT, self.device)
        with epoch.life.calling("all_reduce"):
            self.inner = group.allreduce([self.tensor])
            work = epoch.groups.work(self.inner, "all_reduce", members, None, self.kind, LIMIT, self.device)
        work.wait()
        self.claimed += 1
        self.wrong += not self.right(members)

    def right(self, members: Sequence[str]) -> bool:
        """Whether the tensor has the sum of what ``members`` gave."""
        return bool(self.tensor.eq(sum(int(name[1:]) + 1 for name in members)).all())


def stop_while_made(kind: str) -> None:
    """Have this process wait for its end where a communicator is made, when all others are there, too."""

    def stopping(*arguments: Any) -> None:
        say(making=True)
        signal.pause()

    setattr(groups_module, "connect" if kind in BEHIND else "create_inner", stopping)


def main(name: str, when: str, count: int, watch_s: float) -> None:
    """Lose a member, or be the one, and go on."""
    faulthandler.dump_traceback_later(45, repeat=True)  # where it hangs, if it does, is in its log
    prepare(os.environ)
    os.environ["NCCL_HOSTID"] = name  # NCCL takes each to be on a host of its own
    gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    member = Member(name, torch.device("cuda", 0) if gpu else torch.device("cpu"), count)
    # An abort that takes longer ends a worker of a job; here it is to be seen how long it takes.
    groups_module._ABORT_TIMEOUT_S = 90.0
    say(place=member.session.place, kind=member.kind)
    threading.Thread(target=member.listen, daemon=True).start()
    members, raised = member.enter(), ""
    if when == "making" and name == "m0":
        stop_while_made(member.kind)
    if when == "idle":
        member.reduce(members)
    say(ready=True)
    while when != "idle":
        try:
            member.reduce(members)
        except BambooError as error:
            raised = type(error).__name__
            break
    left = member.enter()
    inner = member.inner
    claims = inner is not None and inner.is_completed() and inner.exception() is None and not member.right(members)
    facts = {"raised": raised, "attach_s": member.attach_s, "claimed": member.claimed, "wrong": member.wrong}
    member.reduce(left)
    say(recovered=True, **facts, inner_claims_wrong=bool(claims and when == "reduce"), goes_on=member.wrong == 0)
    for _ in range(int(watch_s)):
        time.sleep(1.0)
        member.reduce(left)
    member.session.meet()
    member.session.close()
    say(end=True, wrong=member.wrong)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
