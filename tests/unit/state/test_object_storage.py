"""Checkpoints in a store of objects: what is listed is whole, and what nobody goes on with is removed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from bamboo_ds.config import parse_block
from bamboo_ds.errors import ConfigError
from bamboo_ds.observe.logs import LOGGER
from bamboo_ds.state.checkpoints import SaveRecord
from bamboo_ds.state.own import own_location
from bamboo_ds.state.storage.client import StorageError, check_storage
from tests.support.savers import LAYOUT, members

__all__ = ["members"]  # a fixture

pytestmark = pytest.mark.claim("guides/checkpoints.md", "reference/limits.md")


@pytest.fixture
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a prefix in this process's memory."""
    # Its own property hinders a writer of the same file for a moment.
    monkeypatch.setattr(MemoryFile, "size", property(lambda file: len(file.getvalue())))
    yield f"memory://{request.node.name.partition('[')[0]}/run"
    fsspec.filesystem("memory").store.clear()


def record(step: int, save_id: str, **more: Any) -> SaveRecord:
    return SaveRecord(job="job", save_id=save_id, tag=f"step{step}", step=step, layout=LAYOUT, **more)


# -- settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA123:s3cr3t@bucket/run",
        "s3://AKIA123:s3/cr3t@bucket/run",
        "gs://token-s3cr3t@bucket/run",
        "abfs://container:s3cr3t@account.dfs.core.windows.net/run",
        "az://container/run?sig=s3cr3t",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"bamboo\.checkpoint\.dir") as error:
        parse_block({"checkpoint": {"dir": url}})
    assert "must not have credentials" in str(error.value) and "AWS_ACCESS_KEY_ID" in str(error.value)
    assert "cr3t" not in str(error.value) and "cr3t" not in str(error.value.__cause__)


@pytest.mark.parametrize("url", ["s3://bucket", "gs://b/p/", "abfs://container@account.dfs.core.windows.net/run"])
def test_urls_that_are_taken(url: str) -> None:
    assert parse_block({"checkpoint": {"dir": url}}).checkpoint.dir == url.rstrip("/")
    assert own_location(url, "j") == f"{url.rstrip('/')}/.bamboo-own/j"


def test_a_package_that_is_missing_is_named_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r'bamboo.checkpoint.dir.*nosuch.*pip install "bamboo_ds\[storage\]"'):
        check_storage("nosuch://bucket/run", "bamboo.checkpoint.dir", True)


@pytest.mark.parametrize(
    ("error", "cure"),
    [
        (PermissionError("Access Denied"), "permissions to list, read, write and delete"),
        (FileNotFoundError("no such bucket"), "create the bucket"),
        (RuntimeError("no route"), "Is its endpoint right"),
    ],
)
def test_a_store_that_refuses(
    url: str, monkeypatch: pytest.MonkeyPatch, error: Exception, cure: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Ends the job before its first step; later it is a warning."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.pipe_file", refuse)
    with pytest.raises(ConfigError, match=cure) as told:
        check_storage(url, "bamboo.checkpoint.dir", True)
    assert "bamboo.checkpoint.dir" in str(told.value) and isinstance(told.value.__cause__, StorageError)
    check_storage(url, "bamboo.checkpoint.dir", False)
    (record,) = [each for each in caplog.records if each.name == LOGGER]
    assert cure in record.getMessage() and "bamboo.checkpoint.dir" in record.getMessage()
