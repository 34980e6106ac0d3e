"""Files that let ``bamboo status`` and ``bamboo stop`` find the jobs of this user on this host."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from ..errors import ConfigError, LaunchError
from ..processes import boot_id, started
from ..secret import file_of, folder
from ..variables import ENV_JOB, ENV_STORE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def random_name() -> str:
    """A name for a job that the user has given none."""
    return f"job-{os.urandom(4).hex()}"


def check_name(job: str) -> str:
    """``job`` itself; raises :class:`ConfigError` if it cannot be a part of a key and of a file's name."""
    if not _NAME.fullmatch(job):
        raise ConfigError(f"job name {job!r} is not usable: take letters, digits, '.', '_' and '-', up to 100 of them")
    return job


class JobFile(BaseModel):
    """The file that a launcher leaves for other commands while it runs.

    Attributes:
        store: etcd's URLs, separated by commas.
        pid: process id of the launcher.
        foreign: it is not the launcher of all members, so that its end is not the job's.
        events: path of the file that the job's events are in, if any.
        logs: folder of the job's logs, if any.
        started: when the launcher's process began, in clock ticks since the boot ``boot``; with the pid it names the
            process for good, also when the system's clock is set.
    """

    model_config = ConfigDict(frozen=True)

    job: str
    store: str
    pid: int
    started: int
    boot: str
    foreign: bool = False
    events: str | None = None
    logs: str | None = None

    @property
    def path(self) -> Path:
        """The path of the file."""
        return folder() / f"{self.job}.json"

    def launcher(self) -> psutil.Process | None:
        """The launcher, if it is alive."""
        if (self.boot, self.started) != (boot_id(), started(self.pid)):
            return None
        try:
            return psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None

    def write(self) -> None:
        """Creates the file; raises :class:`LaunchError` if a job of this name runs already."""
        check_free(self.job)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        # A store's URL may hold a password.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(self.model_dump_json())
        try:
            os.link(temporary, self.path)
        except FileExistsError as error:
            raise LaunchError(f"a job named {self.job!r} is being started; take another name") from error
        finally:
            temporary.unlink()

    def remove(self) -> None:
        """Removes the file, and the job's secret. Idempotent."""
        self.path.unlink(missing_ok=True)
        file_of(self.job).unlink(missing_ok=True)


def this_process(
    job: str, store: str, foreign: bool = False, events: str | None = None, logs: str | None = None
) -> JobFile:
    """The file of a job whose launcher is this process; for the others see :class:`JobFile`."""
    pid, since = os.getpid(), started(os.getpid())
    assert since is not None
    own = {"pid": pid, "started": since, "boot": boot_id()}
    return JobFile(job=job, store=store, **own, foreign=foreign, events=events, logs=logs)


def running() -> list[JobFile]:
    """The jobs whose launchers are alive; files of dead ones are removed."""
    jobs = []
    for path in sorted(folder().glob("*.json")):
        try:
            job = JobFile.model_validate_json(path.read_text())
        except (FileNotFoundError, ValidationError):
            continue  # just removed by its launcher, or not one of ours
        if job.launcher() is None:
            job.remove()
        else:
            jobs.append(job)
    return jobs


def find(name: str) -> JobFile | None:
    """The running job ``name``, if any."""
    return next((job for job in running() if job.job == name), None)


def check_free(name: str) -> None:
    """Raises :class:`LaunchError` if a job ``name`` runs already."""
    other = find(name)
    if other is not None:
        raise LaunchError(f"a job named {name!r} runs already (launcher {other.pid}); take another name")


@dataclass(frozen=True)
class JobLocation:
    """The location of a job.

    Attributes:
        job: its name.
        store: URLs of its etcd.
        launcher: process id of its launcher, if that is known to be on this host.
    """

    job: str
    store: str
    launcher: int | None = None


def locate(name: str | None, store: str | None) -> JobLocation:
    """The job that the options ``--job`` and ``--store`` mean; raises :class:`ConfigError` if there is none."""
    if store is None:
        file = choose(name, otherwise="name one that runs elsewhere with --store and --job")
        return JobLocation(file.job, file.store, file.pid)
    if name is None:
        raise ConfigError(f"--store ({ENV_STORE}) needs --job ({ENV_JOB}): an etcd may serve several jobs")
    return JobLocation(name, store)


def choose(name: str | None, otherwise: str = "") -> JobFile:
    """The job ``name``, or the only one that runs.

    Args:
        otherwise: what can be done where none runs.

    Raises:
        ConfigError: there is no such thing.
    """
    jobs = [job for job in running() if name in (None, job.job)]
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        if name:
            raise ConfigError(f"no job {name!r} runs here")
        raise ConfigError("no job runs here" + (f"; {otherwise}" if otherwise else ""))
    raise ConfigError(f"several jobs run here, name one with --job: {', '.join(job.job for job in jobs)}")


def find_or_only(name: str | None) -> JobFile | None:
    """The running job ``name``, if any; without a name the only one that runs, and :class:`ConfigError` otherwise."""
    return find(name) if name is not None else choose(None, "name one that has ended with --job")
