"""The start of a script's process groups: of a bamboo job, of another launcher's rank, or stock."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from .config import BLOCK, BambooConfig, bamboo_config, config_path_from_argv, load_config
from .errors import ConfigError
from .variables import ENV_CONFIG, ENV_FD, ENV_LAUNCH, ENV_MEMBER
from .worker import HOW_TO_START

#: Default of DeepSpeed and torch for operations of a process group.
_DEFAULT_TIMEOUT = timedelta(minutes=30)

#: This process has its job.
_begun = False


def before_init_distributed(timeout: timedelta | None = None, config: Any = None) -> None:
    """Creates the process groups of a bamboo job; does nothing in any other job.

    Called before ``deepspeed.init_distributed`` does its work. The block is looked for in ``config`` and on the
    command line (``--deepspeed_config``). A process of ``bamboo run`` or ``bamboo launch`` whose configuration is not
    known yet is taken for one of a bamboo job. A process that another launcher has started becomes the supervisor
    of its rank (:mod:`.launchers.launched`).

    A configuration that cannot be read is an error in ``config`` and in processes of ``bamboo run`` and ``bamboo
    launch``. Elsewhere it has no block: DeepSpeed says what is wrong with it, if the script uses it.

    Raises:
        ConfigError: the block is wrong, or the process has neither agent nor launcher.
        LaunchError: the job's etcd cannot be had.
    """
    global _begun
    if _begun:
        return
    source = config if config is not None else config_path_from_argv()
    settings = None
    if source is not None:
        try:
            loaded = load_config(source)
        except ConfigError:
            if config is None and not _is_ours():
                return
            raise
        settings = bamboo_config(loaded)
        if settings is None:
            return
        from .supported import check_config

        check_config(loaded)
    if ENV_FD not in os.environ:
        _become_supervisor(settings, timeout or _DEFAULT_TIMEOUT)
        return
    import torch.distributed

    if torch.distributed.is_initialized():
        if settings is not None:
            raise ConfigError(f"torch.distributed was initialised by someone else already: {HOW_TO_START}")
        return
    _disable_shared_memory_collectives()
    from .worker import job, objects
    from .worker.channel import WorkerChannel

    channel = WorkerChannel.from_environment()
    assert channel is not None
    job.begin(job.Job(channel, settings, timeout or _DEFAULT_TIMEOUT))
    objects.patch()
    _begun = True


def _is_ours() -> bool:
    """Whether ``bamboo run`` or ``bamboo launch`` has started this process."""
    return ENV_FD in os.environ or ENV_LAUNCH in os.environ


def _become_supervisor(settings: BambooConfig | None, timeout: timedelta) -> None:
    """Leaves the script to a worker, if another launcher has started this process and the job is a bamboo job."""
    from .launchers import ranks

    if settings is None:
        if ENV_LAUNCH not in os.environ or ENV_MEMBER in os.environ:
            return
        path = os.environ.get(ENV_CONFIG)
        settings = bamboo_config(path) if path else None
    ranks.adopt_slurm(os.environ)
    place = ranks.launched(os.environ)
    if place is None:
        raise ConfigError(f'the configuration has a "{BLOCK}" block, but this process has no agent: {HOW_TO_START}')
    from .launchers.launched import become_supervisor

    become_supervisor(place, settings, timeout)


def _disable_shared_memory_collectives() -> None:
    """Switches DeepSpeed's CPU shared-memory collective off: it spins for ever on a dead peer.

    ``deepspeed.comm.torch`` as an attribute is torch itself; the module is only in ``sys.modules``.
    """
    import deepspeed.comm  # noqa: F401

    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
