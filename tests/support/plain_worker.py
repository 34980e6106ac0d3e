"""A worker without torch: tells a test what its channel tells it, and does what the test says.

``plain_worker.py SOCKET [STAGES_OF_RANK_1]``; the protocol is JSON lines out, words in (see the end).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from bamboo_ds.topology import Layout, Plan
from bamboo_ds.worker.channel import WorkerChannel

line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
lock = threading.RLock()  # a signal may come while it is held


def tell(kind: str, **fields: Any) -> None:
    with lock:
        record = {"kind": kind, "at": time.monotonic(), **fields}
        line.sendall(json.dumps(record).encode() + b"\n")


channel = WorkerChannel.from_environment()
assert channel is not None
tell(
    "hello",
    rank=channel.rank,
    pid=os.getpid(),
    agent=os.getppid(),
    member=channel.member,
    env={k: v for k, v in os.environ.items() if "BAMBOO" in k or "RANK" in k or "SIZE" in k or "MASTER" in k},
)


def on_plan(plan: Plan) -> None:
    tell("plan", plan=json.loads(plan.to_json()))
    if channel.member not in plan.members:
        os._exit(87)
    if plan.lost_roles:
        os._exit(86)


def on_closed() -> None:
    tell("closed")
    os._exit(1)


words = line.makefile("r")
assert words.readline() == "go\n"
channel.start(on_plan, on_closed)
plan = channel.wait_plan(0, 60)

for text in words:
    word, *rest = text.split()
    if word == "layout":
        channel.report_layout(Layout(int(rest[0]), int(rest[1])), rest[2] == "redundant")
    elif word == "progress":
        channel.progress(int(rest[0]), rest[1] if len(rest) > 1 else None)
    elif word == "event":
        channel.event(rest[0], **json.loads(" ".join(rest[1:])))
    elif word == "suspect":
        channel.suspect(int(rest[0]), {rest[1]: "a test says so"})
    elif word == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        tell("child", pid=child.pid)
    elif word == "hold":  # the GIL, for longer than any test lasts
        ctypes.PyDLL(None).sleep(600)
    elif word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell("deaf")
    elif word == "orderly":  # told to end, it goes on until it has done what it must
        signal.signal(signal.SIGTERM, lambda signum, frame: tell("told to end"))
        tell("orderly")
    elif word == "print":
        print(*rest, flush=True)
        tell("printed")
    elif word == "read":
        tell("read", text=os.read(0, int(rest[0])).decode())
    elif word == "close":
        channel.close()
        tell("threads", names=[t.name for t in threading.enumerate()])
    elif word == "done":  # it has nothing to do any more, and does not end
        channel.exit_notice("a test says so", done=True)
        channel.close()
        tell("done")
    elif word == "exit":
        channel.close()
        sys.exit(int(rest[0]))
    elif word == "linger":  # it fails, and a thread keeps it from ending
        channel.exit_notice("RuntimeError: a test says so", failed=True)
        threading.Thread(target=threading.Event().wait).start()
        tell("lingers")
        raise RuntimeError("a test says so")
    elif word == "raise":
        raise RuntimeError("a test says so")
