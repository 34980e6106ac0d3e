"""Construction of the sources that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...config import NoticesConfig, SourceName, check_url
from ...errors import ConfigError
from .aws import AWS_URL, AwsSource
from .azure import AZURE_URL, AzureSource
from .gcp import GCP_URL, GcpSource
from .hooks import FileSource, HttpSource
from .notice import NoticeSource
from .nvml import NvmlSource

#: Environment variables with URLs to ask instead of the clouds' own metadata services.
ENV_AWS_URL = "BAMBOO_AWS_METADATA_URL"
ENV_GCP_URL = "BAMBOO_GCP_METADATA_URL"
ENV_AZURE_URL = "BAMBOO_AZURE_METADATA_URL"


def build_sources(
    config: NoticesConfig, env: Mapping[str, str], names: Mapping[str, str] | None = None, device: str = "0"
) -> list[NoticeSource]:
    """The sources that ``config`` asks for, in its order. Loads nothing heavy and asks nobody yet.

    Args:
        config: the settings.
        env: the environment, which may redirect sources to other metadata services.
        names: values for placeholders in paths and URLs: ``{"slot": "3"}`` replaces ``{slot}``.
        device: which of the host's devices is the worker's, as ``CUDA_VISIBLE_DEVICES`` names it.

    Raises:
        ConfigError: names the wrong setting or environment variable.
    """

    def fill(text: str) -> str:
        for name, value in (names or {}).items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def service(variable: str, default: str) -> str:
        try:
            return check_url(fill(env.get(variable) or default))
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from error

    def needed(value: str | None, setting: str) -> str:
        if not value:
            raise ConfigError(f'"bamboo.notices.{setting}" is missing')
        return fill(value)

    makers: dict[SourceName, Callable[[], NoticeSource]] = {
        "aws": lambda: AwsSource(service(ENV_AWS_URL, AWS_URL)),
        "gcp": lambda: GcpSource(service(ENV_GCP_URL, GCP_URL)),
        "azure": lambda: AzureSource(service(ENV_AZURE_URL, AZURE_URL)),
        "file": lambda: FileSource(needed(config.file, "file")),
        "http": lambda: HttpSource(needed(config.url, "url")),
        "nvml": lambda: NvmlSource(device, env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"),
    }
    return [makers[name]() for name in config.sources]
