"""A process that another launcher has started: it becomes the keeper of its slot, whose worker runs the script.

``deepspeed``, ``torchrun``, ``srun`` and others start one process per rank and know nothing of agents. When such a
process comes to ``deepspeed.init_distributed`` and the job has the block, all of them agree on an etcd, and each
replaces itself (``exec``) by the keeper of its slot, :mod:`.cli.keeper`. That runs the agent, and the agent runs the
command line of the process again, as its worker. The launcher goes on seeing the process that it has started.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from . import slurm
from .config import BambooConfig
from .errors import BambooError, ConfigError, LaunchError
from .secret import NONE, SETTING, JobSecret, find, given, keep, split

if TYPE_CHECKING:
    from .store.embedded import EmbeddedEtcd

logger = logging.getLogger("bamboo_ds.launched")

#: What ``bamboo launch`` and users set for the processes: see the README.
ENV_STORE = "BAMBOO_STORE"
ENV_JOB = "BAMBOO_JOB"
ENV_ADDRESS = "BAMBOO_ADDRESS"
ENV_EVENTS = "BAMBOO_EVENTS"
#: ``bamboo launch`` itself: its process id, when it began, and the space of process ids, with blanks between.
ENV_LAUNCH = "BAMBOO_LAUNCH"
#: The configuration whose block counts, where the script's is not on its command line.
ENV_CONFIG = "BAMBOO_CONFIG"
#: How many steps are checked, in place of ``redundancy.check_exact``; every worker that is told has it.
ENV_CHECK_EXACT = "BAMBOO_CHECK_EXACT"
#: Set in every worker: who has it is none of another launcher's processes.
ENV_MEMBER = "BAMBOO_MEMBER"
#: How many of the ranks are on a host: torchrun, deepspeed, Open MPI, Intel MPI.
_HERE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launched:
    """What the launcher has told the process: its rank, the number of ranks, and where they meet.

    Attributes:
        local: all ranks are on this host.
    """

    rank: int
    world_size: int
    master_address: str
    master_port: int
    local: bool = False


def adopt_slurm(environ: MutableMapping[str, str]) -> None:
    """In a task of ``srun``, set the variables that DeepSpeed asks for; nothing that is set is changed.

    Raises:
        ConfigError: Slurm's variables cannot be read.
    """
    if slurm.is_task(environ) and ENV_MEMBER not in environ and "RANK" not in environ:
        environ.update(slurm.variables(environ))


def launched(environ: Mapping[str, str]) -> Launched | None:
    """What another launcher has told this process; ``None`` if there is none, or if it is a worker already.

    Raises:
        ConfigError: a variable is no number.
    """
    if ENV_MEMBER in environ or any(name not in environ for name in _NEEDED):
        return None
    try:
        rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise ConfigError(f"RANK, WORLD_SIZE and MASTER_PORT must be numbers: {error}") from error
    local = str(size) in [environ[name] for name in _HERE if name in environ]
    return Launched(rank, size, environ["MASTER_ADDR"], port, local)


def checked_steps(environ: Mapping[str, str]) -> int | None:
    """The number in ``BAMBOO_CHECK_EXACT``, if it is set; raises :class:`ConfigError` if it is none."""
    text = environ.get(ENV_CHECK_EXACT)
    if text is None:
        return None
    if not text.isdecimal():
        raise ConfigError(f"{ENV_CHECK_EXACT} is {text!r}: set it to the number of steps to check, or not at all")
    return int(text)


def become_keeper(place: Launched, block: BambooConfig, timeout: timedelta) -> NoReturn:
    """Agree with the processes of the other ranks, then replace this process. Does not return.

    Raises:
        ConfigError: the process cannot be started again by its command line, or the job's secret cannot be had.
        LaunchError: the etcd of the job cannot be had, or another process than rank 0 has answered in its place.
    """
    command = own_command()
    own = given(os.environ)
    checked_steps(os.environ)
    meeting = _Meeting(place, timeout)
    try:
        shared, secret = meeting.agree(own, lambda: _prepare(place, own))
    except BaseException:  # goes on up; only what was begun must not stay
        if _etcd is not None:
            _etcd.stop()
        raise
    arguments, environment = _keeper(place, block, command, shared, secret)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, arguments, environment)


def own_command() -> tuple[str, ...]:
    """The command line that starts this process again.

    Raises:
        ConfigError: there is none.
    """
    arguments = sys.orig_argv[1:]
    if multiprocessing.parent_process() is not None or "--multiprocessing-fork" in arguments:
        raise ConfigError(
            "this rank was started by multiprocessing, so that no command line starts it again: start the script by "
            "`bamboo run`, `bamboo launch`, deepspeed, torchrun or srun"
        )
    main: Any = sys.modules.get("__main__")
    if not arguments or arguments[0] == "-" or not (hasattr(main, "__file__") or "-c" in arguments):
        raise ConfigError("this rank reads its script from standard input: give it a file, it is started twice")
    return (sys.executable, *arguments)


# -- the agreement ----------------------------------------------------------------------------------------


#: The etcd that this process has started; it outlives the ``exec``.
_etcd: EmbeddedEtcd | None = None


def _prepare(place: Launched, own: JobSecret | None) -> tuple[dict[str, Any], JobSecret]:
    """What rank 0 decides for all: where the job's etcd is, and the job's name; and the job's secret."""
    global _etcd
    from .cli import jobs

    job = jobs.check_name(os.environ.get(ENV_JOB) or f"job-{os.urandom(4).hex()}")
    store, wrapped = os.environ.get(ENV_STORE), ENV_LAUNCH in os.environ
    if not wrapped:
        jobs.check_free(job)
    secret = own or (JobSecret.new() if place.local else NONE)
    if not secret:
        logger.warning(
            "this job has no secret: whoever reaches a port of its members can take part in it. Unless its network is "
            "its own, give every host the same %s",
            SETTING,
        )
    if store is None:
        from .control.access import embedded_etcd

        here = place.local and not os.environ.get(ENV_ADDRESS)
        _etcd = embedded_etcd("localhost" if here else _address(place), job, secret).start()
        store = _etcd.url
    elif not wrapped:
        from .control.claims import claim

        claim(store, job)
    keep(job, secret)
    return {"store": store, "job": job, "embedded": _etcd is not None, "wrapped": wrapped}, secret


def _verified(said: str, place: Launched, own: JobSecret | None, prefix: str) -> tuple[dict[str, Any], JobSecret]:
    """What rank 0 has ``said``, and the job's secret.

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
    if secret is None and place.local:
        from .cli.jobs import check_name

        secret = find(check_name(job), {})
    secret = secret or NONE
    if (secret or place.local) and not tag:
        why = "without proving that it knows the job's secret"
    elif tag and not secret:
        why = "with the proof of a secret that this rank does not have"
    elif not secret.unseal(said, prefix)[1]:
        why = "with the proof of another secret than this rank has"
    else:
        return answer, secret
    raise LaunchError(
        f"rank 0, or something in its place, has answered at {place.master_address}:{place.master_port} {why}. Give "
        f"every host the same {SETTING}, or none"
    )


class _Meeting:
    """Where the processes of all ranks meet, at ``MASTER_ADDR``:``MASTER_PORT``, as torch's do."""

    def __init__(self, place: Launched, timeout: timedelta, host: str | None = None) -> None:
        from torch.distributed.rendezvous import rendezvous

        self._place, self._host = place, host or socket.gethostname()
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))
        self._store: Any = store
        # torchrun keeps the store when it starts the processes again.
        self._prefix = f"bamboo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def agree(
        self, own: JobSecret | None, decide: Callable[[], tuple[dict[str, Any], JobSecret]]
    ) -> tuple[dict[str, Any], JobSecret]:
        """What rank 0 has decided, and the job's secret; returns on no rank before all have come.

        Args:
            own: the secret that the user has given to this rank.

        Raises:
            LaunchError: rank 0 could not decide, or nothing proves that it was rank 0.
        """
        said, rank = f"{self._prefix}/said", self._place.rank
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
        return _verified(answered, self._place, own, self._prefix)

    def _all_have_read(self) -> set[str]:
        """Wait, since the store may end with this process; returns the hosts of all ranks."""
        others = [f"{self._prefix}/read/{rank}" for rank in range(1, self._place.world_size)]
        return {self._host, *(name.decode() for name in (self._store.multi_get(others) if others else ()))}


def _address(place: Launched) -> str:
    """The address of this host at which the others reach it: ``BAMBOO_ADDRESS``, else that towards rank 0's host."""
    given = os.environ.get(ENV_ADDRESS)
    if given:
        return given
    try:
        return own_address(place.master_address, place.master_port)
    except OSError as error:
        raise LaunchError(
            f"cannot tell this host's address from MASTER_ADDR={place.master_address!r} ({error}); set {ENV_ADDRESS}"
        ) from error


def own_address(host: str, port: int) -> str:
    """This host's address on the way to ``host``; nothing is sent. Raises ``OSError`` if no way leads there."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    # Others may know an address of version 4 only, of "localhost" for one.
    family, _, _, _, name = next((each for each in found if each[0] == socket.AF_INET), found[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(name)
        return str(probe.getsockname()[0])


def _keeper(
    place: Launched, block: BambooConfig, command: tuple[str, ...], shared: Mapping[str, Any], secret: JobSecret
) -> tuple[list[str], dict[str, str]]:
    """The command of the keeper, and its environment."""
    from .cli.jobs import check_name
    from .cli.keeper import KeeperSettings, keeper_command
    from .control.agent_settings import AgentSettings, MemberOptions

    options = MemberOptions.from_block(
        block,
        job=check_name(shared["job"]),
        address=_address(place),
        command=command,
        events=os.environ.get(ENV_EVENTS),
        secret=secret,
        check_exact=checked_steps(os.environ),
    )
    options.check_notices()
    agent = AgentSettings(
        **options.member_options(),
        slot=place.rank,
        world_size=place.world_size,
        store=shared["store"],
        parent_pid=os.getpid(),
        master_port=place.master_port,
        generation=0,
        launched=True,
    )
    wrapper = _wrapper_here()
    keeper = KeeperSettings(
        owner=place.rank == 0 and not shared["wrapped"],
        supervisor=None if _etcd is None else _etcd.supervisor_pid,
        embedded=shared["embedded"],
        wrapper=None if wrapper is None else wrapper[0],
        wrapper_started=None if wrapper is None else wrapper[1],
    )
    return keeper_command(keeper, agent), agent.environment()


def _wrapper_here() -> tuple[int, int] | None:
    """Process id and start of ``bamboo launch``, if it runs on this host."""
    text = os.environ.get(ENV_LAUNCH)
    if text is None:
        return None
    from .control.neighbours import process_space, started

    pid, begin, space = text.split(" ", 2)
    here = space == process_space() and started(int(pid)) == int(begin)
    return (int(pid), int(begin)) if here else None
