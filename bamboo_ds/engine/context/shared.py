"""What every part of the engine is given: one context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...config import BambooConfig, RedundancyMode
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


@dataclass(eq=False)
class EngineContext:
    """What the parts of one engine share.

    Attributes:
        ds: what they use of DeepSpeed's engine.
        job: this process's job.
        settings: the block.
        mode: what of ``redundancy.mode`` is possible with this layout.
        groups: process groups of roles.
        binding: the runtimes of this member's roles.
        epoch: plan, lanes and transport.
        progress: how far the job is.
        history: what it has done.
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
    beats: Beats = field(init=False)
    recording: Recording = field(init=False)

    def __post_init__(self) -> None:
        self.epoch = CurrentEpoch(self.job, self.layout, self.mode.eager_backward)
        self.progress = Progress(torch.initial_seed())
        self.history = History(self.layout.slices)
        self.beats = Beats(self.job.channel.activity, self.progress)
        ring, mode = self.job.channel.spans, self.settings.observe.timeline
        self.recording = Recording(self.ds, self.binding, self.progress, ring, mode)

    @property
    def layout(self) -> Layout:
        """The logical world."""
        return self.groups.layout

    @property
    def retains(self) -> bool:
        """Whether what crosses the boundaries of stages is kept until the commit: a takeover could need it."""
        return self.mode.replicas or self.layout.slices > 1


@dataclass(eq=False)
class InContext:
    """A part of the engine: it has what all parts share at hand, and gets the parts that it calls besides."""

    context: EngineContext

    @property
    def ds(self) -> DeepSpeedAdapter:
        return self.context.ds

    @property
    def job(self) -> Job:
        return self.context.job

    @property
    def settings(self) -> BambooConfig:
        return self.context.settings

    @property
    def mode(self) -> RedundancyMode:
        return self.context.mode

    @property
    def layout(self) -> Layout:
        return self.context.layout

    @property
    def groups(self) -> RoleGroups:
        return self.context.groups

    @property
    def binding(self) -> RuntimeBinding:
        return self.context.binding

    @property
    def epoch(self) -> CurrentEpoch:
        return self.context.epoch

    @property
    def progress(self) -> Progress:
        return self.context.progress

    @property
    def history(self) -> History:
        return self.context.history

    @property
    def beats(self) -> Beats:
        return self.context.beats

    @property
    def recording(self) -> Recording:
        return self.context.recording
