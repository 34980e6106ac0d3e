"""Installers of a script, called on every stage that is built; see :func:`bamboo_ds.on_stage_built`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .errors import ConfigError

Installer = Callable[[Any, int], object]
_I = TypeVar("_I", bound=Installer)
_installers: list[Installer] = []
_begun = False


def install_with(installer: _I) -> _I:
    """Calls ``installer(module, stage)`` on every stage that is built from now on; returns it.

    Raises:
        ConfigError: a stage has been built already.
    """
    if _begun:
        raise ConfigError("bamboo_ds.on_stage_built was called after deepspeed.initialize: call it before")
    _installers.append(installer)
    return installer


def built(module: Any, stage: int) -> None:
    """``module`` is a stage as the layers' constructors have left it."""
    global _begun
    _begun = True
    for installer in list(_installers):
        installer(module, stage)
