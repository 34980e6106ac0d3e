"""Looks for schedules of faults that let two starts of one job commit, publish or account: the model of
``tests/support/fencing_model.py``, with seeds.

    python benchmarks/fencing.py --schedules 1000000 --jobs 2
    python benchmarks/fencing.py --starting --schedules 10000       of a job that its members start, one by one, every
                                                                    second time fewer than it has ranks
    python benchmarks/fencing.py --first 375 --schedules 1          one schedule again
    python benchmarks/fencing.py --off pause --schedules 1000       without a fence: finds violations

Exit code 1 if an invariant was broken (or, with ``--off``, if none was).
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.fencing_model import FENCES, Broken, draw, quiet, run
from tests.support.simulated_members import STAGES

_CHUNK = 250


def chunk(task: tuple[int, int, tuple[str, ...], bool]) -> tuple[int, Counter[str], list[tuple[int, str]]]:
    """Schedules ``first`` to ``last``, the latter not included: how many, what happened, what was broken."""
    first, last, off, starting = task
    quiet()
    gc.set_threshold(50_000)  # schedules make much that is soon gone
    happened: Counter[str] = Counter()
    broken = []
    for seed in range(first, last):
        try:
            happened += run(*draw(seed), off, STAGES - seed % 2 if starting else 0)
        except Broken as error:
            broken.append((seed, str(error)))
        except Exception:  # a defect of the package or of the model: told with its seed like a broken invariant
            broken.append((seed, traceback.format_exc()))
    return last - first, happened, broken


def tasks(
    first: int, count: int, off: tuple[str, ...], starting: bool
) -> Iterable[tuple[int, int, tuple[str, ...], bool]]:
    """Chunks of seeds."""
    for begin in range(first, first + count, _CHUNK):
        yield begin, min(begin + _CHUNK, first + count), off, starting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--off", choices=FENCES, action="append", default=[], help="switch this fence off")
    parser.add_argument("--starting", action="store_true", help="as by bamboo join --start, without a launcher")
    parser.add_argument("--show", type=int, default=5, help="broken invariants to print")
    arguments = parser.parse_args()
    begin, done = time.monotonic(), 0
    happened: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with get_context("spawn").Pool(arguments.jobs) as pool:
        todo = tasks(arguments.first, arguments.schedules, tuple(arguments.off), arguments.starting)
        for count, what, found in pool.imap_unordered(chunk, todo):
            done += count
            happened += what
            for seed, text in found[: max(0, arguments.show - len(broken))]:
                print(f"seed {seed}: {text}", flush=True)
            broken += found
    seconds = time.monotonic() - begin
    print(f"{done:,} schedules from seed {arguments.first} on in {seconds:.0f} s: {done / seconds:.0f} per second")
    for kind, number in happened.most_common():
        print(f"{number:>12,}  {kind}")
    print(f"{len(broken)} broken: seeds {[seed for seed, _ in broken[:50]]}")
    return int(bool(broken) != bool(arguments.off))


if __name__ == "__main__":
    sys.exit(main())
