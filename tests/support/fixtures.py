"""Pytest fixtures around etcd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bamboo_ds.store.client import Store

from .etcd import EtcdServer, new_namespace


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A running etcd shared by the tests of a module that do not hurt it."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd for one test to hurt."""
    with EtcdServer(tmp_path) as server:
        yield server


@pytest.fixture
def store(etcd: EtcdServer) -> Iterator[Store]:
    """A store with a namespace of its own."""
    with Store([etcd.url], namespace=new_namespace()) as one:
        yield one
