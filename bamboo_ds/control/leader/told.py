"""What a leader tells of losses in the terminal of another launcher, where no launcher of ours tells the story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ...observe.events import Event
from ...observe.story import Story
from ...variables import ENV_LAUNCH
from ..settings import AgentSettings


def told_here(settings: AgentSettings, environ: Mapping[str, str]) -> bool:
    """Whether a leader with these settings is the one to tell: the job has neither ``bamboo run`` nor ``launch``."""
    return settings.launched and ENV_LAUNCH not in environ


def loss_line(events: Iterable[Event]) -> str:
    """A loss as one line.

    Args:
        events: members and the plan before the loss, the members that are lost, and the plan without them.
    """
    story = Story()
    for event in events:
        story.tell(event)
    return "; ".join(line.text for line in story.end())
