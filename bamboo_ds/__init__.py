"""bamboo_ds: preemption-resilient pipeline-parallel training, as a plugin for DeepSpeed.

Importing the package imports neither torch nor DeepSpeed; see the README for how to switch it on.
"""

from __future__ import annotations

from typing import Any

from .version import __version__

__all__ = ["__version__", "init_distributed"]


def init_distributed(config: Any, **kwargs: Any) -> None:
    """``deepspeed.init_distributed`` for scripts that pass their DeepSpeed configuration as a dict.

    A script whose configuration is a file on its command line (``--deepspeed_config``) need not call this.

    Args:
        config: DeepSpeed's configuration, as a mapping or the path of a JSON file.
        **kwargs: passed on to ``deepspeed.init_distributed``.

    Raises:
        ConfigError: the ``"bamboo"`` block is wrong; raised before any process group exists.
    """
    from . import launch

    launch.init_distributed(config, **kwargs)
