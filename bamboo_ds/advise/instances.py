"""Instance types: what they cost, and what their devices are. A node has one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import ConfigError
from ..simulate.market import CLIMATES


class Instance(BaseModel):
    """An instance type."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    spot: float = Field(gt=0, description="$ per hour of a spot instance")
    on_demand: float = Field(gt=0, description="$ per hour on demand")
    memory_gib: float | None = Field(None, gt=0, description="of its device; null: the profile's")
    speed: float = Field(1.0, gt=0, description="times as fast as the profile's device")
    network_gb_s: float | None = Field(None, gt=0, description="GB/s of its network; null: that of the options")
    trace: str | None = Field(None, description="file with its nodes, in place of those of the options")
    climate: str | None = Field(None, description="the same, drawn")
    rate: float | None = Field(None, ge=0, description="share of its nodes that is lost in an hour")
    nodes: int | None = Field(None, ge=1, description="nodes that are wanted, where they are drawn")
    source: str = Field("", description="where prices and speed come from")

    def replaces(self, option: str) -> bool:
        """Whether a value for the market, by the name of its option without the dashes, means nothing for this type."""
        if self.trace is not None:
            return True
        if option in ("trace", "climate"):
            return self.climate is not None
        return option in ("rate", "nodes") and getattr(self, option) is not None


#: By the names that an option has for them.
_KEYS = {name.replace("_", "-"): name for name in Instance.model_fields if name not in ("name", "source")}


def of_option(text: str) -> Instance:
    """The instance type of ``NAME,spot=…,on-demand=…[,memory-gib=…][,speed=…]…``.

    Raises:
        ConfigError: names what is wrong with it.
    """
    name, *settings = text.split(",")
    values: dict[str, Any] = {"name": name.strip()}
    for setting in settings:
        key, equals, value = (part.strip() for part in setting.partition("="))
        if key not in _KEYS or not equals:
            raise ConfigError(f"--instance {text!r}: {setting.strip()!r} is none of {', '.join(_KEYS)} with a value")
        values[_KEYS[key]] = value
    return _validated(values, f"--instance {text!r}")


def of_file(path: Path) -> list[Instance]:
    """The instance types in a file: a list of objects in JSON, which may have comments.

    Raises:
        ConfigError: names what is wrong with it.
    """
    import hjson  # here: not every start needs it

    try:
        loaded = hjson.loads(path.read_text())
    except (OSError, ValueError, IndexError) as error:  # hjson raises the last two
        raise ConfigError(f"--instances {path} cannot be read: {error}") from error
    if not isinstance(loaded, Sequence) or isinstance(loaded, str) or not loaded:
        raise ConfigError(f"--instances {path}: write a list of objects, each with name, spot and on_demand")
    return [_validated(each, f"--instances {path}, number {number}") for number, each in enumerate(loaded, 1)]


def _validated(values: Any, where: str) -> Instance:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: write an object with name, spot and on_demand")
    try:
        found = Instance.model_validate(dict(values))
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        )
        raise ConfigError(f"{where}: {'; '.join(faults)}") from error
    if found.trace is not None and (found.climate, found.rate, found.nodes) != (None, None, None):
        raise ConfigError(f"{where}: a trace has its own nodes: leave out climate, rate and nodes, or the trace")
    if found.climate is not None and found.climate not in CLIMATES:
        raise ConfigError(f"{where}: there is no climate {found.climate!r}; there are {', '.join(CLIMATES)}")
    return found


def distinct(instances: Sequence[Instance]) -> Sequence[Instance]:
    """``instances``; raises :class:`ConfigError` if two of them have one name."""
    names = [each.name for each in instances]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--instance: {', '.join(twice)} is there more than once: give each type a name of its own")
    return instances
