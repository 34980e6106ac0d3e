"""Runs drawn scripts as jobs, with stock DeepSpeed and with the package, and judges what becomes of them.

python -m tests.support.adversary.judge SEED[-SEED] ... [--folder FOLDER] [--at-once N] [--shrink]
python -m tests.support.adversary.judge --script JSON     one script
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import processes
from ..jobs import Result, RunningJob, run_stock
from . import grammar, layers, optimizers
from .script import Script, parsed, simpler

TRAIN = Path(__file__).with_name("train_drawn.py")
#: Seconds after which a job hangs.
LIMIT_S = 400.0
#: What a job refuses it refuses before so many steps are done and before losses, or where the script first does it.
FIRST_STEPS = 3

TRAINS, RESTARTS, REFUSED, TOLD, DIFFERS, INVALID = "trains", "restarts", "refused", "told", "differs", "invalid"
#: What a job says where nobody can find out any more whether its script trains with replicas.
UNCHECKED = "nobody is left to check with"


@dataclass(frozen=True)
class Verdict:
    """What became of a script.

    Attributes:
        outcome: ``trains``: all is as with stock DeepSpeed; ``restarts``: the same, from a checkpoint or the beginning;
            ``refused``: by an error of the package's at once, or when the check of the first steps is over that a loss
            has made begin again; ``told``: the results differ, after a warning that nobody could check the first
            steps; ``differs``: anything else; ``invalid``: stock DeepSpeed itself ends with an error.
        why: what differs, or the error.
        kills: how many struck.
        known: the known defect that it meets.
    """

    outcome: str
    why: str = ""
    kills: int = 0
    known: str = ""


def config_of(script: Script, stock: bool) -> dict[str, Any]:
    """``ds_config.json`` of a script."""
    has, found = script.config, _config(script)
    if not stock:
        redundancy: dict[str, Any] = {}
        if "lazy" in has:
            redundancy["mode"] = "lazy-frc-lazy-brc"
        elif "eager" in has:
            redundancy["mode"] = "eager-frc-eager-brc"
        if "sums" in has:
            redundancy["sync_every"] = 1
        if "verified" in has:
            redundancy["verify_every"] = 1
        checkpoint = {"every_s": 0.2} if "own-checkpoints" in has else {}
        found["bamboo"] = {"redundancy": redundancy, "membership": {"lease_ttl_s": 20}, "checkpoint": checkpoint}
    return found


def _config(script: Script) -> dict[str, Any]:
    has = script.config
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": script.micro_batches,
        "steps_per_print": 10**9,
    }
    if script.optimizer == "of-config":
        found["optimizer"] = {"type": "Adam", "params": {"lr": optimizers.LR, "torch_adam": True}}
    if "clipped" in has:
        found["gradient_clipping"] = 0.1
    if "zero" in has:
        found.update(zero_optimization={"stage": 1}, zero_allow_untested_optimizer=True)
    if "scheduler" in has:
        found["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_num_steps": 5}}
    if "bf16" in has:
        found["bf16"] = {"enabled": True}
    return found


def draws(script: Script) -> bool:
    """Whether what it computes comes from random numbers of the job's own, so that stock is no oracle."""
    return any(layer in layers.RANDOM for layer in script.layers) or script.optimizer in optimizers.RANDOM


#: A line with an error.
_ERROR = re.compile(r"^(\[?\w+\]?: )?[\w.]*(Error|Exception|Lost|Inexact|Differ|Differs|Unsupported\w*|Warning)\b:? ")


# -- running --------------------------------------------------------------------------------------------------
def run(folder: Path, script: Script, stock: bool) -> Result:
    """The script as a job in ``folder``.

    Raises:
        TimeoutError: it hangs.
    """
    folder.mkdir(parents=True)
    (folder / "script.json").write_text(script.text())
    config = folder / "ds_config.json"
    config.write_text(json.dumps(config_of(script, stock)))
    arguments = ["--script", str(folder / "script.json")]
    if stock:
        return run_stock(folder, script.world, arguments, config, TRAIN)
    with RunningJob(folder, script.world, arguments, config, TRAIN, variables={"BAMBOO_LOGS": str(folder)}) as job:
        begun = time.monotonic()
        while not job.over():
            if time.monotonic() - begun > LIMIT_S:
                raise TimeoutError(job.report())
            time.sleep(0.05)
        return job.finish()


def said(folder: Path) -> dict[str, set[str]]:
    """What the processes of a job said, by key."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in folder.glob("said-*"):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" = ")
            found[key].add(value)
    return found


def _speakers(folder: Path) -> dict[str, set[str]]:
    """Ranks of a job without losses that said something, by key."""
    found: dict[str, set[str]] = defaultdict(set)
    for place in folder.glob("pid-*"):
        said_by = folder / f"said-{place.read_text()}"
        for line in said_by.read_text().splitlines() if said_by.exists() else ():
            found[line.partition(" = ")[0]].add(place.name.removeprefix("pid-"))
    return found


def judged(folder: Path, script: Script) -> Verdict:
    """Run and compare."""
    stock = run(folder / "stock", script, stock=True)
    if stock.exit_code != 0:
        return Verdict(INVALID, _last(stock.output))
    oracle = stock
    if draws(script):
        if not script.kills:
            return Verdict(INVALID, "no oracle")
        oracle = run(folder / "undisturbed", replace(script, kills=()), stock=False)
        if oracle.exit_code != 0:
            return _verdict(folder / "undisturbed", replace(script, kills=()), oracle, oracle)
    try:
        result = run(folder / "block", script, stock=False)
    except TimeoutError as error:
        (folder / "hang.txt").write_text(str(error))
        return Verdict(DIFFERS, "hangs", _kills(folder / "block"))
    return _verdict(folder / "block", script, result, oracle)


def _kills(folder: Path) -> int:
    return len(list(folder.glob("killed-*")))


def _verdict(folder: Path, script: Script, result: Result, oracle: Result) -> Verdict:
    kills = _kills(folder)
    wanted, found = said(oracle.out), said(folder)
    late = any(kill.step <= FIRST_STEPS for kill in script.kills) and "errors.Inexact: " in result.output
    if result.exit_code != 0 and late:  # what was computed since the loss is wrong, as it says
        return Verdict(REFUSED, _last(result.output), kills)
    wrong = sorted(key for key, values in found.items() if values - wanted.get(key, set()))
    if wrong:
        first = min(wrong, key=_step)
        outcome = TOLD if UNCHECKED in result.output else DIFFERS
        return Verdict(outcome, f"{len(wrong)} differ: {first}: {found[first]}, not {wanted.get(first)}", kills)
    if result.exit_code != 0:
        error = _last(result.output)
        steps = sum(key.startswith("loss of step") for key in found)
        at_once = (steps < FIRST_STEPS and not kills) or any(action.at == steps for action in script.actions)
        if "bamboo_ds.errors." in error and at_once:
            return Verdict(REFUSED, error, kills)
        return Verdict(DIFFERS, f"ends after {steps} steps: {error}", kills)
    # Some things only one rank says: who alone has the logits of an evaluation, or is rank 0.
    dead = {str(kill.rank) for kill in script.kills[:kills]}
    due = {key for key, ranks in _speakers(oracle.out).items() if ranks - dead}
    missing = sorted(due - found.keys(), key=_step)
    if missing:
        return Verdict(DIFFERS, f"{len(missing)} are missing: {missing[0]}", kills)
    restarted = re.search(r"restarts: [1-9]", result.output) or any(result.events("restart_begun"))
    return Verdict(RESTARTS if restarted else TRAINS, "", kills)


def _step(key: str) -> tuple[int, str]:
    numbers = re.findall(r"step (\d+)", key)
    return int(numbers[0]) if numbers else 10**6, key


def _last(output: str) -> str:
    """The error that a job ended with."""
    lines = [line for line in output.splitlines() if _ERROR.search(line)]
    ours = [line for line in lines if "bamboo_ds.errors." in line]
    others = [line for line in lines if "Connection closed by peer" not in line]
    return (ours or others or lines or output.splitlines() or [""])[-1][:600]


# -- known defects --------------------------------------------------------------------------------------------
def known(script: Script, verdict: Verdict) -> str:
    """Which known defect a script meets: values that differ. Whatever else becomes of it is another defect."""
    if re.match("ends|hangs", verdict.why) or "Error: " in verdict.why:
        return ""
    for name, met in KNOWN.items():
        if met(script, verdict):
            return name
    return ""


KNOWN: dict[str, Callable[[Script, Verdict], bool]] = {
    "what has come round when it is compared is not seen": lambda s, v: "enumerated" in s.layers,
    "writes through .data after the first steps are not seen": lambda s, v: any(
        a.what == "clamp-data" for a in s.actions
    ),
}


# -- many -----------------------------------------------------------------------------------------------------
def judge(folder: Path, script: Script) -> Verdict:
    """Run, compare, and leave nothing behind unless it differs."""
    shutil.rmtree(folder, ignore_errors=True)
    verdict = judged(folder, script)
    if verdict.outcome == DIFFERS:
        return replace(verdict, known=known(script, verdict))
    if verdict.outcome != INVALID:
        shutil.rmtree(folder)
    return verdict


def shrunk(folder: Path, script: Script, verdict: Verdict, limit: int = 60) -> tuple[Script, Verdict]:
    """The simplest script found that differs like ``script``: the same kind of reason, with things left away."""
    tried = 0
    while tried < limit:
        for each in simpler(script):
            tried += 1
            found = judge(folder, each)
            if found.outcome == DIFFERS and found.known == verdict.known and _kind(found) == _kind(verdict):
                script, verdict = each, found
                break
            if tried >= limit:
                break
        else:
            break
    return script, verdict


def _kind(verdict: Verdict) -> str:
    return re.sub(r"[^a-z ]", "", verdict.why.partition(":")[0])


def main() -> None:
    """Many seeds, or one script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("seeds", nargs="*")
    parser.add_argument("--script")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--shrink", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="adversary-"))
    folder.mkdir(parents=True, exist_ok=True)
    scripts = [parsed(arguments.script)] if arguments.script else []
    for each in arguments.seeds:
        first, _, last = each.partition("-")
        scripts += [grammar.draw(seed) for seed in range(int(first), int(last or first) + 1)]
    counts: Counter[str] = Counter()

    def one(script: Script) -> None:
        begun = time.monotonic()
        try:
            verdict = judge(folder / str(script.seed), script)
        except Exception as error:
            verdict = Verdict("broken", repr(error)[-300:])
        counts[verdict.outcome + verdict.known] += 1
        counts["kills"] += verdict.kills
        name = verdict.outcome + (f" ({verdict.known})" if verdict.known else "")
        print(f"{script.seed}: {name}, {verdict.kills}/{len(script.kills)} kills, {time.monotonic() - begun:.1f} s")
        if verdict.outcome not in (TRAINS, RESTARTS):
            print(f"    {verdict.why}\n    {script.text()}")
        if arguments.shrink and verdict.outcome == DIFFERS and not verdict.known:
            small, why = shrunk(folder / f"{script.seed}s", script, verdict)
            print(f"    shrunk: {why.why}\n    --script '{small.text()}'")

    processes._IMPORTS_S = 900.0  # beside much else
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(one, scripts))
    print(dict(counts))


if __name__ == "__main__":
    main()
