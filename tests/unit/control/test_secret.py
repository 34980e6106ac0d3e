"""The job's secret: where it comes from, where it never is, and what it proves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from bamboo_ds import secret
from bamboo_ds.comm import handshake, wire
from bamboo_ds.comm.handshake import Door, Handshake, Refused, calling, hosting
from bamboo_ds.comm.loop import SocketLoop
from bamboo_ds.comm.places import Place
from bamboo_ds.control.agent.command import worker_environment
from bamboo_ds.control.registry.access import check_secret, embedded_etcd
from bamboo_ds.control.registry.keys import Keys
from bamboo_ds.control.registry.mirror import Mirror
from bamboo_ds.control.registry.records import LeaderRecord, ProgressRecord, RestartRecord
from bamboo_ds.control.settings import settings_told
from bamboo_ds.errors import ConfigError, LaunchError, StoreError
from bamboo_ds.launchers import jobs
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.secret import ENV_SECRET, ENV_SECRET_FILE, NONE, JobSecret
from bamboo_ds.store.certificates import certificates_of
from bamboo_ds.store.records import KeyValue, Snapshot, WatchEvent
from bamboo_ds.topology.planner import initial_plan
from tests.support.hubs import Hubs, Inbox
from tests.support.settings import agent

pytestmark = pytest.mark.claim("guides/security.md")

OURS, OTHER = JobSecret.new(), JobSecret.new()
TEXT = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in (ENV_SECRET, ENV_SECRET_FILE):
        monkeypatch.delenv(name, raising=False)


# -- where it comes from, and where it is not -------------------------------------------------------------
def test_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert secret.find("j") == NONE and secret.given(os.environ) is None
    secret.keep("j", OURS)
    assert secret.find("j") == OURS and secret.file_of("j").stat().st_mode & 0o077 == 0
    jobs.this_process("j", "unix:///x").remove()
    assert secret.find("j") == NONE
    secret.keep("j", OURS)
    path = tmp_path / "mine"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    monkeypatch.setenv(ENV_SECRET_FILE, str(path))
    assert secret.find("j") == secret.given(os.environ) == JobSecret(TEXT)
    monkeypatch.setenv(ENV_SECRET, OURS.text)
    assert secret.find("j") == OURS
    monkeypatch.setenv(ENV_SECRET, "")  # of a process of a job that has none
    assert secret.find("j") == NONE
    assert secret.taken(environ := {ENV_SECRET: TEXT, ENV_SECRET_FILE: "x", "A": "b"}) == JobSecret(TEXT)
    assert environ == {"A": "b"}


def test_only_the_files_of_the_own_job_are_removed() -> None:
    """By agents that outlive their launcher, whose job's name somebody else may have taken by now."""
    file = jobs.this_process("j", "unix:///x")
    file.write()
    secret.keep("j", OURS)
    secret.forget("j", file.path, file.pid + 1)
    assert file.path.exists() and secret.find("j") == OURS
    secret.forget("j", file.path, file.pid)
    assert not file.path.exists() and secret.find("j") == NONE
    secret.keep("j", OURS)
    secret.forget("j", file.path, file.pid)
    assert secret.find("j") == OURS


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"bamboo-{os.getuid()}").mkdir()
    (tmp_path / f"bamboo-{os.getuid()}").chmod(0o777)
    with pytest.raises(LaunchError, match="set XDG_RUNTIME_DIR"):
        secret.folder()


def test_a_job_without_a_secret_is_told_that_its_etcd_is_open(caplog: pytest.LogCaptureFixture) -> None:
    for address, own, warnings in (("127.0.0.1", NONE, 0), ("10.1.2.3", OURS, 0), ("10.1.2.3", NONE, 1)):
        embedded_etcd(address, "j", own)
        assert len(caplog.records) == warnings
    assert "10.1.2.3" in caplog.text and ENV_SECRET_FILE in caplog.text


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0, "cannot read .*every host of the job needs a copy"),
        (TEXT, 0o640, "others can get at .*chmod 600"),
        ("short", 0o600, "at least 32 printable characters .*make one with"),
        (f"{TEXT} {TEXT}", 0o600, "no blanks"),
    ],
)
def test_unusable_files_are_refused(tmp_path: Path, text: str | None, mode: int, message: str) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=f"(?s){ENV_SECRET_FILE}: .*{message}") as error:
        secret.given({ENV_SECRET_FILE: str(path)})
    assert TEXT not in str(error.value)


def test_an_empty_variable_of_the_user_is_refused() -> None:
    with pytest.raises(ConfigError, match=ENV_SECRET):
        secret.given({ENV_SECRET: ""})


def test_it_is_on_no_command_line_and_in_no_text() -> None:
    settings = agent(secret=OURS)
    environment = settings.environment({})
    assert OURS.text not in f"{settings.agent_command} {settings!r} {OURS!r} {OURS}"
    assert settings_told(environment) == settings and environment == {ENV_SECRET: OURS.text}
    assert worker_environment(settings, "m0-1")[ENV_SECRET] == OURS.text


# -- records in etcd --------------------------------------------------------------------------------------
def test_a_seal_holds_at_its_place_only() -> None:
    sealed = OURS.seal("text\nof two lines", "/bamboo/j/", "plan")
    assert OURS.text not in sealed
    assert OURS.unseal(sealed, "/bamboo/j/", "plan") == ("text\nof two lines", True)
    assert OURS.unseal(sealed, "/bamboo/j/", "restart") == ("text\nof two lines", False)
    assert OTHER.unseal(sealed, "/bamboo/j/", "plan") == ("text\nof two lines", False)
    assert OURS.unseal(sealed.replace("two", "2"), "/bamboo/j/", "plan") == ("text\nof 2 lines", False)
    assert NONE.unseal(sealed, "elsewhere") == ("text\nof two lines", True)  # who has no secret can read
    for plain in ("", "text", f"text\n{'0' * 63}", f"text\n{'x' * 64}", "0" * 64):
        assert (
            NONE.seal(plain) == plain and NONE.unseal(plain) == (plain, True) and OURS.unseal(plain) == (plain, False)
        )
    assert (
        len({OURS.tag(*parts) for parts in (("a", "b"), ("ab", ""), ("", "ab"), ("a", "b", ""), ("a", b"b", 1))}) == 5
    )


def test_certificates_are_of_the_job_and_its_secret() -> None:
    def authority(own: JobSecret, namespace: str) -> Any:
        made = certificates_of(own, namespace)
        assert OURS.text.encode() not in b"".join((made.ca or b"", made.cert or b"", made.key or b""))
        found = x509.load_pem_x509_certificate(made.ca or b"").public_key()
        x509.load_pem_x509_certificate(made.cert or b"").verify_directly_issued_by(
            x509.load_pem_x509_certificate(made.ca or b"")
        )
        return found

    assert authority(OURS, "/bamboo/j/") == authority(OURS, "/bamboo/j/")
    assert authority(OURS, "/bamboo/j/") != authority(OURS, "/bamboo/k/") != authority(OTHER, "/bamboo/k/")


def forged(key: str, value: str, revision: int) -> KeyValue:
    return KeyValue(key, value, revision, 1, genuine=False)


def test_forged_records_are_told_and_not_followed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, LOGGER)
    plan, evil = initial_plan(["a", "b"]), initial_plan(["x", "y"]).to_json()
    good = RestartRecord(generation=1, after_epoch=3, ranks={0: (0,)}, checkpoint="/ours").to_json()
    bad = RestartRecord(generation=2, after_epoch=3, ranks={0: (0,)}, checkpoint="/evil").to_json()
    entries = {Keys.PLAN: KeyValue(Keys.PLAN, plan.to_json(), 1, 1), Keys.RESTART: KeyValue(Keys.RESTART, good, 2, 1)}
    mirror = Mirror(Snapshot(entries, 2))
    told = ProgressRecord(id="x", step=10**6, checkpoint="/evil").to_json()
    for number, (key, value) in enumerate(((Keys.PLAN, evil), (Keys.RESTART, bad), (Keys.progress("x"), told))):
        mirror.apply(WatchEvent("put", key, forged(key, value, number + 3)))
        assert mirror.plan == plan and mirror.restart is not None and mirror.restart.checkpoint == "/ours"
        assert not mirror.progress
        assert re.search(rf"{key} in etcd is not from a process that knows the job's secret", caplog.text)
    assert mirror.revision(Keys.PLAN) == 3  # so that the next plan takes its place
    assert len(caplog.records) == 3
    with pytest.raises(StoreError, match=ENV_SECRET_FILE):
        Mirror(Snapshot({Keys.PLAN: forged(Keys.PLAN, evil, 1)}, 1))


def test_a_plan_of_the_past_is_no_better_than_a_forged_one(caplog: pytest.LogCaptureFixture) -> None:
    """It is genuine: it has been the job's plan."""
    caplog.set_level(logging.ERROR, LOGGER)
    old = initial_plan(["a", "b"])
    plan = replace(old, epoch=9)
    mirror = Mirror(Snapshot({Keys.PLAN: KeyValue(Keys.PLAN, plan.to_json(), 1, 1)}, 1))
    mirror.apply(WatchEvent("put", Keys.PLAN, KeyValue(Keys.PLAN, old.to_json(), 2, 1)))
    assert mirror.plan == plan and mirror.plan_forged and mirror.revision(Keys.PLAN) == 2
    assert "is that of epoch 1" in caplog.text and "that of epoch 9 stays in force" in caplog.text
    mirror.apply(WatchEvent("put", Keys.PLAN, KeyValue(Keys.PLAN, plan.to_json(), 3, 1)))
    assert mirror.plan == plan and not mirror.plan_forged
    assert len(caplog.records) == 1


def test_nobody_leads_by_a_forged_record() -> None:
    """It has taken the lease from the leader's key, which would stay when that one is lost."""
    own = LeaderRecord(id="a").to_json()
    mirror = Mirror(Snapshot({Keys.LEADER: KeyValue(Keys.LEADER, own, 1, 1, lease=5)}, 1))
    assert mirror.leader == "a" and mirror.forged_revision(Keys.LEADER) == 0
    mirror.apply(WatchEvent("put", Keys.LEADER, forged(Keys.LEADER, own, 2)))
    assert mirror.leader is None and mirror.forged_revision(Keys.LEADER) == 2


@pytest.mark.parametrize(
    ("entries", "own", "message"),
    [
        (
            [KeyValue("spec", "", 1, 1, sealed=True)],
            NONE,
            "none is known here: set BAMBOO_SECRET_FILE to a copy of j.secret",
        ),
        ([KeyValue("spec", "", 1, 1, genuine=False, sealed=True)], OURS, "another secret"),
        ([KeyValue("spec", "", 1, 1, genuine=False)], OURS, "written by somebody else"),
        ([KeyValue("spec", "", 1, 1)], NONE, None),
        ([KeyValue("spec", "", 1, 1, sealed=True)], OURS, None),
        ([KeyValue("spec", "", 1, 1, genuine=False), KeyValue("members/a", "", 1, 1, sealed=True)], OURS, None),
        ([KeyValue("spec", "", 1, 1), KeyValue("members/a", "", 1, 1, sealed=True)], NONE, "none is known here"),
        ([], OURS, None),
    ],
)
def test_commands_say_what_is_wrong_with_the_secret(
    entries: list[KeyValue], own: JobSecret, message: str | None
) -> None:
    if message is None:
        check_secret(entries, "j", own)
        return
    with pytest.raises(ConfigError, match=message) as error:
        check_secret(entries, "j", own)
    assert "unset" not in str(error.value)  # whoever can write there would be obeyed


# -- connections ------------------------------------------------------------------------------------------
#: What members find in the plan.
TOKEN = "a token of ours"


def hello(purpose: bytes = b"wire", length: int = 1, rest: bytes = b"a") -> bytes:
    """A caller's first words, with whatever proof."""
    return struct.pack("<8s8s32sH", b"bamboo-3", purpose, bytes(32), length) + rest


class Ends:
    """Both ends of a connection, and what each comes to."""

    def __init__(
        self, caller: JobSecret, host: JobSecret, *, token: str = TOKEN, expected: str = "b", purpose: str = "wire"
    ) -> None:
        one, other = socket.socketpair()
        for end in (one, other):
            end.setblocking(False)
        with one, other:
            self.caller = Handshake(one, calling(caller, purpose, token, "a", expected))
            self.host = Handshake(other, hosting(host, ["wire"], TOKEN, "b"))
            self.names: list[str | None] = []
            self.refused: list[str] = []
            for end in (self.host, self.caller, self.host):
                try:
                    self.names.append(end.advance())
                except Refused as error:
                    self.refused.append(str(error))
                    end.connection.close()
                except OSError:
                    self.names.append(None)


def test_both_ends_prove_themselves() -> None:
    for pair in ((OURS, OURS), (NONE, NONE)):
        assert Ends(*pair).names == [None, "b", "a"]


@pytest.mark.parametrize(("caller", "host"), [(OURS, OTHER), (NONE, OURS), (OURS, NONE)])
def test_nobody_with_another_secret_gets_in(caller: JobSecret, host: JobSecret) -> None:
    """Nor learns anything: it is not answered."""
    ends = Ends(caller, host)
    assert "b" not in ends.names and "a" not in ends.names and not ends.host.answered
    assert ends.refused == [f"'a' does not know where b is, or has another secret: check {secret.SETTING}"]
    assert ENV_SECRET_FILE in ends.refused[0]


@pytest.mark.parametrize("own", [OURS, NONE])
def test_nobody_with_another_token_gets_in(own: JobSecret) -> None:
    """In a job without a secret it is all there is to know."""
    for token in ("another", ""):
        ends = Ends(own, own, token=token)
        assert "b" not in ends.names and "a" not in ends.names and not ends.host.answered
        assert len(ends.refused) == 1 and "'a' does not know where b is" in ends.refused[0]


class Impostor:
    """Takes whatever is given for proof, and gives what it has."""

    def __init__(self, own: JobSecret) -> None:
        self._own = own

    def tag(self, *facts: str | bytes | int) -> bytes:
        return self._own.tag(*facts)

    def proves(self, tag: bytes, *facts: str | bytes | int) -> bool:
        return True


@pytest.mark.parametrize(("own", "token"), [(OTHER, TOKEN), (NONE, TOKEN), (OURS, "another")])
def test_a_host_that_does_not_know_is_not_believed(own: JobSecret, token: str) -> None:
    """At the address of a member, it lets everybody in who calls."""
    one, other = socket.socketpair()
    with one, other:
        caller = Handshake(one, calling(OURS, "wire", TOKEN, "a", "b"))
        host = Handshake(other, hosting(Impostor(own), ["wire"], token, "b"))  # type: ignore[arg-type]
        assert host._next(other.recv(8)) is None
        for end in (one, other):
            end.setblocking(False)
        assert host.advance() is None and host.answered
        with pytest.raises(Refused, match=f"whoever answers there is not b of this job.*{re.escape(ENV_SECRET_FILE)}"):
            caller.advance()


def test_the_host_believes_no_one_either() -> None:
    """A caller whose first proof is right has to give the second one all the same: it may have overheard the first."""

    def talk() -> Iterator[bytes | int]:
        nonce = bytes(32)
        yield hello(rest=b"a" + OURS.tag("hello", "wire", TOKEN, "a", "b", nonce))
        yield 64
        yield OTHER.tag("caller", "wire", TOKEN, "a", "b", nonce, bytes(32))
        yield 1

    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.setblocking(False)
        caller = Handshake(one, talk())  # type: ignore[arg-type]
        host = Handshake(other, hosting(OURS, ["wire"], TOKEN, "b"))
        assert host.advance() is None and host.answered and caller.advance() is None
        with pytest.raises(Refused) as error:
            host.advance()
    assert str(error.value) == f"the caller is not a, or has another secret: check {secret.SETTING}"


@pytest.mark.parametrize(("expected", "purpose"), [("c", "wire"), ("b", "state")])
def test_who_wants_somebody_or_something_else_does_not_get_in(expected: str, purpose: str) -> None:
    """Another member, or another port of this one."""
    ends = Ends(OURS, OURS, expected=expected, purpose=purpose)
    assert "a" not in ends.names and not ends.host.answered and len(ends.refused) == 1
    assert ("it wants something else" if purpose != "wire" else "does not know where b is") in ends.refused[0]


class ShortListener(socket.socket):
    """Has no descriptor for a caller, so many times."""

    shortage = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if ShortListener.shortage:
            ShortListener.shortage -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Street:
    """A door of ours, and an open street before it. The test is the loop's thread.

    Args:
        expected: how many members may come.
    """

    def __init__(self, expected: int = 1) -> None:
        self._loop = SocketLoop()
        self._listener = ShortListener(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1000)
        self._listener.setblocking(False)
        self._found: list[str] = []
        self.callers: list[socket.socket] = []
        self.door = Door(self._loop, self._listener, lambda: hosting(OURS, ["wire"], TOKEN, "b"), self._admit, expected)

    def _admit(self, name: str, opened: socket.socket, purpose: str) -> None:
        self._found.append(name)
        self.callers.append(opened)

    def call(self, data: bytes = b"") -> socket.socket:
        caller = socket.create_connection(self._listener.getsockname())
        self.callers.append(caller)
        caller.sendall(data)
        return caller

    def member(self, name: str = "a", caller: socket.socket | None = None) -> Handshake:
        """One of the job, that has said its first words."""
        return Handshake(caller or self.call(), calling(OURS, "wire", TOKEN, name, "b"))

    def attend(self) -> list[str]:
        """Until nothing is to be done; those who have proven themselves."""
        while ready := self._loop._epoll.poll(0.0):
            for descriptor, events in ready:
                handler, _ = self._loop._handlers.get(descriptor, (lambda _: None, 0))
                handler(events)
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        self.door.close()
        for opened in (*self.callers, self._listener):
            opened.close()
        self._loop.close()


@pytest.fixture
def street() -> Iterator[Street]:
    one = Street()
    yield one
    one.close()


def test_silent_callers_keep_nobody_waiting(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [street.call(b"" if number % 2 else b"bamboo-3") for number in range(20)]
    assert street.attend() == []
    member = street.member()
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    for caller in silent:
        caller.setblocking(False)
        with pytest.raises(BlockingIOError):
            caller.recv(1)  # they still have their time
    monkeypatch.setattr(handshake, "GRACE_S", 0.0)
    assert 0 < (street.door.grace() or 0) <= 30.0
    late = street.call()
    assert street.attend() == []
    for handshake_ in street.door._callers.values():
        handshake_.until = 0.0
    assert street.door.grace() is None
    for caller in (*silent, late):
        caller.setblocking(True)
        assert caller.recv(1) == b""


def test_a_crowd_costs_no_more_than_its_bound(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CALLERS", 8)
    crowd = [street.call(b"bamboo-3") for _ in range(30)]
    assert street.attend() == [] and len(street.door._callers) == 9  # one is expected
    member = street.member()
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    assert [caller.recv(1) for caller in crowd[:21]] == [b""] * 21


def test_a_crowd_crowds_no_member_out(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has said who it is, and then has something else to do."""
    monkeypatch.setattr(handshake, "CALLERS", 8)
    member = street.member()
    assert street.attend() == []
    for number in range(30):
        street.call(b"bamboo-3" if number % 2 else hello(rest=b"a" + OTHER.tag("hello")))
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]


def test_more_members_than_strangers_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CALLERS", 8)
    names = [f"m{number}" for number in range(40)]
    with contextlib.closing(Street(len(names))) as street:
        calls = [street.member(name) for name in names]
        assert street.attend() == []
        assert [call.advance() for call in calls] == ["b"] * 40
        assert sorted(street.attend()) == sorted(names)


def test_a_stranger_makes_room_when_there_are_no_descriptors(
    street: Street, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without one, the door looks away from its listener for a moment: it costs neither time nor other members'."""
    strangers = [street.call(b"bamboo-3") for _ in range(3)]
    known = street.member("c")
    assert street.attend() == []
    monkeypatch.setattr(handshake, "_SHORTAGE_S", 0.0)
    monkeypatch.setattr(ShortListener, "shortage", 5)
    member = street.member()
    assert street.attend() == [] and ShortListener.shortage == 1  # it looks elsewhere, and not again and again
    for stranger in strangers:
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""
    assert known.advance() == "b" and street.attend() == ["c"]  # meanwhile others go on
    assert ShortListener.shortage == 1
    street.door.grace()  # that moment is over
    assert street.attend() == [] and ShortListener.shortage == 0
    street.door.grace()
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    assert sum("ulimit -n" in record.message for record in caplog.records) == 1  # of two times without any of them


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        street = Street()
        street.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1 << 16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 200,
        struct.pack("<8s8sq32sH", b"bamboo-2", b"link", 3, bytes(32), 1) + b"a" + bytes(32),
        hello(purpose=b"store"),
        hello(length=65535, rest=b"a" * 65535),
        hello(rest=b"a" + bytes(32)),
        hello(rest=b"\xff" + OURS.tag("hello", "wire", "another token", "a", "b", bytes(32))),
    ],
    ids=["http", "noise", "older version", "other purpose", "long name", "no proof", "other token"],
)
def test_strangers_are_sent_away(street: Street, words: bytes) -> None:
    caller = street.call(words)
    assert street.attend() == []
    caller.settimeout(10)
    with contextlib.suppress(ConnectionResetError):  # it had more to say
        while caller.recv(4096):
            pass


def test_what_was_overheard_opens_nothing(street: Street) -> None:
    """A member's words, said again by somebody else."""
    words: list[bytes] = []

    class Overheard(socket.socket):
        def send(self, data: bytes, *flags: int) -> int:  # type: ignore[override]
            words.append(bytes(data))
            return super().send(data, *flags)

    address = street._listener.getsockname()
    with Overheard(socket.AF_INET, socket.SOCK_STREAM) as caller:
        caller.connect(address)
        member = street.member(caller=caller)
        assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    again = street.call(b"".join(words))
    assert street.attend() == []
    again.settimeout(10)
    assert len(again.recv(64)) == 64  # another nonce
    assert again.recv(1) == b""


@pytest.mark.parametrize("own", [OURS, NONE], ids=["secret", "no secret"])
def test_a_worker_admits_members_only(own: JobSecret) -> None:
    """Whatever strangers do at its port, members go on; and no frame of a stranger is read."""
    strangers: list[socket.socket] = []
    with contextlib.closing(Hubs(["a", "b"], own)) as hubs:
        ends = {name: Inbox(hub, 7) for name, hub in hubs.items()}
        place = Place.parse(hubs["a"].place)

        def call(words: bytes = b"") -> socket.socket:
            caller = socket.create_connection((place.host, place.port), 10)
            strangers.append(caller)
            with contextlib.suppress(ConnectionError):
                caller.sendall(words)
            return caller

        silent, evil = [call() for _ in range(4)], bytes(wire.encode(b"evil", 1, None, 7)[0][0])
        for secret_, token, host in (
            (own, "another", "a"),
            (OTHER, place.token, "a"),
            (NONE if own == OURS else OURS, place.token, "a"),
            (own, place.token, "b"),
        ):
            caller = Handshake(call(), calling(secret_, "wire", token, "b", host))
            with contextlib.suppress(ConnectionError):  # it may have been refused by now
                caller.connection.sendall(evil)
            with pytest.raises(ConnectionError):
                caller.advance()
        for words in (b"[" * (1 << 24), b"\xff" * 4096, evil):
            caller_ = call(words)
            with contextlib.suppress(ConnectionResetError):
                assert caller_.recv(1) == b""
        hubs["b"].reach("a", hubs["a"].place).send(7, wire.encode(b"good", 1, None, 7))
        ends["a"].wait(lambda: bool(ends["a"].got))
        assert ends["a"].got == [("b", b"good", 1)] and not ends["a"].lost
        assert set(hubs["a"]._connections) == {("wire", "b")}
        for caller_ in silent:
            caller_.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller_.recv(1)  # it has time
    for caller_ in strangers:
        caller_.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "bamboo-wire"]
