"""DeepSpeed's own configuration, from whatever DeepSpeed takes."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ConfigError


def load_config(config: Any) -> Mapping[str, Any]:
    """DeepSpeed's configuration as a mapping, from whatever DeepSpeed takes: see its ``DeepSpeedConfig``.

    Args:
        config: a mapping, the path of a file, or the base64 encoding of what could be in one. That is JSON, also with
            comments and trailing commas (Hjson); a file names no key twice.

    Raises:
        ConfigError: the file cannot be read, or it is not a JSON object.
    """
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise ConfigError(f"DeepSpeed configuration {config!r} is neither a mapping nor the path of a file")
    name = os.fspath(config)
    if not os.path.exists(name):
        return _decoded(name)
    try:
        with open(name) as file:
            loaded = _parse(file.read(), once=True)
    except OSError as error:
        raise ConfigError(f"DeepSpeed configuration {name} cannot be read: {error}") from error
    except (ValueError, IndexError) as error:  # hjson raises both
        raise ConfigError(f"DeepSpeed configuration {name} is not valid JSON: {error}") from error
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"DeepSpeed configuration {name} must hold a JSON object, not {type(loaded).__name__}")
    return loaded


def _decoded(text: str) -> Mapping[str, Any]:
    try:
        loaded = _parse(base64.urlsafe_b64decode(text).decode(), once=False)
    except (ValueError, IndexError):
        loaded = None
    if not isinstance(loaded, Mapping):  # many a path happens to be base64 of something
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        raise ConfigError(
            f"DeepSpeed configuration {shown} does not exist, nor is it a JSON object in base64; check "
            "--deepspeed_config"
        )
    return loaded


def _parse(text: str, once: bool) -> Any:
    """DeepSpeed's reading of ``text``; ``once``: without a key twice. Raises ``ValueError``, ``IndexError``."""
    import hjson  # here: not every start needs it

    return hjson.loads(text, object_pairs_hook=_with_keys_once if once else None)


def _with_keys_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"it has the keys {', '.join(twice)} more than once")
    return found


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
