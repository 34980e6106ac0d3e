"""Universal checkpoints made of those of jobs, by DeepSpeed's own converter.

The converter gets a folder of links to DeepSpeed's files, and writes into a hidden folder; what it has made gets its
name when it is whole. Beside its files it gets what scripts otherwise have to put into their checkpoints
(``universal_checkpoint_info``): which weights are tied, so that it takes them from one stage.

It does not say so where it makes something wrong or less than what was saved, so all that is looked for before.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from . import publish
from .checkpoints import MANIFEST, CheckpointError, CheckpointInfo, Status, list_checkpoints, verify
from .own import list_own
from .universal import LATEST, SUFFIX, Files, is_universal

_INFO, _TIED = "universal_checkpoint_info", "pipeline_replicated_parameter_patterns"
#: What it converts of an optimizer's state, with the parameters themselves.
_MOMENTS, _MORE = ("exp_avg", "exp_avg_sq"), {"step"}
#: How many names an error shows.
_SHOWN = 5


@dataclass(frozen=True)
class Converted:
    """The result of a conversion: ``path``, of the checkpoint ``source`` with the files ``files``."""

    path: Path
    source: CheckpointInfo
    files: Files


@dataclass
class Holding:
    """The part of a parameter in the shards of one stage: of each its fp32 weights and its moments, flat."""

    parts: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements in each shard that has some."""
        return tuple(len(weights) for weights, *_ in self.parts)

    @property
    def trained(self) -> bool:
        """Whether it has ever had a gradient there."""
        return any(bool(moment.any()) for _, *moments in self.parts for moment in moments)

    def same(self, other: Holding) -> bool:
        """Whether ``other`` is the same, however it is sharded."""
        mine, theirs = ([torch.cat(each) for each in zip(*held.parts, strict=True)] for held in (self, other))
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def convert(source: CheckpointInfo, into: Path, allow_missing: bool = False) -> Converted:
    """Converts ``source`` into ``into``; the tag there is that of ``source`` with ``_universal``.

    Args:
        allow_missing: also if frozen parameters or buffers would not be loaded.

    Raises:
        CheckpointError: it is not whole, DeepSpeed's converter cannot convert it, or there is one of this tag already.
        OSError: a file cannot be read or written.
    """
    path, tag = Path(source.path), source.tag + SUFFIX
    target = into / tag
    if target.exists():
        raise CheckpointError(f"{target} exists already: remove it, or give another folder")
    files = whole(source)
    shared = tied(path, files)
    if not allow_missing:
        check_layers(path, files)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bamboo-converting-", dir=into) as name:
        work = Path(name)
        (work / "source").mkdir()
        _link(path, files, work / "source")
        _describe(work / "source" / files.stages[0], shared)
        _run(work, path)
        _check_made(work / "made", parameters(path, files))
        if not allow_missing and files.slices == 1:
            check_layers(path, files, work / "made")
        publish.make_folders(into, target.relative_to(into).parts[:-1])
        (work / "made").rename(target)
    publish.write_atomically(into / LATEST, tag)
    return Converted(target, source, files)


def choose(folder: Path, tag: str | None) -> CheckpointInfo:
    """The checkpoint ``tag`` in ``folder``, the script's if there is one, else the newest of the jobs' own.

    Args:
        folder: what scripts give to ``save_checkpoint``, one checkpoint, or where jobs' own are.
        tag: ``None`` for the one that ``latest`` names, or else the newest complete one of the script's.

    Raises:
        CheckpointError: there is none, or the folder cannot be read.
    """
    if (folder / MANIFEST).is_file() or Files.in_folder(folder).stages:
        found = list_checkpoints(folder if (folder / MANIFEST).is_file() else folder.parent)
        found = [info for info in found if info.path == folder]
    else:
        found = [info for info in [*list_own(folder), *list_checkpoints(folder)] if not is_universal(Path(info.path))]
    if tag is not None:
        found = [info for info in found if info.tag == tag]
        if not found:
            raise CheckpointError(f"there is no checkpoint {tag!r} in {folder}: see bamboo checkpoints {folder}")
        return found[-1]
    scripts = [info for info in found if not info.own] or found
    usable = [info for info in scripts if info.status is Status.COMPLETE]
    newest = next((info for info in scripts if info.latest), None) or next(reversed(usable or scripts), None)
    if newest is None:
        raise CheckpointError(f"there are no checkpoints in {folder}")
    return newest


def whole(source: CheckpointInfo) -> Files:
    """The files of ``source``, a checkpoint that is whole, which DeepSpeed's converter can convert.

    Raises:
        CheckpointError: says what is wrong, and what can be done.
    """
    path = Path(source.path)
    if source.status is Status.UNFINISHED:
        raise CheckpointError(f"{path} is not complete: {'; '.join(source.reasons)}")
    problems = verify(path) if (path / MANIFEST).is_file() else []
    if problems:
        raise CheckpointError(f"{path} is damaged: {'; '.join(map(str, problems[:_SHOWN]))}; take another one")
    if is_universal(path):
        raise CheckpointError(f"{path} is a universal checkpoint already")
    files = Files.in_folder(path)
    if not files.stages or not files.layers:
        raise CheckpointError(f"{path} is no checkpoint of a pipeline: it has no files layer_* and mp_rank_*")
    if files.missing:
        raise CheckpointError(f"{path} is not complete: there are only {'; '.join(files.missing)}")
    if not files.shards:
        raise CheckpointError(
            f"{path} is of a job without ZeRO, which DeepSpeed cannot convert. With other numbers of pipelines it "
            "loads as it is; with other stages its weights alone do (load_checkpoint with load_module_only=True). To "
            'change stages later, train with "zero_optimization": {"stage": 1}'
        )
    if files.slices > 1 and _INFO not in _load(path / files.stages[0]):
        raise CheckpointError(
            f"{path} is of layers that are cut into tensor slices, and does not say how: the script must save "
            f"{_INFO!r} with it, as Megatron-DeepSpeed does with --universal-checkpoint"
        )
    return files


def tied(path: Path, files: Files) -> list[str]:
    """The parameters of the first stage that others have too, by name. Looks at the state of all shards.

    DeepSpeed ties some parameters of a tied layer, and may leave others untrained on all stages but one. Universal
    checkpoints have one of each name, and the converter is told to take that of the first stage.

    Raises:
        CheckpointError: the optimizer's state is none that DeepSpeed's converter knows, or it would take the wrong one
            of two that differ.
    """
    names = [names_of(_load(path / file)) for file in files.stages.values()]
    several = {name for name, count in Counter(chain(*names)).items() if count > 1 and files.slices == 1}
    held: dict[str, dict[int, Holding]] = defaultdict(lambda: defaultdict(Holding))
    for (_, stage), file in sorted(files.shards.items()):
        state = _load(path / file)["optimizer_state_dict"]
        _check_optimizer(path / file, state)
        for group, mapping in enumerate(state["param_slice_mappings"]):
            for name in several & set(mapping):
                where, moments = mapping[name], state["base_optimizer_state"]["state"][group]
                flat = [state["single_partition_of_fp32_groups"][group], *(moments[kind] for kind in _MOMENTS)]
                parts = [each[where.start : where.start + where.numel] for each in flat]
                held[name][stage].parts.append(parts)
    for name, stages in held.items():
        _check_tied(name, stages)
    return sorted(name for name, stages in held.items() if 0 in stages)


def _check_tied(name: str, stages: dict[int, Holding]) -> None:
    """Refuses a parameter of several stages of which the converter would make something else."""
    first = min(stages)
    if first and len({held.sizes for held in stages.values()}) > 1:
        raise CheckpointError(
            f"{name} is on stages {sorted(stages)}, which have sharded it differently: DeepSpeed's converter would mix "
            "their parts up. Train with one pipeline, or with one of the tied layers on the first stage, before the "
            "checkpoint that is converted"
        )
    for stage, held in stages.items():
        if not (held.same(stages[first]) or (first == 0 and not held.trained)):
            raise CheckpointError(
                f"{name} of a tied layer is not the same on stages {first} and {stage}: DeepSpeed's converter keeps "
                "one of the two. Give what only one of the tied layers trains a layer of its own"
            )


def parameters(path: Path, files: Files) -> set[str]:
    """Names of all parameters that are trained."""
    return {name for file in files.stages.values() for name in names_of(_load(path / file))}


def names_of(stage: dict[str, Any]) -> list[str]:
    """Names of the parameters of one stage that are trained, from its ``mp_rank`` file."""
    return [name for group in stage["param_shapes"] for name in group]


def _check_optimizer(file: Path, state: dict[str, Any]) -> None:
    base = state["base_optimizer_state"]
    if not isinstance(base, dict):
        raise CheckpointError(f"{file} is of a job with zero_optimization.elastic_checkpoint: switch that off")
    if not base["state"]:
        raise CheckpointError(
            f"{file} is of a job that has not taken a step of its optimizer yet (all overflowed, or none was done): "
            "DeepSpeed converts no parameters then; convert a later checkpoint"
        )
    kinds = {name for each in base["state"].values() for name in each}
    if kinds - _MORE != set(_MOMENTS):
        raise CheckpointError(
            f"{file} is of an optimizer that keeps {', '.join(sorted(kinds)) or 'nothing'} for each parameter. "
            "DeepSpeed converts the state of Adam and its like alone (exp_avg, exp_avg_sq): load the weights alone "
            "(load_module_only=True)"
        )


def check_layers(path: Path, files: Files, made: Path | None = None) -> None:
    """Refuses a checkpoint of which something would be left out: DeepSpeed loads what the optimizer holds.

    Args:
        made: what the converter has made. Files of layers do not tell which layers are tied: without it all are taken
            for tied whose tensors have such names, with it only those whose tensors are the same.
    """
    known, lost = parameters(path, files), []
    ties = [name for name in sorted(known) if name.startswith("tied_modules.")]
    for number, (file, *_) in files.layers.items():
        for key, tensor in _load(path / file).items():
            if f"{number}.{key}" in known:
                continue
            named = [name for name in ties if name.split(".", 2)[2] == key]
            if not any(made is None or _is_made_of(made / "zero" / name / "fp32.pt", tensor) for name in named):
                lost.append(f"{number}.{key}")
    if lost:
        raise CheckpointError(
            f"{_some(lost)} of {path} are frozen parameters or buffers, which DeepSpeed does not load from universal "
            "checkpoints. If the script gives them the same values again by itself, convert with --allow-missing"
        )


def _is_made_of(file: Path, tensor: torch.Tensor) -> bool:
    """Whether the fp32 parameter in ``file`` is ``tensor`` in the precision of that."""
    return torch.equal(_load(file)["param"].to(tensor.dtype), tensor)


def _link(path: Path, files: Files, folder: Path) -> None:
    """Puts links to the files into ``folder``, and as many files of layers as the converter counts on.

    It reads none of these, but wants one of layer 1, and one for each stage besides those of the first and last layer.
    """
    for name in (*files.stages.values(), *files.shards.values(), *(n for each in files.layers.values() for n in each)):
        (folder / name).symlink_to(path.resolve() / name)
    number, like = max(files.layers), next(iter(files.layers.values()))
    further = [] if 1 in files.layers else [1]
    lack = len(files.stages) // files.slices + 2 - len(files.layers) - len(further)
    further += range(max(number, 1) + 1, max(number, 1) + 1 + lack)
    for each in further:
        for name in like:
            torch.save({}, folder / re.sub(r"^layer_\d+", f"layer_{each:02d}", name))


def _describe(file: Path, shared: list[str]) -> None:
    """Tells the converter in the file of the first stage which parameters other stages have, too."""
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_VERSION_KEY, UNIVERSAL_CHECKPOINT_VERSION_VALUE

    if not shared:
        return
    state = _load(file)
    info = dict(state.get(_INFO) or {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE})
    given = info.get(_TIED, [])
    info[_TIED] = [*given, *(f"{re.escape(name)}$" for name in shared if not any(re.match(p, name) for p in given))]
    fresh = file.with_name("described")
    torch.save({**state, _INFO: info}, fresh)
    fresh.replace(file)


def _run(work: Path, source: Path) -> None:
    """Runs DeepSpeed's converter. Names are relative: it takes those of its folders as patterns."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", "source", "--output_folder", "made"]
    done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise CheckpointError(
            f"DeepSpeed's converter cannot convert {source}: {''.join(told) or f'exit code {done.returncode}'}"
        )


def _check_made(made: Path, names: Iterable[str]) -> None:
    lost = [name for name in sorted(names) if not (made / "zero" / name / "fp32.pt").is_file()]
    if lost:
        raise CheckpointError(f"DeepSpeed's converter has left out {_some(lost)}: nothing is kept of what it has made")


def _load(file: Path) -> Any:
    """A file of DeepSpeed's. Tensors stay on the disk until they are used, unless the file is of torch's old format."""
    # DeepSpeed keeps objects of its own in them; its converter loads them in the same way.
    return torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file) or None, weights_only=False)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
