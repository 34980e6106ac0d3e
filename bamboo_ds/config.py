"""The ``"bamboo"`` block of ``ds_config.json``.

The models follow DeepSpeed's own: pydantic, one class per sub-block. Unknown keys are refused with the
nearest known key named, so that a typing error never silently turns a safeguard off.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ConfigError

#: Name of the block in DeepSpeed's configuration.
BLOCK = "bamboo"


class RedundancyMode(str, Enum):
    """What a shadow computes ahead of a loss (the paper's three modes, and none at all)."""

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
        """Whether redundant forward passes run before a loss."""
        return self in (RedundancyMode.EAGER_FORWARD, RedundancyMode.EAGER)

    @property
    def eager_backward(self) -> bool:
        """Whether redundant backward passes run before a loss."""
        return self is RedundancyMode.EAGER


class Placement(str, Enum):
    """Where redundant forward passes go."""

    #: Only into measured idle time: a receive that is expected to wait long enough.
    IDLE = "idle"
    #: One before every ``RecvGrad``, whatever that costs; as the research code does, for comparison.
    FIXED = "fixed"


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RedundancyConfig(_Block):
    """``bamboo.redundancy``"""

    mode: RedundancyMode = Field(
        RedundancyMode.EAGER_FORWARD,
        description="`none`, `lazy-frc-lazy-brc`, `eager-frc-lazy-brc` or `eager-frc-eager-brc`",
    )
    placement: Placement = Field(
        Placement.IDLE, description="`idle`: only in measured idle time; `fixed`: before every RecvGrad"
    )
    memory_budget_mb: float | None = Field(
        None,
        gt=0,
        description="bound in MiB on what redundant forward passes keep for a later backward; `null`: none",
    )
    verify_every: int = Field(
        100, ge=0, description="compare checksums of owner and replica every so many steps; 0: never"
    )


class MembershipConfig(_Block):
    """``bamboo.membership``"""

    lease_ttl_s: int = Field(5, ge=2, description="seconds without a sign of life until a silent node is lost")
    heartbeat_timeout_s: float | None = Field(
        None, gt=0, description="seconds until a worker without heartbeat is killed; `null`: `lease_ttl_s`"
    )
    settle_ms: int = Field(
        20, ge=0, description="milliseconds that the leader waits for companions of a loss before it plans"
    )


class RecoveryConfig(_Block):
    """``bamboo.recovery``"""

    plan_timeout_s: float = Field(
        120.0, gt=0, description="seconds that a worker waits for a new plan or for its peers in a recovery"
    )
    suspect_after_s: float = Field(
        0.5, gt=0, description="seconds after a failed operation until the unreachable member is accused"
    )


class TopologyConfig(_Block):
    """``bamboo.topology``"""

    transfer_mb_per_s: float | None = Field(
        500.0, gt=0, description="bound in MB/s on what a member sends of its state to new replicas; `null`: none"
    )


class BambooConfig(_Block):
    """The whole ``"bamboo"`` block; ``{}`` switches everything on with its defaults."""

    enabled: bool = Field(True, description="`false` is the same as no block")
    redundancy: RedundancyConfig = Field(default_factory=lambda: RedundancyConfig())
    membership: MembershipConfig = Field(default_factory=lambda: MembershipConfig())
    topology: TopologyConfig = Field(default_factory=lambda: TopologyConfig())
    recovery: RecoveryConfig = Field(default_factory=lambda: RecoveryConfig())


def _model_at(path: Sequence[Any]) -> type[BaseModel]:
    """The model that validates the keys found at ``path`` inside the block."""
    model: type[BaseModel] = BambooConfig
    for name in path:
        annotation = model.model_fields[name].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return model


def _explain(error: ValidationError) -> str:
    """One line per wrong setting: its full name, what was found, and what to do."""
    lines = []
    for item in error.errors(include_url=False):
        path = item["loc"]
        name = ".".join([BLOCK, *map(str, path)])
        if item["type"] == "extra_forbidden":
            known = list(_model_at(path[:-1]).model_fields)
            near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
            cure = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
            lines.append(f'"{name}" is not a setting; {cure}')
        else:
            lines.append(f'"{name}" is {item["input"]!r}: {item["msg"]}')
    return "; ".join(lines)


def parse_block(block: Any) -> BambooConfig:
    """Validate a ``"bamboo"`` block.

    Raises:
        ConfigError: names every wrong setting and its cure.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{BLOCK}" is {block!r}: it must be an object, for example {{"{BLOCK}": {{}}}}')
    try:
        return BambooConfig.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def load_config(config: Any) -> Mapping[str, Any]:
    """DeepSpeed's configuration as a mapping, from a mapping or the path of a JSON file.

    Raises:
        ConfigError: the file cannot be read or is not a JSON object.
    """
    if isinstance(config, Mapping):
        return config
    path = Path(os.fspath(config))
    try:
        loaded = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"DeepSpeed configuration {path} does not exist; check --deepspeed_config") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"DeepSpeed configuration {path} is not valid JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"DeepSpeed configuration {path} must hold a JSON object, not {type(loaded).__name__}")
    return loaded


def bamboo_config(config: Any) -> BambooConfig | None:
    """The parsed block of a DeepSpeed configuration; ``None`` without a block or with it disabled."""
    loaded = load_config(config)
    if BLOCK not in loaded:
        return None
    parsed = parse_block(loaded[BLOCK])
    return parsed if parsed.enabled else None


def config_path_from_argv(argv: Sequence[str] | None = None) -> str | None:
    """The value of ``--deepspeed_config`` on a command line, in either spelling."""
    arguments = list(sys.argv if argv is None else argv)
    for option in ("--deepspeed_config", "--deepspeed-config"):
        for position, argument in enumerate(arguments):
            if argument == option and position + 1 < len(arguments):
                return arguments[position + 1]
            if argument.startswith(option + "="):
                return argument.partition("=")[2]
    return None


def settings_markdown() -> str:
    """The table of settings and defaults for the README, made from the models."""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            annotation = field.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                walk(annotation, f"{prefix}{name}.")
                continue
            default = field.default.value if isinstance(field.default, Enum) else field.default
            rows.append(f"| `{prefix}{name}` | `{json.dumps(default)}` | {field.description} |")

    walk(BambooConfig, "")
    return "\n".join(rows)
