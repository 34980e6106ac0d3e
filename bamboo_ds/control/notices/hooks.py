"""Notices for every other cloud: a file that somebody writes, or a URL that somebody serves."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field

from .notice import Notice, NoticeKind, NoticeSource
from .transport import MAX_ANSWER, SourceBroken, SourceSilent, parse_json, request

if TYPE_CHECKING:
    import aiohttp


class HookPayload(BaseModel):
    """A hook's answer, a JSON object; every key is optional, and unknown ones are ignored.

    Attributes:
        kind: see :class:`~.notice.Notice`.
        detail: reason, for the log.
        deadline_s: seconds until the node vanishes.
        id: tells notices of the same kind and detail apart.
    """

    kind: NoticeKind = "leave"
    detail: str = ""
    deadline_s: float | None = Field(None, ge=0, allow_inf_nan=False)
    id: str = ""

    def notice(self, source: str, where: str, appearance: str = "") -> Notice:
        """The notice that was found at ``where``."""
        return Notice(
            self.kind,
            source,
            self.detail or f"asked by {where}",
            self.deadline_s,
            vanishes=self.kind != "rebalance",
            key="\n".join((self.kind, self.detail, self.id, appearance)),
        )


class FileSource(NoticeSource):
    """A notice is the existence of a file, empty or with a :class:`HookPayload`.

    Each rewriting of the file is a new notice. A writer who wants to be read once writes another file and
    renames it.
    """

    name = "file"

    def __init__(self, path: str) -> None:
        self.where = path

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        # In a thread: a file system may hang.
        found = await asyncio.to_thread(self._read)
        if found is None:
            return None
        contents, appearance = found
        payload = parse_json(HookPayload, contents, self.where) if contents.strip() else HookPayload()
        return payload.notice(self.name, self.where, appearance)

    def _read(self) -> tuple[bytes, str] | None:
        """The file's contents and what tells this version of it from others; ``None``: there is no file."""
        try:
            # Non-blocking: opening a FIFO would wait for its writer.
            descriptor = os.open(self.where, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceSilent(f"cannot open {self.where}: {error}") from error
        try:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise SourceBroken(f"{self.where} is not a regular file")
            contents = os.read(descriptor, MAX_ANSWER + 1)
        except OSError as error:
            raise SourceSilent(f"cannot read {self.where}: {error}") from error
        finally:
            os.close(descriptor)
        if len(contents) > MAX_ANSWER:
            raise SourceBroken(f"{self.where} is longer than {MAX_ANSWER} bytes")
        return contents, f"{about.st_ino} {about.st_mtime_ns} {about.st_size}"


class HttpSource(NoticeSource):
    """A notice is a :class:`HookPayload` that a URL answers with 200; 204 and 404 say that there is none.

    Notices that differ by their deadline only are the same one.
    """

    name = "http"

    def __init__(self, url: str) -> None:
        self.where = url

    async def poll(self, session: aiohttp.ClientSession) -> Notice | None:
        answer = (await request(session, "GET", self.where)).expect(200, 204, 404)
        if answer.status != 200:
            return None
        return answer.parse(HookPayload).notice(self.name, self.where)
