"""The ``"bamboo"`` block of ``ds_config.json``.

The models follow DeepSpeed's own: pydantic, one class per sub-block. Unknown keys are refused with the
nearest known key named, so that a typing error never silently turns a safeguard off.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from .addresses import check_url as check_url
from .addresses import split_address, without_credentials
from .config_parts import CheckpointConfig as CheckpointConfig
from .config_parts import ConfigPart
from .config_parts import RedundancyMode as RedundancyMode
from .config_parts import StandbyConfig as StandbyConfig
from .deepspeed_config import config_path_from_argv as config_path_from_argv
from .deepspeed_config import load_config as load_config
from .errors import ConfigError

#: Name of the block in DeepSpeed's configuration.
BLOCK = "bamboo"
#: Seconds that cold file systems take to load libraries, at least.
START_TIMEOUT_S = 60.0


class RedundancyConfig(ConfigPart):
    """``bamboo.redundancy``"""

    mode: RedundancyMode = Field(
        RedundancyMode.AUTO,
        description="redundant work before a loss, one of [these modes](../concepts.md#redundant-computation)",
    )
    memory_budget_mb: float | None = Field(
        None,
        gt=0,
        description="limit in MiB for what redundant forward passes keep for a later backward; `null`: half of "
        "the device's free memory, divided by the members on it; none in host memory",
    )
    sync_every: Literal["auto"] | NonNegativeInt = Field(
        "auto",
        description="micro-batches between two [sums](../concepts.md#sums) that a stage sends to its shadow; 0: "
        "never; `auto`: as few as 30 % of the network's time and 3 % of the passes' allow; "
        "where members compute on processors, 3 % of either",
    )
    park: bool = Field(
        True,
        description="whether replicas that compute nothing wait in host memory, see "
        "[Memory](../guides/even-shares.md#memory)",
    )
    verify_every: int = Field(
        100, ge=0, description="steps between two comparisons of the checksums of owner and replica; 0: never"
    )
    on_mismatch: Literal["stop", "warn", "evict"] = Field(
        "stop",
        description="consequence of a second difference of a replica: `stop` ends the job; `warn`: the stage "
        "stays without replica until the plan changes; `evict`: with several pipelines and without "
        "ZeRO a member is [lost](../guides/exactness.md#a-member-with-wrong-state) whose copy "
        "differs from most others, else `stop`. Where owner and shadow of a stage with running "
        "statistics or the like are lost, with `warn` the stage goes on with another pipeline's, "
        "else the loss is fatal",
    )
    check_exact: int | None = Field(
        None,
        ge=0,
        description="number of first steps in which the takeover of every stage is rehearsed and compared bit "
        "for bit, see [Checking exactness](../guides/exactness.md); 0: none; `null`: 3, and 0 "
        "without replicas",
    )

    @property
    def bears(self) -> bool:
        """Whether a difference ends nothing."""
        return self.on_mismatch == "warn"

    @property
    def parks(self) -> bool:
        """Whether replicas may be parked: they need not compute unless their stage is lost or divided."""
        return self.park and self.mode in (RedundancyMode.AUTO, RedundancyMode.LAZY)

    def steps_to_check(self) -> int:
        """The number of steps that are checked.

        Raises:
            ConfigError: there are no replicas, and a check is asked for.
        """
        if self.check_exact and not self.mode.replicas:
            raise ConfigError(
                f'"{BLOCK}.redundancy.check_exact" (--check-exact, BAMBOO_CHECK_EXACT) is {self.check_exact}, and '
                f'"{BLOCK}.redundancy.mode" is "{self.mode.value}": there are no replicas to check; choose another mode'
            )
        if self.check_exact is not None or not self.mode.replicas:
            return self.check_exact or 0
        return 3


class MembershipConfig(ConfigPart):
    """``bamboo.membership``"""

    lease_ttl_s: float = Field(5, ge=1, description="seconds without a sign of life until a silent node is lost")
    heartbeat_timeout_s: float | None = Field(
        None, gt=0, description="seconds until a worker without heartbeat is killed; `null`: `lease_ttl_s`"
    )
    start_timeout_s: float | None = Field(
        None,
        gt=0,
        description="the same before a worker's first step, while it loads libraries; `null`: 60, or "
        "`heartbeat_timeout_s` if that is set. A number also bounds the time until `init_distributed`",
    )
    hang_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds until a computing worker without progress is killed; `null`: ten times its longest "
        "instruction, at least 300 s, from the second iteration on",
    )
    fence_s: float | None = Field(
        120.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds without etcd after which a worker commits nothing until it is back; at least twice "
        "`lease_ttl_s`. A restart waits longer, unless it is known that a worker of the last plan has ended; `null`: "
        "workers never pause, and a restart needs that knowledge",
    )
    rejoin_s: float = Field(
        600.0,
        ge=0,
        allow_inf_nan=False,
        description="seconds for which a member that was evicted tries to come back (0: it does not), and one that "
        "waits for a restart, or has paused, bears that etcd does not answer",
    )
    settle_ms: float = Field(
        0,
        ge=0,
        description="milliseconds that the leader waits for companions of a loss before it plans (0: those that come "
        "while it writes a plan are in the next one)",
    )

    @property
    def heartbeat_limit_s(self) -> float:
        """Seconds without a heartbeat after which a worker is killed."""
        return self.heartbeat_timeout_s or float(self.lease_ttl_s)

    @property
    def start_limit_s(self) -> float:
        """The same before its first step, if that is longer."""
        return self.start_timeout_s or (0.0 if self.heartbeat_timeout_s else START_TIMEOUT_S)


class CommConfig(ConfigPart):
    """``bamboo.comm``"""

    cuda_backend: Literal["nccl", "gloo"] = Field(
        "nccl",
        description="backend of reductions on GPUs and of a script's collectives of their tensors: `gloo` takes "
        "them through host memory, for several workers on one GPU, which NCCL refuses. All other "
        "data goes through host memory and TCP with either",
    )


class RecoveryConfig(ConfigPart):
    """``bamboo.recovery``"""

    plan_timeout_s: float = Field(
        120.0, gt=0, description="seconds that a worker waits for a new plan or for its peers in a recovery"
    )
    suspect_after_s: float = Field(
        0.5, gt=0, description="seconds after a failed operation until the unreachable member is accused"
    )
    max_restarts: int = Field(
        10,
        ge=0,
        description="restarts from a checkpoint in a row that do not get beyond the newest step until the job is given "
        "up; 0: a fatal loss ends the job",
    )
    min_members: int = Field(
        1, ge=1, description="members that a restart needs; with fewer it waits for others that join"
    )
    on_exception: Literal["stop", "takeover"] = Field(
        "stop",
        description="consequence of a worker's own failure, by an exception or an exit code: `stop` ends the "
        "job; `takeover`: the worker is lost like any other, unless the step fails again",
    )


class TopologyConfig(ConfigPart):
    """``bamboo.topology``"""

    blocks: Literal["auto"] | PositiveInt = Field(
        "auto",
        description="blocks that a stage may be divided into, so that members with less to do compute some of a "
        'neighbour\'s: at most so many, or `"auto"`: one for each layer, up to 16. 1: stages are computed whole',
    )

    transfer_mb_per_s: float | None = Field(
        500.0, gt=0, description="bound in MB/s on what a member sends of its state to new replicas; `null`: none"
    )
    memory_limit_mb: float | None = Field(
        None,
        gt=0,
        description="MiB of stages that a member may hold: state of those that it owns and shadows, and what their "
        "passes keep. Replicas are given up for it, see [Even shares](../guides/even-shares.md#memory). `null`: on "
        "devices their memory divided by the members on them, less a tenth and what scripts hold besides; in host "
        "memory any number",
    )
    min_gain: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="share of the iteration time, that of the member with most to do, that a stage's move or new "
        "division for speed must win",
    )

    zones_apart: bool = Field(
        True,
        description="whether shadows are in other zones than their owners (`--zone`), so that the loss of a zone "
        "is not fatal: with one pipeline, or with ZeRO, where no member has to hold more for it. It "
        "sends gradients from zone to zone",
    )

    @property
    def memory_limit(self) -> int | None:
        """``memory_limit_mb`` in bytes."""
        return None if self.memory_limit_mb is None else round(self.memory_limit_mb * 2**20)


class ObserveConfig(ConfigPart):
    """``bamboo.observe``"""

    checksums: bool = Field(
        False,
        description="whether every batch gets a checksum, by which `bamboo goodput` "
        "[verifies](goodput.md#samples) that each sample was consumed once",
    )
    http: str | None = Field(
        None,
        description="`HOST:PORT` at which the member that leads serves the [page and metrics]"
        "(../guides/observing.md) of the job, and nowhere else; without `HOST` at its own address, which suits several "
        "hosts; port 0: any. `null`: no page",
    )
    control: bool = Field(False, description="whether the page may also end the job and ask members to leave")
    timeline: Literal["losses", "all", "off"] = Field(
        "losses",
        description="instructions of workers that are [kept](../guides/timelines.md#what-is-recorded) for "
        "`bamboo trace` and `bamboo plot`: `losses`: those around each loss and each change of plan; "
        "`all`; `off`: none",
    )

    @field_validator("http")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            split_address(value)
        return value


SourceName = Literal["aws", "gcp", "azure", "file", "http", "nvml"]
SOURCE_NAMES: tuple[str, ...] = get_args(SourceName)


class NoticesConfig(ConfigPart):
    """``bamboo.notices``"""

    sources: tuple[SourceName, ...] = Field(
        (),
        description="sources of the news that a node is about to vanish, or that its device fails: any of "
        + ", ".join(f"`{name}`" for name in SOURCE_NAMES),
    )
    poll_s: float = Field(1.0, gt=0, allow_inf_nan=False, description="seconds between two questions to a source")
    file: str | None = Field(
        None,
        validate_default=True,
        description="source `file`: this path's existence is a notice; its contents may be JSON with `deadline_s`"
        " and `detail`; `{slot}` and `{member}` are replaced",
    )
    url: str | None = Field(
        None,
        validate_default=True,
        description="source `http`: asked by GET; 200 with JSON is a notice, 204 and 404 are none; `{slot}` and"
        " `{member}` are replaced",
    )

    @field_validator("sources")
    @classmethod
    def _once_each(cls, sources: tuple[SourceName, ...]) -> tuple[SourceName, ...]:
        twice = sorted({name for name in sources if sources.count(name) > 1})
        if twice:
            raise ValueError(f"list {', '.join(twice)} once only")
        return sources

    @field_validator("file", "url")
    @classmethod
    def _with_its_source(cls, value: str | None, info: ValidationInfo) -> str | None:
        if "sources" not in info.data:
            return value  # they have an error of their own
        source = "file" if info.field_name == "file" else "http"
        wanted = source in info.data["sources"]
        if wanted and not value:
            raise ValueError(
                f'"bamboo.notices.sources" lists "{source}", so "bamboo.notices.{info.field_name}" is needed'
            )
        if not wanted and value is not None:
            raise ValueError(f'nobody would ask it: add "{source}" to "bamboo.notices.sources"')
        return value

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value:
            check_url(value)
        return value


class BambooConfig(ConfigPart):
    """The whole ``"bamboo"`` block; ``{}`` switches everything on with its defaults."""

    enabled: bool = Field(True, description="`false` is the same as no block")
    redundancy: RedundancyConfig = Field(default_factory=lambda: RedundancyConfig())
    membership: MembershipConfig = Field(default_factory=lambda: MembershipConfig())
    standby: StandbyConfig = Field(default_factory=lambda: StandbyConfig())
    topology: TopologyConfig = Field(default_factory=lambda: TopologyConfig())
    recovery: RecoveryConfig = Field(default_factory=lambda: RecoveryConfig())
    comm: CommConfig = Field(default_factory=lambda: CommConfig())
    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig())
    notices: NoticesConfig = Field(default_factory=lambda: NoticesConfig())
    observe: ObserveConfig = Field(default_factory=lambda: ObserveConfig())

    @property
    def fence_s(self) -> float | None:
        """``membership.fence_s``; ``None``, too, where no restart can follow a fatal loss."""
        return self.membership.fence_s if self.recovery.max_restarts else None

    def overridden(self, overrides: Mapping[str, Any]) -> BambooConfig:
        """This block with other values at some paths, such as ``membership.lease_ttl_s``. They are not validated."""
        block = self
        for path, value in overrides.items():
            part, name = path.split(".")
            block = block.model_copy(update={part: getattr(block, part).model_copy(update={name: value})})
        return block


def _known_at(path: Sequence[Any]) -> list[str]:
    """The keys that there are at ``path`` inside the block."""
    model: Any = BambooConfig
    for name in path:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def _explain(error: ValidationError) -> str:
    """One line per wrong setting: its full name, what was found, and what to do."""
    lines = []
    for item in error.errors(include_url=False):
        path = item["loc"]
        if item["type"] != "extra_forbidden":  # of a setting of several kinds pydantic names the kind, too
            path = tuple(each for each in path if not isinstance(each, str) or each.isidentifier())
        name = ".".join([BLOCK, *map(str, path)])
        if item["type"] == "extra_forbidden":
            known = _known_at(path[:-1])
            near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
            cure = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(known)}"
            lines.append(f'"{name}" is not a setting; {cure}')
        else:
            found = item["input"]
            shown = without_credentials(found) if isinstance(found, str) else found
            lines.append(f'"{name}" is {shown!r}: {item["msg"]}')
    return "; ".join(lines)


def parse_block(block: Any) -> BambooConfig:
    """Validates a ``"bamboo"`` block.

    Raises:
        ConfigError: names every wrong setting and its cure.
    """
    if not isinstance(block, Mapping):
        raise ConfigError(f'"{BLOCK}" is {block!r}: it must be an object, for example {{"{BLOCK}": {{}}}}')
    try:
        return BambooConfig.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from error


def bamboo_config(config: Any) -> BambooConfig | None:
    """The parsed block of a DeepSpeed configuration; ``None`` without a block or with it disabled."""
    loaded = load_config(config)
    if BLOCK not in loaded:
        return None
    parsed = parse_block(loaded[BLOCK])
    return parsed if parsed.enabled else None


def has_block(config: Any) -> bool:
    """Whether a configuration has the block; false also for one that cannot be read, which DeepSpeed will tell of."""
    try:
        return BLOCK in load_config(config)
    except ConfigError:
        return False
