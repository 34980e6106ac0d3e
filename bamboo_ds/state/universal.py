"""Checkpoints and the numbers of stages and pipelines of the job that loads them.

DeepSpeed's files of a stage are those of its place, ``mp_rank_02`` and the like, and ZeRO's those of a stage and of a
pipeline. Other numbers need a universal checkpoint, in which the state is by parameter (:mod:`.converting`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ..topology.roles import Layout
from .checkpoints import CheckpointError, tag_in

#: What DeepSpeed adds to a tag, and the file that names the tag of the newest universal checkpoint.
SUFFIX, LATEST = "_universal", "latest_universal"
#: The setting of DeepSpeed's that loads one.
SETTING = '"checkpoint": {"load_universal": true}'

_STAGE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-(?:model_(\d+)-)?model_states\.pt")
_SHARD = re.compile(r"(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


@dataclass(frozen=True)
class Files:
    """DeepSpeed's files of one checkpoint of a pipeline, by name.

    Attributes:
        stages: by stage times the number of tensor slices, plus slice.
        layers: by number of the layer, a file for each slice.
        shards: ZeRO's, by number of the data-parallel copy and by that of the file in ``stages``.
    """

    stages: dict[int, str]
    layers: dict[int, tuple[str, ...]]
    shards: dict[tuple[int, int], str]

    @classmethod
    def of(cls, names: Collection[str]) -> Files:
        """The files of a checkpoint among ``names``."""
        stages, layers, shards = {}, dict[int, tuple[str, ...]](), {}
        for name in sorted(names):
            if found := _STAGE.fullmatch(name):
                stages[int(found[1])] = name
            elif found := _LAYER.fullmatch(name):
                layers[int(found[1])] = (*layers.get(int(found[1]), ()), name)
            elif found := _SHARD.fullmatch(name):
                shards[int(found[1]), int(found[2])] = name
        return cls(stages, layers, shards)

    @classmethod
    def in_folder(cls, checkpoint: Path) -> Files:
        """The files of the checkpoint ``checkpoint``; none if there is no such folder."""
        return cls.of([path.name for path in checkpoint.iterdir()] if checkpoint.is_dir() else [])

    @property
    def slices(self) -> int:
        """Tensor slices that layers are cut into."""
        return max(map(len, self.layers.values()), default=1)

    @property
    def copies(self) -> int:
        """Data-parallel copies of the model that ZeRO has sharded the optimizer's state over; 0: it has not."""
        return len({copy for copy, _ in self.shards})

    @property
    def missing(self) -> list[str]:
        """Kinds of files of which some are missing: they are numbered without gaps."""
        gaps = []
        if sorted(self.stages) != list(range(len(self.stages))) or len(self.stages) % self.slices:
            gaps.append(f"mp_rank_*: {sorted(self.stages)}")
        grid = {(copy, stage) for copy in range(self.copies) for stage in self.stages}
        if self.shards and set(self.shards) != grid:
            gaps.append(f"*_optim_states.pt: {sorted(self.shards)}")
        return gaps

    def __str__(self) -> str:
        copies = f" x {counted(self.copies, 'pipeline')}" if self.copies else ""
        slices = f" of {counted(self.slices, 'slice')}" if self.slices > 1 else ""
        return counted(len(self.stages) // self.slices, "stage") + slices + copies


def counted(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number} {noun}" + ("s" if number != 1 else "")


def is_universal(checkpoint: Path) -> bool:
    """Whether ``checkpoint`` is the folder of a universal checkpoint."""
    return (checkpoint / "zero" / "optimizer_state.pt").is_file()


@dataclass(frozen=True)
class Loading:
    """The way in which a job loads a checkpoint.

    Attributes:
        universal: whether ``checkpoint.load_universal`` is set.
        zero: whether its optimizer is ZeRO's, which takes no state from checkpoints without.
        state: whether the optimizer's state is loaded, too; the weights of layers fit any stages.
    """

    universal: bool
    zero: bool
    state: bool = True


def check_loadable(folder: str, tag: str | None, layout: Layout, how: Loading) -> None:
    """Refuses a checkpoint that DeepSpeed would load wrongly, or would fail to load without saying what to do.

    Args:
        folder, tag: as ``load_checkpoint``'s.
        layout: of the job.
        how: it loads.

    Raises:
        CheckpointError: it is one for other numbers of stages or pipelines, or of the other kind. Says what to do.
    """
    root = Path(folder)
    name = tag or tag_in(root / (LATEST if how.universal else "latest"))
    path = root / name
    convert = f"bamboo checkpoints convert {shlex.quote(str(folder))}{f' --tag {tag}' if tag else ''} --into FOLDER"
    if how.universal:
        _check_universal(root, path if name else None, convert)
        return
    if not name:
        return  # DeepSpeed loads nothing, and says so
    if is_universal(path):
        raise CheckpointError(f"{path} is a universal checkpoint: the configuration must say {SETTING} to load it")
    files = Files.in_folder(path)
    stages_fit = len(files.stages) in (0, layout.stages * layout.slices)
    # Where one of the two is without ZeRO, DeepSpeed loads the weights, or says what it lacks.
    if not how.state or how.zero != bool(files.shards) or (stages_fit and files.copies in (0, layout.copies)):
        return
    here = f"{counted(layout.stages, 'stage')} x {counted(layout.copies, 'pipeline')}"
    if not files.shards:
        raise CheckpointError(
            f"{path} is of a job of {files}, and this one has {here}. Without ZeRO DeepSpeed cannot convert a "
            f"checkpoint: go on with the stages it has, or load its weights alone (load_module_only=True)"
        )
    raise CheckpointError(
        f"{path} is of a job of {files}, and this one has {here}: convert it with\n  {convert}\nand load it from "
        f"FOLDER with {SETTING} in the configuration, or start with the numbers it has"
    )


def _check_universal(root: Path, path: Path | None, convert: str) -> None:
    """Refuses what is no universal checkpoint."""
    if path is not None and (is_universal(path) or not path.is_dir()):
        return  # where there is none, DeepSpeed says so
    ordinary = tag_in(root / "latest") if path is None else path.name
    if ordinary:
        raise CheckpointError(
            f"the configuration says {SETTING}, but {path or root / ordinary} is no universal checkpoint: leave that "
            f"line out to load it with the stages and pipelines it has, or make a universal one of it with\n  {convert}"
        )
