"""A :mod:`stranger <tests.support.stranger>` that a test sets on a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bamboo_ds.control.registry.records import MemberRecord

#: ``nobody``.
NOBODY = 65534
_LISTENING = "0A"


def ports(members: Iterable[MemberRecord]) -> list[tuple[str, int, str]]:
    """Address, port and member of all sockets at which the members' workers listen, on whatever hosts."""
    found = []
    for member in members:
        try:
            inodes = {os.readlink(entry) for entry in Path(f"/proc/{member.pid}/fd").iterdir()}
            lines = Path(f"/proc/{member.pid}/net/tcp").read_text().splitlines()[1:]
        except FileNotFoundError:
            continue  # it, or the descriptor, has gone
        for words in map(str.split, lines):
            if words[3] == _LISTENING and f"socket:[{words[9]}]" in inodes:
                host, port = words[1].split(":")
                address = ".".join(str(byte) for byte in reversed(bytes.fromhex(host)))
                found.append((address, int(port, 16), member.id))
    return found


class Attack:
    """A stranger at work, from ``with`` to its end.

    Args:
        folder: for its report.
        targets: what it knows, asked again and again; see :mod:`.stranger`.
        prefix: of its command line, to have it elsewhere.
        uid: the user that it becomes.
    """

    def __init__(
        self,
        folder: Path,
        targets: Callable[[], Mapping[str, Any]],
        prefix: Sequence[str] = (),
        uid: int | None = None,
    ) -> None:
        self._report = folder / "stranger.jsonl"
        self._targets = targets
        self._command = [*prefix, sys.executable, "-I", str(Path(__file__).with_name("stranger.py"))]
        self._command += [] if uid is None else [str(uid)]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._tell)

    def __enter__(self) -> Attack:
        with open(self._report, "wb") as report:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=report)
        self._thread.start()
        return self

    def _tell(self) -> None:
        assert self._process.stdin is not None
        while not self._ending.wait(0.1):
            self._process.stdin.write(json.dumps(self._targets()).encode() + b"\n")
            self._process.stdin.flush()

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def attempts(self) -> list[dict[str, str]]:
        """All so far."""
        lines = self._report.read_text().rpartition("\n")[0].splitlines()
        return [json.loads(line) for line in lines]

    def made(self) -> set[str]:
        """What was tried so far."""
        return {attempt["what"] for attempt in self.attempts()}

    def refused(self, open_to_all: Collection[str] = ()) -> Counter[str]:
        """How often what was refused so far; fails if anything else came of an attempt than no answer.

        Args:
            open_to_all: what may succeed.
        """
        attempts = [attempt for attempt in self.attempts() if attempt["what"] not in open_to_all]
        successes = [attempt for attempt in attempts if attempt["came"] not in ("refused", "no answer")]
        assert not successes, successes[:5]
        return Counter(attempt["what"] for attempt in attempts if attempt["came"] == "refused")
