"""The job's secret: where it comes from, where it never is, and what it proves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import selectors
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from bamboo_ds import secret
from bamboo_ds.comm import handshake
from bamboo_ds.comm.handshake import Door, Handshake, Refused, calling, hosting
from bamboo_ds.comm.keyvalue import Client, Server
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

from .support.settings import agent

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
class Ends:
    """Both ends of a connection, and what each comes to."""

    def __init__(self, caller: JobSecret, host: JobSecret, *, name: str = "a", epoch: int = 3) -> None:
        one, other = socket.socketpair()
        for end in (one, other):
            end.setblocking(False)
        with one, other:
            self.caller = Handshake(one, calling(caller, "link", epoch, name, "b"))
            self.host = Handshake(other, hosting(host, "link", 3, "b", {"a", "c"}.__contains__))
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
    ends = Ends(caller, host)
    assert "b" not in ends.names and "a" not in ends.names
    assert len(ends.refused) == 1 and ENV_SECRET_FILE in ends.refused[0]  # the caller: it has seen no proof


def test_the_host_believes_no_one_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not ask for the host's proof has to give its own all the same."""
    monkeypatch.setattr(JobSecret, "proves", lambda own, tag, *facts: own == OTHER or tag == own.tag(*facts))
    ends = Ends(OTHER, OURS)
    assert ends.names == [None, "b"]
    assert ends.refused == [f"the caller is not a, or has another secret: check {secret.SETTING}"]


@pytest.mark.parametrize(("name", "epoch"), [("x", 3), ("a", 2)])
def test_who_is_not_expected_does_not_get_in(name: str, epoch: int) -> None:
    (refused,) = Ends(OURS, OURS, name=name, epoch=epoch).refused
    assert f"'{name}' is not expected in epoch 3 (it says {epoch})" == refused


class Listener(socket.socket):
    """Has no descriptor for a caller, so many times."""

    shortage = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if Listener.shortage:
            Listener.shortage -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Street:
    """A door of ours, and an open street before it.

    Args:
        expected: members that may come.
    """

    def __init__(self, expected: Collection[str] = ("a",)) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = Listener(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(1000)
        self._listener.setblocking(False)
        self.door = Door(
            self._selector,
            self._listener,
            lambda: hosting(OURS, "link", 3, "b", expected.__contains__),
            len(expected),
        )
        self.callers: list[socket.socket] = []

    def call(self, data: bytes = b"") -> socket.socket:
        caller = socket.create_connection(self._listener.getsockname())
        self.callers.append(caller)
        caller.sendall(data)
        return caller

    def attend(self) -> list[str]:
        """Until nothing is to be done; those who have proven themselves."""
        found = []
        while ready := self._selector.select(0):
            for key, _ in ready:
                known = self.door.attend(key.fileobj)  # type: ignore[arg-type]
                if known is not None:
                    found.append(known[0])
                    self.callers.append(known[1])
        return found

    def close(self) -> None:
        self.door.close()
        for opened in (*self.callers, self._listener):
            opened.close()
        self._selector.close()


@pytest.fixture
def street() -> Iterator[Street]:
    one = Street()
    yield one
    one.close()


def test_silent_callers_keep_nobody_waiting(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = [street.call(b"" if number % 2 else b"bamboo-2") for number in range(20)]
    assert street.attend() == []
    member = Handshake(street.call(), calling(OURS, "link", 3, "a", "b"))
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
    crowd = [street.call(b"bamboo-2") for _ in range(30)]
    assert street.attend() == [] and len(street.door._callers) == 9  # one is expected
    member = Handshake(street.call(), calling(OURS, "link", 3, "a", "b"))
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    assert [caller.recv(1) for caller in crowd[:21]] == [b""] * 21


def test_a_crowd_crowds_no_member_out(street: Street, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has said who it is, and then has something else to do."""
    monkeypatch.setattr(handshake, "CALLERS", 8)
    member = Handshake(street.call(), calling(OURS, "link", 3, "a", "b"))
    assert street.attend() == []
    for _ in range(30):
        street.call(b"bamboo-2")
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]


def test_more_members_than_strangers_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "CALLERS", 8)
    names = [f"m{number}" for number in range(40)]
    with contextlib.closing(Street(names)) as street:
        calls = [Handshake(street.call(), calling(OURS, "link", 3, name, "b")) for name in names]
        assert street.attend() == []
        assert [call.advance() for call in calls] == ["b"] * 40
        assert sorted(street.attend()) == sorted(names)


def test_a_stranger_makes_room_when_there_are_no_descriptors(
    street: Street, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "_SHORTAGE_S", 0.0)
    strangers = [street.call(b"bamboo-2") for _ in range(3)]
    assert street.attend() == []
    monkeypatch.setattr(Listener, "shortage", 5)
    member = Handshake(street.call(), calling(OURS, "link", 3, "a", "b"))
    assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    for stranger in strangers:
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""
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
        struct.pack("<8s8sq32sH", b"bamboo-2", b"store", 3, bytes(32), 1) + b"a",
        struct.pack("<8s8sq32sH", b"bamboo-2", b"link", 3, bytes(32), 65535) + b"a" * 65535,
        struct.pack("<8s8sq32sH", b"bamboo-2", b"link", 3, bytes(32), 1) + b"a" + bytes(32),
    ],
    ids=["http", "noise", "other purpose", "long name", "no proof"],
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
        member = Handshake(caller, calling(OURS, "link", 3, "a", "b"))
        assert street.attend() == [] and member.advance() == "b" and street.attend() == ["a"]
    again = street.call(b"".join(words))
    assert street.attend() == []
    again.settimeout(10)
    assert len(again.recv(64)) == 64  # another nonce
    assert again.recv(1) == b""


def test_the_store_of_an_epoch_admits_members_only() -> None:
    server = Server("127.0.0.1", 7, OURS, "a", ("a", "b"))
    try:
        place = ("127.0.0.1", server.port)

        def client(own: JobSecret, member: str, host: str = "a") -> Client:
            connection = socket.create_connection(place)
            opened.append(connection)
            return Client(connection, 7, timedelta(seconds=10), own, member, host)

        opened: list[socket.socket] = []
        member = client(OURS, "b")
        silent = [socket.create_connection(place) for _ in range(4)]
        opened += silent
        for own, name, host in ((NONE, "a", "a"), (OTHER, "b", "a"), (OURS, "x", "a"), (OURS, "b", "x")):
            with pytest.raises(ConnectionError):
                client(own, name, host)
        flood = socket.create_connection(place)
        opened.append(flood)
        with pytest.raises(ConnectionError):
            flood.sendall(b"[" * (1 << 26))
        member.call("set", key="k", value="v")
        member._send({"op": "set", "n": 1, "key": "deep", "value": None})
        assert member.call("get", keys=["k"]) == ["v"] and member.call("count") == 2
        nested = b'{"op":' + b"[" * 200_000
        member._connection.sendall(struct.pack("<I", len(nested)) + nested)
        with pytest.raises(ConnectionError):
            member.call("count")
        assert client(OURS, "a").call("get", keys=["k"]) == ["v"]  # its thread lives
    finally:
        for connection in opened:
            connection.close()
        server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "bamboo-store"]
