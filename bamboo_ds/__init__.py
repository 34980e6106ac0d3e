"""bamboo_ds: preemption-resilient pipeline-parallel training, as a plugin for DeepSpeed.

Importing the package imports neither torch nor DeepSpeed; see the README for how to switch it on.
"""

from __future__ import annotations

from typing import Any

from .version import __version__

__all__ = ["__version__", "init_distributed", "is_replaying"]


def is_replaying() -> bool:
    """Whether the script's calls return what the job has done before this worker joined it.

    Meanwhile ``train_batch`` returns recorded losses at once. A script may want to print or log nothing then.
    Always false in a worker that was there from the start, and in a job without a ``"bamboo"`` block.
    """
    from . import launch

    return launch.is_replaying()


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
