"""The part that all events have in common."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_serializer

SCHEMA = 1

Role = tuple[int, int]
"""A role as ``[pipeline, stage]``."""


def _utc(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("time needs a zone: end it with Z")
    return value.astimezone(timezone.utc)


Utc = Annotated[datetime, AfterValidator(_utc)]
"""A time with a zone, in UTC."""

GLOBAL_STEP: Any = Field(
    default=None, description="`step` as DeepSpeed counts, from a loaded checkpoint on; null where unknown"
)


OF_THE_JOB: Any = Field(default=False, description="whether the job has taken it without the script's doing")


class Consumed(BaseModel):
    """The consumption of a committed step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int = Field(ge=1, description="number of the step")
    global_step: int = Field(ge=0, description="the same as DeepSpeed counts")
    checksum: str = Field(
        pattern="^[0-9a-f]{8}$",
        description="CRC-32 over those of the micro-batches: for each pipeline of its inputs, then of its labels",
    )
    samples: tuple[int, int] | None = Field(
        default=None,
        description="[first sample, the one behind the last], counted over all passes over `training_data`; null where "
        "batches come from iterators",
    )


class EventBase(BaseModel):
    """The fields of every event. Unknown fields are refused when reading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, ser_json_inf_nan="strings", allow_inf_nan=True
    )

    schema_: Literal[1] = Field(default=1, alias="schema", description="version of these kinds and fields")
    event: str = Field(description="the kind")
    job: str = Field(description="name of the job")
    time: Utc = Field(
        default_factory=lambda: datetime.now(timezone.utc),
        description="when emitted: UTC, ISO 8601, microseconds, Z",
    )
    member: str | None = Field(default=None, description="member that emitted it; null for the launcher")
    epoch: int = Field(ge=0, description="epoch that the emitter was in; 0 before the first plan")

    @field_serializer("time")
    def _zulu(self, value: datetime) -> str:
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")

    def to_json(self) -> str:
        """One line of JSON, without the newline."""
        return self.model_dump_json(by_alias=True)
