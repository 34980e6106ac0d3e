"""Agreement of the processes of all ranks on the job: its name, its etcd, its secret. Rank 0 decides."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..control.registry.access import embedded_etcd
from ..control.registry.claims import claim
from ..errors import BambooError, LaunchError
from ..job_settings import JobSettings
from ..secret import NONE, SETTING, WITHOUT_SECRET, JobSecret, find, keep, split
from ..store.embedded import EmbeddedEtcd
from ..variables import ENV_ADDRESS, ENV_JOB, ENV_LAUNCH, ENV_STORE
from . import jobs
from .network import own_address
from .ranks import Launched

logger = logging.getLogger("bamboo_ds.launchers")


class StartDecision:
    """The decision of rank 0 for all: the job's etcd, its name, its settings; and its secret.

    Attributes:
        etcd: that this process has started; it outlives the ``exec``.
    """

    def __init__(self, me: Launched, own: JobSecret | None, settings: JobSettings) -> None:
        self._me, self._own, self._settings = me, own, settings.public()
        self.etcd: EmbeddedEtcd | None = None

    def __call__(self) -> tuple[dict[str, Any], JobSecret]:
        """Decides, and does what follows on this host."""
        job = jobs.check_name(os.environ.get(ENV_JOB) or jobs.random_name())
        store, wrapped = os.environ.get(ENV_STORE), ENV_LAUNCH in os.environ
        if not wrapped:
            jobs.check_free(job)
        secret = self._own or (JobSecret.new() if self._me.local else NONE)
        if not secret:
            logger.warning(WITHOUT_SECRET)
        if store is None:
            here = self._me.local and not os.environ.get(ENV_ADDRESS)
            self.etcd = embedded_etcd("localhost" if here else address(self._me), job, secret).start()
            store = self.etcd.url
        elif not wrapped:
            claim(store, job)
        keep(job, secret)
        decided = {"store": store, "job": job, "embedded": self.etcd is not None, "wrapped": wrapped}
        return {**decided, "settings": self._settings.model_dump(mode="json", exclude_defaults=True)}, secret


def verified(said: str, me: Launched, own: JobSecret | None, prefix: str) -> tuple[dict[str, Any], JobSecret]:
    """The decision that rank 0 has ``said``, and the job's secret.

    Raises:
        LaunchError: rank 0 could not decide, or it was not rank 0, or it has another secret.
    """
    text, tag = split(said)
    try:
        answer = dict(json.loads(text))
        if "error" in answer:
            raise LaunchError(f"rank 0 cannot start the job: {answer['error']}")
        job = str(answer["job"])
    except (ValueError, TypeError, KeyError) as error:
        raise LaunchError(f"something else than a rank of this job has answered for rank 0: {error}") from error
    secret = own
    if secret is None and me.local:
        secret = find(jobs.check_name(job), {})
    secret = secret or NONE
    if (secret or me.local) and not tag:
        why = "without proving that it knows the job's secret"
    elif tag and not secret:
        why = "with the proof of a secret that this rank does not have"
    elif not secret.unseal(said, prefix)[1]:
        why = "with the proof of another secret than this rank has"
    else:
        return answer, secret
    raise LaunchError(
        f"rank 0, or something in its place, has answered at {me.master_address}:{me.master_port} {why}. Give "
        f"every host the same {SETTING}, or none"
    )


class Meeting:
    """The meeting of the processes of all ranks, at ``MASTER_ADDR``:``MASTER_PORT``, as torch's do."""

    def __init__(self, me: Launched, timeout: timedelta, host: str | None = None) -> None:
        from torch.distributed.rendezvous import rendezvous

        self._me, self._host = me, host or socket.gethostname()
        store, _, _ = next(rendezvous("env://", me.rank, me.world_size, timeout=timeout))
        self._store: Any = store
        # torchrun keeps the store when it starts the processes again.
        self._prefix = f"bamboo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def agree(
        self, own: JobSecret | None, decide: Callable[[], tuple[dict[str, Any], JobSecret]]
    ) -> tuple[dict[str, Any], JobSecret]:
        """The decision of rank 0, and the job's secret; returns on no rank before all have come.

        Args:
            own: the secret that the user has given to this rank.

        Raises:
            LaunchError: rank 0 could not decide, or nothing proves that it was rank 0.
        """
        said, rank = f"{self._prefix}/said", self._me.rank
        if rank == 0:
            try:
                answer, secret = decide()
            except (BambooError, OSError) as error:
                self._store.set(said, json.dumps({"error": str(error)}))
                self._all_have_read()
                raise
            self._store.set(said, secret.seal(json.dumps(answer), self._prefix))
            hosts = self._all_have_read()
            if answer["embedded"] and len(hosts) > 1:
                logger.warning(
                    "%d hosts take part, and the job's etcd is on one of them, %s: when that is lost nothing survives "
                    "a loss any more. Name an etcd that is on none of them: %s in the environment of rank 0 (the "
                    "launchers of deepspeed pass on what .deepspeed_env lists), or bamboo launch --store",
                    *(len(hosts), self._host, ENV_STORE),
                )
            return answer, secret
        answered = self._store.get(said).decode(errors="replace")
        self._store.set(f"{self._prefix}/read/{rank}", self._host)
        return verified(answered, self._me, own, self._prefix)

    def _all_have_read(self) -> set[str]:
        """Waits, since the store may end with this process; returns the hosts of all ranks."""
        others = [f"{self._prefix}/read/{rank}" for rank in range(1, self._me.world_size)]
        return {self._host, *(name.decode() for name in (self._store.multi_get(others) if others else ()))}


def address(me: Launched) -> str:
    """The address of this host at which the others reach it: ``BAMBOO_ADDRESS``, else that towards rank 0's host."""
    given = os.environ.get(ENV_ADDRESS)
    if given:
        return given
    try:
        return own_address(me.master_address, me.master_port)
    except OSError as error:
        raise LaunchError(
            f"cannot tell this host's address from MASTER_ADDR={me.master_address!r} ({error}); set {ENV_ADDRESS}"
        ) from error
