"""The secret of a job: by it the job's processes know each other, and nobody else's words count.

Who starts the job makes it, or the user gives one where several hosts take part. It is in files that only their owner
can read and in the environment of the job's processes: never on a command line, in etcd or in a log. What travels are
tags (HMAC-SHA256), each for one purpose.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError, LaunchError

#: The secret itself. Empty in processes of a job that has none.
ENV_SECRET = "BAMBOO_JOB_SECRET"
#: A file that holds it, for those who start jobs or join them.
ENV_SECRET_FILE = "BAMBOO_SECRET_FILE"
#: What messages tell users to set.
SETTING = f"{ENV_SECRET_FILE} (or {ENV_SECRET})"
#: Bytes of a tag.
TAG = 32
#: What those warn of who start a job that has none.
WITHOUT_SECRET = (
    "this job has no secret: whoever reaches a port of its members can take part in it. Unless its network is its own, "
    f"give every host the same {SETTING}"
)
_SHORTEST = 32  # characters
_MAKE = "make one with: (umask 077; head -c 32 /dev/urandom | base64 > FILE)"


@dataclass(frozen=True)
class JobSecret:
    """The secret of one job; false if the job has none, and then everybody can compute its tags.

    Attributes:
        text: printable characters without blanks.
    """

    text: str = field(default="", repr=False)

    @classmethod
    def new(cls) -> JobSecret:
        """A fresh one."""
        return cls(secrets.token_urlsafe(32))

    def __bool__(self) -> bool:
        return bool(self.text)

    def tag(self, purpose: str, *parts: str | bytes | int) -> bytes:
        """The proof of knowledge of the secret and of ``parts``, for ``purpose`` only; :data:`TAG` bytes."""
        digest = hmac.new(self.text.encode(), digestmod="sha256")
        for part in (purpose, *parts):
            data = part if isinstance(part, bytes) else str(part).encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()

    def proves(self, tag: bytes, purpose: str, *parts: str | bytes | int) -> bool:
        """Whether ``tag`` is :meth:`tag` of the others."""
        return hmac.compare_digest(tag, self.tag(purpose, *parts))

    # -- texts that carry their tag -------------------------------------------------------------------

    def seal(self, text: str, *place: str) -> str:
        """``text`` with a tag that holds at ``place`` only; as it is in a job without a secret."""
        return f"{text}\n{self.tag('seal', *place, text).hex()}" if self else text

    def unseal(self, sealed: str, *place: str) -> tuple[str, bool]:
        """The text of :meth:`seal`, and whether it counts: in a job without a secret every text does."""
        text, tag = split(sealed)
        return text, not self or (bool(tag) and self.proves(tag, "seal", *place, text))


#: Of a job without a secret.
NONE = JobSecret()


def split(sealed: str) -> tuple[str, bytes]:
    """A text and its tag, which is not checked here; the tag is empty where there is none."""
    text, newline, tag = sealed.rpartition("\n")
    try:
        found = bytes.fromhex(tag) if newline else b""
    except ValueError:
        found = b""
    return (text, found) if len(found) == TAG else (sealed, b"")


# -- where it comes from --------------------------------------------------------------------------------


def given(environ: Mapping[str, str]) -> JobSecret | None:
    """The secret that the user has set, or ``None``.

    Raises:
        ConfigError: it is too short, or its file cannot be read or can be read by others.
    """
    path = environ.get(ENV_SECRET_FILE)
    if ENV_SECRET in environ:
        return _checked(environ[ENV_SECRET], ENV_SECRET)
    return None if path is None else _checked(_read(path), f"{ENV_SECRET_FILE}: {path}")


def taken(environ: MutableMapping[str, str]) -> JobSecret:
    """The secret that a worker has been started with; its own children do not get it."""
    environ.pop(ENV_SECRET_FILE, None)
    return JobSecret(environ.pop(ENV_SECRET, ""))


def _checked(text: str, source: str) -> JobSecret:
    text = text.strip()
    if len(text) < _SHORTEST or not (text.isascii() and text.isprintable() and " " not in text):
        raise ConfigError(
            f"{source}: a job's secret has at least {_SHORTEST} printable characters and no blanks; {_MAKE}"
        )
    return JobSecret(text)


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(f"{ENV_SECRET_FILE}: others can get at {path}: chmod 600 {path}")
            return file.read(4096)
    except OSError as error:
        raise ConfigError(
            f"{ENV_SECRET_FILE}: cannot read {path}: {error.strerror}; every host of the job needs a copy of the file"
        ) from error


# -- jobs on this host ----------------------------------------------------------------------------------


def folder() -> Path:
    """The folder of this user's jobs; made if absent. Raises :class:`LaunchError` if it is not ours alone."""
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"bamboo-{os.getuid()}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise LaunchError(
            f"{path} must be a folder of yours that only you can write to: remove it, or, if it is somebody else's, "
            "set XDG_RUNTIME_DIR to a folder of your own"
        )
    return path


def file_of(job: str) -> Path:
    """The path of the secret of a job that this host takes part in."""
    return folder() / f"{job}.secret"


def keep(job: str, secret: JobSecret) -> None:
    """Lets this user's processes on this host find the secret of ``job``."""
    path = file_of(job)
    if not secret:
        path.unlink(missing_ok=True)
        return
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # 0600
    with os.fdopen(fd, "w") as file:
        file.write(f"{secret.text}\n")
    os.rename(temporary, path)


def forget(job: str, state_file: Path, launcher: int) -> None:
    """Removes what the process ``launcher`` has left about ``job``, but nothing of a later job of that name.

    Args:
        state_file: where it is said whose the files are; see :class:`~bamboo_ds.launchers.jobs.JobFile`.
    """
    try:
        if json.loads(state_file.read_text())["pid"] != launcher:
            return
    except FileNotFoundError:
        return  # somebody else was faster
    for path in (file_of(job), state_file):
        path.unlink(missing_ok=True)


def find(job: str, environ: Mapping[str, str] | None = None) -> JobSecret:
    """The secret of ``job``: from the environment, else from :func:`keep`; :data:`NONE` if there is none.

    Raises:
        ConfigError: as :func:`given`.
    """
    environ = os.environ if environ is None else environ
    if ENV_SECRET in environ and not environ[ENV_SECRET]:
        return NONE  # of a process of the job
    secret = given(environ)
    if secret is not None:
        return secret
    try:
        return JobSecret(file_of(job).read_text().strip())
    except FileNotFoundError:
        return NONE
