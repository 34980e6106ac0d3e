"""The context that every part of the engine is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ...config import BambooConfig, RedundancyMode
from ...state.locations import Places
from ...topology import Layout
from ..stage.deepspeed_adapter import DeepSpeedAdapter
from ..stage.groups import RoleGroups
from ..stage.runtime import RuntimeBinding
from .beats import Beats
from .history import History
from .recording import Recording
from .records import CurrentEpoch, Progress

if TYPE_CHECKING:
    from ...worker.job import Job

_T = TypeVar("_T")


@dataclass(eq=False)
class EngineContext:
    """The state that the parts of one engine share.

    Attributes:
        ds: what they use of DeepSpeed's engine.
        job: this process's job.
        settings: the block.
        mode: what of ``redundancy.mode`` is possible with this layout.
        groups: process groups of roles.
        binding: the runtimes of this member's roles.
        epoch: plan, channels and agreement.
        progress: that of the job.
        history: what it has done.
        places: of checkpoints.
        beats, recording: what the main thread tells of its work.
    """

    ds: DeepSpeedAdapter
    job: Job
    settings: BambooConfig
    mode: RedundancyMode
    groups: RoleGroups
    binding: RuntimeBinding
    epoch: CurrentEpoch = field(init=False)
    progress: Progress = field(init=False)
    history: History = field(init=False)
    places: Places = field(init=False)
    beats: Beats = field(init=False)
    recording: Recording = field(init=False)

    def __post_init__(self) -> None:
        self.epoch = CurrentEpoch(self.job, self.layout, self.mode.eager_backward, self.ds.device)
        self.progress = Progress(torch.initial_seed())
        self.history = History(self.layout.slices)
        self.places = Places(self.settings.checkpoint.mirror)
        self.beats = Beats(self.job.channel.activity, self.progress)
        spans, mode = self.job.channel.spans, self.settings.observe.timeline
        self.recording = Recording(self.ds, self.binding, self.progress, spans, mode)

    @property
    def layout(self) -> Layout:
        """The logical world."""
        return self.groups.layout

    @property
    def retains(self) -> bool:
        """Whether what crosses the boundaries of stages is kept until the commit: a takeover could need it."""
        return self.mode.replicas or self.layout.alike or self.layout.slices > 1


class _Shared(Generic[_T]):
    """The context's attribute of the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, part: InContext, owner: type) -> _T:
        return getattr(part.context, self._name)


@dataclass(eq=False)
class InContext:
    """A part of the engine: it has what all parts share at hand, and gets the parts that it calls besides."""

    context: EngineContext

    ds = _Shared[DeepSpeedAdapter]()
    job = _Shared["Job"]()
    settings = _Shared[BambooConfig]()
    mode = _Shared[RedundancyMode]()
    layout = _Shared[Layout]()
    groups = _Shared[RoleGroups]()
    binding = _Shared[RuntimeBinding]()
    epoch = _Shared[CurrentEpoch]()
    progress = _Shared[Progress]()
    history = _Shared[History]()
    places = _Shared[Places]()
    beats = _Shared[Beats]()
    recording = _Shared[Recording]()
