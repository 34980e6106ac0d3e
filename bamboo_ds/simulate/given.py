"""The input of a simulation from options and files: models whose mistakes are told by names of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ConfigError

Found = TypeVar("Found", bound="Given")


class Given(BaseModel):
    """A model that has no other fields, does not change, and in which all numbers are finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def checked(where: str, make: Callable[[], Found]) -> Found:
    """The result of ``make``, its errors told by names of options.

    Args:
        where: the option; empty where fields are options themselves.
        make: the validation.

    Raises:
        ConfigError: names the fields that are wrong, what they are, and why.
    """
    try:
        return make()
    except ValidationError as error:
        told = []
        for fault in error.errors(include_url=False):
            name, found = ".".join(map(str, fault["loc"])), fault["input"]
            value = f" {found}" if isinstance(found, str | int | float) and len(str(found)) < 80 else ""
            told.append(f"{f'{where}: {name}' if where else option(name)}{value}: {fault['msg']}")
        raise ConfigError("; ".join(told)) from error


def option(field: str) -> str:
    """The option that is named after a field."""
    return f"--{field.replace('_', '-')}"
