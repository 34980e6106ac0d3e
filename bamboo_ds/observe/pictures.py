"""Pictures in files, by matplotlib, which only those need who draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError


def pyplot(what: str, otherwise: str = "") -> Any:
    """matplotlib's ``pyplot``, without a screen.

    Args:
        what: needs it, and otherwise: what can be done without it; for the error.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(f"{what} needs matplotlib: pip install 'bamboo_ds[benchmarks]'{otherwise}") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, dpi: int) -> None:
    """Writes ``figure`` as PNG, and forgets it; raises :class:`ConfigError` if that cannot be written."""
    try:
        figure.savefig(path, dpi=dpi, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        pyplot("a picture").close(figure)
