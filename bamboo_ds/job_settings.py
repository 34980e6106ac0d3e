"""The settings of a job, resolved once: the ``"bamboo"`` block, overridden by the command line.

Who starts the job resolves them; etcd keeps them in the job's record, where all others have them from. A script whose
configuration is a dict tells its block only when it builds its engine. Until then the record is *open*: the job goes by
defaults, and by what the command line gives. What workers have told then completes the record, before the first plan
that gives stages to members; no setting that has been in force before may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from .config import BLOCK, BambooConfig
from .errors import ConfigError

#: Settings, or parts of the block, that are in force from a job's start on. Agents go by them.
FROM_THE_START = ("membership.", "notices.", "observe.http", "observe.control")
_HIDDEN = "***"


def paths_by_name() -> dict[str, str]:
    """The path of each setting inside the block, by its own name, which no two settings share."""
    parts = BambooConfig.model_fields.items()
    return {name: f"{part}.{name}" for part, field in parts for name in getattr(field.annotation, "model_fields", ())}


def value_at(block: BambooConfig, path: str) -> Any:
    """The setting at ``path``, such as ``membership.lease_ttl_s``."""
    part, name = path.split(".")
    return getattr(getattr(block, part), name)


def differences(one: BambooConfig, other: BambooConfig) -> list[str]:
    """Paths of the settings that ``one`` and ``other`` have different values of; of a URL but for its credentials."""
    one, other = without_credentials(one), without_credentials(other)
    return [path for path in paths_by_name().values() if value_at(one, path) != value_at(other, path)]


def without_credentials(block: BambooConfig) -> BambooConfig:
    """``block`` as everybody may read it: the URL of a source of notices may have a password, or a token as a query."""
    if block.notices.url is None:
        return block
    url = urlsplit(block.notices.url)
    _, at, host = url.netloc.rpartition("@")
    hidden = url._replace(netloc=f"{_HIDDEN}@{host}" if at else host, query=_HIDDEN if url.query else "")
    return block.overridden({"notices.url": hidden.geturl()})


class JobSettings(BaseModel):
    """The settings of one job.

    Attributes:
        values: all of them.
        given: paths of those that the command line gives. They hold in place of a script's.
        open: no configuration was named to who has started the job, and no script has told its block yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: BambooConfig = BambooConfig()
    given: tuple[str, ...] = ()
    open: bool = False

    @classmethod
    def resolve(cls, block: BambooConfig | None, options: Mapping[str, Any]) -> JobSettings:
        """The settings of ``block`` and of the command line.

        Args:
            block: ``None``: no configuration with a block is known.
            options: settings by their own names; ``None`` leaves one to the block.

        Raises:
            ConfigError: two settings contradict each other.
        """
        paths = paths_by_name()
        given = {paths[name]: value for name, value in options.items() if value is not None}
        resolved = cls(values=block or BambooConfig(), open=block is None).overridden(given)
        _check(resolved.values)
        return resolved

    def of_script(self, block: BambooConfig) -> BambooConfig:
        """The settings of this job for a script with ``block``.

        Raises:
            ConfigError: names the settings that differ from the job's.
        """
        told = block.overridden({path: value_at(self.values, path) for path in self.given})
        wrong = differences(told, self.values)
        if self.open:
            wrong = [path for path in wrong if path.startswith(FROM_THE_START)]
        if wrong:
            raise ConfigError(self._differing(told, wrong))
        if self.open:
            _check(told)
        return told

    def of_member(self, own: JobSettings) -> JobSettings:
        """These settings of a job's record, for a member that would go by its ``own`` by itself.

        Raises:
            ConfigError: names the settings that differ, or it has not the credentials that etcd does not keep.
        """
        if not own.open:
            self.of_script(own.values)
        wrong = [path for path in differences(own.values, self.values) if path in own.given]
        if wrong:
            raise ConfigError(self._differing(own.values, wrong))
        return self.with_credentials(own.values)

    def _differing(self, told: BambooConfig, wrong: list[str]) -> str:
        found = ", ".join(
            f"{BLOCK}.{path} is {_shown(told, path)} here and {_shown(self.values, path)} in the job" for path in wrong
        )
        if self.open:
            return (
                f"{found}, which no configuration was named to when it was started. These settings hold from there on: "
                "start the job with --config FILE, a configuration with the same block"
            )
        return f"{found}: a job goes by one block. Start all of its members with the same configuration and options"

    def overridden(self, given: Mapping[str, Any]) -> JobSettings:
        """These settings with others that the command line gives, by path."""
        names = (*self.given, *(path for path in given if path not in self.given))
        return self.model_copy(update={"values": self.values.overridden(given), "given": names})

    def completed(self, block: BambooConfig) -> JobSettings:
        """These settings once scripts have told that they go by ``block``."""
        return JobSettings(values=block, given=self.given)

    def public(self) -> JobSettings:
        """These settings without credentials."""
        return self.model_copy(update={"values": without_credentials(self.values)})

    def with_credentials(self, own: BambooConfig) -> JobSettings:
        """These settings of a job's record, with the credentials of the member's own configuration.

        Raises:
            ConfigError: it has none.
        """
        url = self.values.notices.url
        if url is None or _HIDDEN not in url:
            return self
        if differences(own, own.overridden({"notices.url": url})):
            raise ConfigError(
                f"{BLOCK}.notices.url has a password or a query, which etcd does not keep: name the configuration by "
                "--config"
            )
        return self.model_copy(update={"values": self.values.overridden({"notices.url": own.notices.url})})


def _shown(block: BambooConfig, path: str) -> str:
    return repr(value_at(without_credentials(block), path))


def _check(block: BambooConfig) -> None:
    """Raises :class:`ConfigError` if two settings contradict each other."""
    block.redundancy.steps_to_check()
    ttl = block.membership.lease_ttl_s
    if block.fence_s is not None and block.fence_s < 2 * ttl:
        raise ConfigError(
            f"bamboo.membership.fence_s = {block.fence_s:g} is less than twice lease_ttl_s = {ttl:g}: workers would "
            "pause before their members count as lost; set it to at least twice lease_ttl_s"
        )
