"""Several NCCL ranks on one GPU, one of which is killed: in an all-reduce, while a communicator is made, and idle.

``NCCL_HOSTID`` differs for each, so that NCCL takes the GPU for one of each rank's own; its makers do not support that.
Survivors abort, go on without the lost one, and are watched: torch may end a process a minute after such a loss. On a
CPU gloo stands in, which shows no more than that this program works. See ``--help``.
"""

from __future__ import annotations

import json
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from bench import Experiment, experiment, table
from common import WORKERS, JobFailed, ending, environment
from rich.markup import escape

WHEN = ("reduce", "making", "idle")


@dataclass
class Figures:
    """One loss.

    Attributes:
        kind: of the groups.
        recovered: survivors that have reduced without the lost member.
        lived: those that were there at the end of the watch, and ended by themselves.
        abort_s, attach_s: seconds until the longest abort returned, and until it was complete and the next epoch begun.
        claimed, wrong: results that survivors took for complete, and those of them that were not.
        inner_wrong: survivors for which NCCL alone would have claimed a wrong result.
        raised: by the interrupted call.
        problem: what else has happened.
    """

    when: str
    number: int
    watch_s: float
    kind: str = ""
    survivors: int = 0
    recovered: int = 0
    lived: int = 0
    abort_s: float = 0.0
    attach_s: float = 0.0
    claimed: int = 0
    wrong: int = 0
    inner_wrong: int = 0
    raised: tuple[str, ...] = ()
    problem: str = ""

    @property
    def good(self) -> bool:
        """Whether all survivors went on, and none took a wrong result for a right one."""
        return self.lived == self.recovered == self.survivors > 0 and not self.wrong and not self.problem


class Peer:
    """A process of ``workers/peers.py``."""

    def __init__(self, process: subprocess.Popen[str], name: str) -> None:
        self.process, self.name = process, name
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self.heard: dict[str, Any] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    @contextmanager
    def started(cls, folder: Path, name: str, arguments: Sequence[str], variables: dict[str, str]) -> Iterator[Peer]:
        """Ended when the body is left."""
        command = [sys.executable, str(WORKERS / "peers.py"), name, *arguments]
        with open(folder / f"log-{name}.txt", "wb") as log:
            process = subprocess.Popen(
                command, env=environment() | variables, stdin=-1, stdout=-1, stderr=log, text=True, bufsize=1
            )
        with ending(process), process:
            try:
                yield cls(process, name)
            finally:
                process.kill()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put({"gone": True})

    def order(self, **order: Any) -> None:
        """Tell it a plan."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")

    def hear(self, what: str, until: float) -> dict[str, Any]:
        """All that it has said, once it has said ``what``; raises ``JobFailed`` at the monotonic time ``until``."""
        while what not in self.heard:
            try:
                self.heard |= self._said.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise JobFailed(f"{self.name} has not said {what!r} in time") from None
            if "gone" in self.heard:
                raise JobFailed(f"{self.name} is gone (exit code {self.process.wait()}) before {what!r}")
        return self.heard


def lose(run: Experiment, row: Figures, ranks: int, count: int, draw: random.Random) -> None:
    """Start ``ranks`` members, kill the first, and fill ``row``."""
    run.timeout_s(f"{row.when} {row.number}", row.watch_s + 30)
    folder, names = run.folder(f"{row.when}-{row.number}"), [f"m{number}" for number in range(ranks)]
    arguments, variables = [row.when, str(count), str(row.watch_s)], {"DS_ACCELERATOR": run.kind}
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer.started(folder, name, arguments, variables)) for name in names]
        limit = time.monotonic() + 120
        places = [peer.hear("place", limit)["place"] for peer in peers]
        row.kind, row.survivors = peers[0].heard["kind"], ranks - 1
        for peer in peers:
            peer.order(epoch=1, members=names, places=places)
        for peer in peers:
            peer.hear("ready", limit)
        victim, survivors = peers[0], peers[1:]
        if row.when == "making":
            victim.hear("making", limit)
        time.sleep(draw.random())
        victim.process.kill()
        for peer in survivors:
            peer.order(epoch=2, members=names[1:], places=places[1:])
        for peer in survivors:
            try:
                said = peer.hear("recovered", time.monotonic() + 120)
                row.recovered += said["goes_on"]
                row.abort_s, row.attach_s = max(row.abort_s, said["aborted_s"]), max(row.attach_s, said["attach_s"])
                row.claimed += said["claimed"]
                row.inner_wrong += said["inner_claims_wrong"]
                row.raised = tuple(sorted({*row.raised, said["raised"]}))
                row.wrong += peer.hear("end", time.monotonic() + row.watch_s + 60)["wrong"]
                code = peer.process.wait(30)
                row.lived += code == 0
            except (JobFailed, subprocess.TimeoutExpired) as error:
                row.problem += f"{error}; see {folder}/log-{peer.name}.txt; "


@experiment("nccl", minutes=9.5)
@click.option("--when", "wanted", type=click.Choice(WHEN), multiple=True, default=WHEN, show_default=True)
@click.option("--ranks", type=click.IntRange(min=3), default=3, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=4, show_default=True, help="The first is watched.")
@click.option("--watch-s", type=float, default=90.0, show_default=True, help="Seconds for which survivors go on.")
@click.option("--megabytes", type=click.FloatRange(min=0.001), default=256.0, show_default=True, help="Of a tensor.")
@click.option("--seed", type=int, default=1, show_default=True)
def main(
    run: Experiment, wanted: tuple[str, ...], ranks: int, repetitions: int, watch_s: float, megabytes: float, seed: int
) -> None:
    """Kill one of several ranks on one GPU, and watch the others."""
    if not run.gpu:
        repetitions, watch_s, megabytes = 1, min(watch_s, 2.0), min(megabytes, 1.0)
    draw, rows = random.Random(seed), []
    columns = (" loss", "lived", "went on", "abort [s]", "next epoch [s]", "claimed", "wrong", "NCCL alone", " raised")
    view = table(f"{ranks} ranks, tensors of {megabytes:g} MB", "number", *columns, " ")
    for number in range(repetitions):
        for when in wanted:
            row = Figures(when, number, watch_s if number == 0 else 3.0)
            try:
                lose(run, row, ranks, int(megabytes * 10**6) // 4, draw)
            except JobFailed as error:
                row.problem = error.message
            rows.append(row)
            counts = (
                f"{row.lived} of {row.survivors}",
                str(row.recovered),
                f"{row.abort_s:.3f}",
                f"{row.attach_s:.3f}",
            )
            more = (str(row.claimed), str(row.wrong), str(row.inner_wrong), " ".join(row.raised), escape(row.problem))
            view.add_row(str(number), f"{when} ({row.kind})", *counts, *more)
            run.say(str(row))
            if not row.good:
                run.problems.append(f"{when} {number}: {row.problem or 'see the table'}")
            run.save(rows=[asdict(each) for each in rows])
    run.end(view, ranks=ranks, rows=[asdict(each) for each in rows])


if __name__ == "__main__":
    main()
