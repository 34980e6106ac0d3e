"""A stranger to a job: another user of its host, or another host of its network. Executed as a file.

Usage: ``stranger.py [UID]``. Every line of standard input is JSON that tells where the job's processes listen, and all
about it that is no secret. The stranger tries what could do harm with that, again and again, until its input ends. For
every attempt it prints a line of JSON: what, where, and what came of it (``refused``, ``no answer``, or how it
succeeded). Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import select
import socket
import ssl
import struct
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

#: Seconds without an answer.
PATIENCE_S = 1.0
#: Connections that are held open at each port.
SILENT = 4


def tag(*parts: str | bytes | int) -> bytes:
    """What a job without a secret takes for proof."""
    digest = hmac.new(b"", digestmod=hashlib.sha256)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


class Stranger:
    """Makes attempts and tells what they come to."""

    def __init__(self) -> None:
        self._silent: dict[tuple[str, int], list[socket.socket]] = {}
        self._mute: set[object] = set()  # where nobody answers: gloo's

    def attempt(self, what: str, where: object, deed: Callable[[], str | None]) -> None:
        """Do it; ``deed`` returns how it succeeded, or ``None``."""
        try:
            came = deed() or "refused"
        except TimeoutError:
            came = "no answer"
            self._mute.add(where)
        except (OSError, http.client.HTTPException):
            came = "refused"
        print(json.dumps({"what": what, "where": str(where), "came": came}), flush=True)

    def everything(self, targets: dict[str, Any]) -> None:
        """One round."""
        for path in targets["files"]:
            self.attempt("read a file", path, partial(self.read, path))
        for host, port, member in targets["ports"]:
            place = host, port
            if place in self._mute:
                continue
            self.hold(place)
            others = [other for other in targets["members"] if other != member]
            told = others[0] if others else "x", member
            token, epoch = targets["tokens"].get(member, ""), targets["epoch"]
            nested, much = b"[" * 200_000, frame(epoch, b"store/ask") + b"x" * (60 << 20)
            old = struct.pack("<8s8sq32sH", b"bamboo-2", b"link", epoch, bytes(32), len(told[0])) + told[0].encode()
            over = frame(epoch, b"", kind=3)
            for what, deed in (
                ("send nested JSON", partial(self.say, place, frame(epoch, b"store/ask", len(nested)) + nested)),
                ("say an old hello", partial(self.say, place, old)),
                ("fill the memory", partial(self.say, place, introduction(token, *told) + much)),
                ("end the epoch", partial(self.say, place, introduction(token, *told) + over)),
                ("take a member's place", partial(self.introduce, place, token, *told, over)),
                ("take a member's place", partial(self.introduce, place, "", *told, over)),
            ):
                self.attempt(what, place, deed)
        for host, port, token, member in targets["servers"]:
            deed = partial(self.download, (host, int(port)), token, member, targets["key"].encode())
            self.attempt("download state", (host, int(port)), deed)
        for url in targets["etcd"]:
            for what, path, body in self.etcd_deeds(targets["records"]):
                self.attempt(what, url, partial(self.ask_etcd, url, path, body))

    def read(self, path: str) -> str:
        with open(path, "rb") as file:
            return f"{len(file.read())} bytes"

    # -- connections ----------------------------------------------------------------------------------
    def hold(self, place: tuple[str, int]) -> None:
        """Connect and say nothing."""
        held = self._silent.setdefault(place, [])
        while len(held) < SILENT:

            def connect() -> None:
                held.append(socket.create_connection(place, PATIENCE_S))

            before = len(held)
            self.attempt("be silent", place, connect)
            if len(held) == before:
                return  # it is closed by now

    def say(self, place: tuple[str, int], words: bytes) -> str | None:
        with socket.create_connection(place, PATIENCE_S) as connection:
            connection.sendall(words)
            return answered(connection.recv(64))

    def introduce(self, place: tuple[str, int], token: str, caller: str, host: str, after: bytes) -> str | None:
        """As a member of the newest plan, towards another one; ``token`` is that one's."""
        nonce = os.urandom(32)
        with socket.create_connection(place, PATIENCE_S) as connection:
            connection.sendall(introduction(token, caller, host, nonce))
            answer = b""
            while len(answer) < 64 and (piece := connection.recv(64 - len(answer))):
                answer += piece
            if len(answer) < 64 or not answered(answer):
                return answered(answer)
            connection.sendall(tag("caller", "wire", token, caller, host, nonce, answer[:32]) + after)
            try:
                return answered(connection.recv(1))
            except TimeoutError:
                return "it is believed: the connection stays"

    def download(self, place: tuple[str, int], token: str, host: str, key: bytes) -> str | None:
        """Ask for state, with the token that is in etcd."""
        nonce, facts = os.urandom(32), (b"bulk", token, "x", host)
        with socket.create_connection(place, PATIENCE_S) as connection:
            connection.sendall(struct.pack("<8s8s32sH", b"bamboo-3", b"bulk", nonce, 1) + b"x")
            connection.sendall(tag("hello", *facts, nonce))
            own = connection.recv(32)
            if not own:
                return None
            connection.sendall(tag("caller", *facts, nonce, own))
            words = struct.pack("<3q", *(11, 0, 0))  # an integer: from the beginning
            head = struct.pack("<BBHIqqq", 0, 1, len(key), 1, 0, 0, len(key) + len(words)) + key + words
            connection.sendall(head.ljust(256, b"\0") + bytes(8))
            return f"an answer of {len(connection.recv(64))} bytes"

    # -- etcd -----------------------------------------------------------------------------------------
    def etcd_deeds(self, records: dict[str, str]) -> Iterator[tuple[str, str, dict[str, str]]]:
        def encoded(text: str) -> str:
            return b64encode(text.encode()).decode()

        yield "list all keys", "/v3/kv/range", {"key": encoded("/bamboo/"), "range_end": encoded("/bamboo0")}
        for key, value in records.items():
            yield "write to etcd", "/v3/kv/put", {"key": encoded(key), "value": encoded(value)}

    def ask_etcd(self, url: str, path: str, body: dict[str, str]) -> str | None:
        connection: http.client.HTTPConnection
        if url.startswith("unix://"):
            connection = http.client.HTTPConnection("localhost", timeout=PATIENCE_S)
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(url.removeprefix("unix://"))
        elif url.startswith("bamboo://"):
            tls = ssl._create_unverified_context()
            connection = http.client.HTTPSConnection(urlsplit(url).netloc, timeout=PATIENCE_S, context=tls)
        else:
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            return connection.getresponse().read()[:200].decode(errors="replace")


def introduction(token: str, caller: str, host: str, nonce: bytes = bytes(32)) -> bytes:
    """The first words of a member to another, with the proof of a job without a secret."""
    name, proof = caller.encode(), tag("hello", "wire", token, caller, host, nonce)
    return struct.pack("<8s8s32sH", b"bamboo-3", b"wire", nonce, len(name)) + name + proof


def frame(epoch: int, key: bytes, size: int = 60 << 20, kind: int = 0) -> bytes:
    """The block with which a message of ``size`` bytes begins that says to be of the epoch; kind 3: that it is over."""
    tensors = b"" if kind else key + struct.pack("<4q", 7, 0, 1, size)
    return (
        struct.pack("<BBHIqqq", kind, 0 if kind else 1, len(key), not kind, 1, epoch, len(tensors)) + tensors
    ).ljust(256, b"\0")


def answered(answer: bytes) -> str | None:
    """What success it is; a server of HTTP refuses in words."""
    refused = answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    return answer.hex() if answer and not refused else None


def main(uid: str = "") -> None:
    """Attack until the input ends."""
    "localhost".encode("idna")  # loads what a stranger may not be able to read
    if uid:
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    stranger, heard = Stranger(), b""
    while True:
        ready = bool(select.select([0], [], [], 0.05)[0])
        data = os.read(0, 1 << 20) if ready else b""
        if ready and not data:
            return
        heard = heard[heard.rfind(b"\n", 0, -1) + 1 :] + data
        if heard.endswith(b"\n"):
            stranger.everything(json.loads(heard.splitlines()[-1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
