"""One process of a drawn script: what it says, and what it dies by."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.support.adversary import layers
from tests.support.adversary.script import Kill, Script

#: Seconds that a process waits for being told of a loss.
TOLD_S = 10.0


class Run:
    """One process of the job.

    Attributes:
        step: that is being done, from 0.
    """

    def __init__(self, script: Script, out: Path) -> None:
        self.script, self.out, self.step = script, out, -1
        self.rank = int(os.environ["RANK"])
        self.joined = bool(os.environ.get("BAMBOO_JOINER"))
        self.engine: Any = None
        self._seen: dict[str, int] = {}
        (out / f"pid-{self.rank}").write_text(str(os.getpid()))
        layers.HOOKS.append(self.happens)

    def say(self, key: str, value: Any) -> None:
        """What stock says, too."""
        with open(self.out / f"said-{os.getpid()}", "a") as file:
            file.write(f"{key} = {value}\n")

    @property
    def parts(self) -> Any:
        """Of the package's engine, if it is one."""
        return getattr(self.engine, "_parts", None)

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self._seen = step, {}
        for number, kill in enumerate(self.script.kills):
            if kill.place == "timer" and self._due(number, kill):
                threading.Timer(kill.count / 1000, self._strike, (number, kill)).start()

    def happens(self, place: str) -> None:
        """Code of the script runs at ``place``; a kill may be due."""
        if threading.current_thread() is not threading.main_thread() or self.parts is None:
            return
        self._seen[place] = self._seen.get(place, 0) + 1
        for number, kill in enumerate(self.script.kills):
            if kill.place == place and self._due(number, kill) and self._seen[place] > kill.count:
                self._strike(number, kill)

    def pending(self) -> bool:
        """Whether a kill is still to come that waits for replicas."""
        waits = [n for n, kill in enumerate(self.script.kills) if kill.healed]
        return self.parts is not None and any(not (self.out / f"killed-{n}").exists() for n in waits)

    def _due(self, number: int, kill: Kill) -> bool:
        if self.joined or (kill.rank if kill.by is None else kill.by) != self.rank:
            return False
        if (self.out / f"killed-{number}").exists() or self.parts is None:
            return False
        if not kill.healed:
            return self.step == kill.step
        before = all((self.out / f"killed-{n}").exists() for n in range(number))
        return self.step >= kill.step and before and self._healed(number)

    def _healed(self, number: int) -> bool:
        plan, lost = self.parts.epoch.plan, {each.rank for each in self.script.kills[:number]}
        there = {member.partition("-")[0] for member in plan.members}
        return None not in plan.shadows and not self.parts.copies.constructions and not there & {f"m{r}" for r in lost}

    def _strike(self, number: int, kill: Kill) -> None:
        session = self.parts.epoch.session if hasattr(self.parts.epoch, "session") else None
        mark = self.out / f"killed-{number}"
        mark.write_text(str(self.step))
        if kill.by is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(int((self.out / f"pid-{kill.rank}").read_text()), signal.SIGKILL)
        end = time.monotonic() + TOLD_S
        while session is not None and not session.aborted and time.monotonic() < end:
            time.sleep(0.002)
