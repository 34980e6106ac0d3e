"""Parts of the ``"bamboo"`` block (:mod:`bamboo_ds.config`): the modes of redundancy, checkpoints, standbys."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from .addresses import check_storage_url, is_url


class RedundancyMode(str, Enum):
    """Redundant work ahead of a loss (the paper's three modes, one that chooses between two of them, and none)."""

    AUTO = "auto"
    NONE = "none"
    LAZY = "lazy-frc-lazy-brc"
    EAGER_FORWARD = "eager-frc-lazy-brc"
    EAGER = "eager-frc-eager-brc"

    @property
    def replicas(self) -> bool:
        """Whether roles have replicas at all."""
        return self is not RedundancyMode.NONE

    @property
    def eager_forward(self) -> bool:
        """Whether redundant forward passes run before a loss; with ``AUTO`` where there is room for them."""
        return self in (RedundancyMode.AUTO, RedundancyMode.EAGER_FORWARD, RedundancyMode.EAGER)

    @property
    def eager_backward(self) -> bool:
        """Whether redundant backward passes run before a loss."""
        return self is RedundancyMode.EAGER


class ConfigPart(BaseModel):
    """A part of the block: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class CheckpointConfig(ConfigPart):
    """``bamboo.checkpoint``"""

    keep: int = Field(
        0, ge=0, description="how many of the newest checkpoints that the job wrote are kept in a folder; 0: all"
    )
    asynchronous: bool = Field(
        False,
        description="`save_checkpoint` returns after a copy to host memory, and training goes on while the checkpoint "
        "is written: older ones must stay until it is complete; `false`: it returns when the checkpoint is complete",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="seconds without any progress in its folder until a save has failed"
    )
    every_s: Literal["auto"] | float = Field(
        "auto",
        description="seconds between two checkpoints [of the job's own](../guides/checkpoints.md#the-jobs-own), which "
        'it takes without the script; `"auto"`: as is best for the losses that it sees, at least 60; 0: none',
    )
    dir: str | None = Field(
        None,
        description="where these are kept: a folder on a file system that all members share, or the URL of a [store of "
        "objects](../guides/checkpoints.md#object-storage), such as `s3://bucket/prefix`; `null`: `mirror`, or else "
        "where the script saves, from its first `save_checkpoint` on",
    )

    mirror: str | None = Field(
        None,
        description="URL of a [store of objects](../guides/checkpoints.md#a-mirror) to which the script's checkpoints "
        "are uploaded, and from which hosts fetch those that they lack: then the script's folder need not be shared; "
        "`null`: none",
    )

    @field_validator("every_s", mode="before")
    @classmethod
    def _is_an_interval(cls, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value != "auto" and not (number and math.isfinite(value) and value >= 0):
            raise ValueError('it must be "auto", a number of seconds, or 0 for no checkpoints of the job\'s own')
        return value

    @field_validator("dir")
    @classmethod
    def _is_a_folder(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("it must be the path of a folder that all members share, the URL of a store, or null")
        return check_storage_url(value) if value is not None and is_url(value) else value

    @field_validator("mirror")
    @classmethod
    def _is_a_store(cls, value: str | None) -> str | None:
        if value is not None and not is_url(value):
            raise ValueError("it must be the URL of a store of objects, such as s3://bucket/prefix, or null")
        return None if value is None else check_storage_url(value)

    @property
    def stores(self) -> dict[str, str]:
        """URLs of stores of objects, by the full names of the settings that name them."""
        named = {"dir": self.dir, "mirror": self.mirror}
        return {f"bamboo.checkpoint.{name}": url for name, url in named.items() if url is not None and is_url(url)}

    @property
    def lacks_place(self) -> bool:
        """Whether an interval is asked for, and the job has a place only once the script saves."""
        return self.every_s != "auto" and self.every_s > 0 and self.dir is None and self.mirror is None


class StandbyConfig(ConfigPart):
    """``bamboo.standby``"""

    replicas: bool = Field(
        False, description="whether members without a stage hold replicas, so that a takeover goes to one of them"
    )
