"""The store with user and password, and with TLS."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import grpc
import pytest

from bamboo_ds.errors import StoreError, StoreUnavailable
from bamboo_ds.store.client import Store
from bamboo_ds.store.connection import rpc
from bamboo_ds.store.records import TlsFiles
from tests.support.etcd import (
    EtcdServer,
    Recorder,
)

pytestmark = [pytest.mark.claim("reference/cli.md"), pytest.mark.integration, pytest.mark.usefixtures("leak_gate")]


def enable_auth(server: EtcdServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=(("grpc.enable_http_proxy", 0),)) as channel:
        auth = rpc.AuthStub(channel)
        auth.UserAdd(rpc.AuthUserAddRequest(name="root", password="rootpw"), timeout=5)
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"), timeout=5)
        auth.RoleAdd(rpc.AuthRoleAddRequest(name="job"), timeout=5)
        permission = rpc.auth__pb2.Permission if hasattr(rpc, "auth__pb2") else None
        if permission is None:
            from etcd3.etcdrpc import auth_pb2

            permission = auth_pb2.Permission
        grant = permission(permType=permission.READWRITE, key=b"/bamboo/j/", range_end=b"/bamboo/j0")
        auth.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="job", perm=grant), timeout=5)
        auth.UserAdd(rpc.AuthUserAddRequest(name="job", password="geheim"), timeout=5)
        auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="job", role="job"), timeout=5)
        auth.AuthEnable(rpc.AuthEnableRequest(), timeout=5)


def refusal(url: str, tls: TlsFiles | None) -> str:
    """Why etcd does not answer at ``url``; a machine with much to do needs longer to find out."""
    for timeout_s in (1.0, 30.0):
        store = Store([url], namespace="/bamboo/j/", tls=tls, timeout_s=timeout_s)
        with store, pytest.raises(StoreUnavailable) as caught:
            store.get("a")
        if "last: deadline exceeded" not in str(caught.value):
            break
    return str(caught.value)


def test_user_and_password(tmp_path: Path) -> None:
    with EtcdServer(tmp_path, ["--bcrypt-cost", "4"]) as server:
        with Store([server.url], namespace="/bamboo/j/", user="job", password="geheim") as store:
            assert store.create("before", "1")  # a password where none is needed
        enable_auth(server)
        with Store([server.url], namespace="/bamboo/j/", user="job", password="geheim") as store:
            seen = Recorder()
            watch = store.watch("", seen)
            lease = store.lease(30)
            assert store.create("leader", "me", lease) and lease.refresh()
            seen.wait_for("put", "leader")
            assert store.get("leader") is not None  # what it has acknowledged is on the disk now
            server.restart()  # makes every token invalid
            store.put("plan", "1")
            seen.wait_for("put", "plan")
            assert watch.error is None
            lease.revoke()
            seen.wait_for("delete", "leader")
            assert "geheim" not in repr(vars(store)) + repr(store)
        with Store([server.url], namespace="/bamboo/j/", user="job", password="falsch") as store:
            with pytest.raises(StoreError, match="'job'") as caught:
                store.get("plan")
            assert "falsch" not in str(caught.value)
        with (
            Store([server.url], namespace="/bamboo/j/") as store,
            pytest.raises(StoreError, match="user name is empty"),
        ):
            store.get("plan")
        with (
            Store([server.url], namespace="/other/", user="job", password="geheim") as store,
            pytest.raises(StoreError, match="permission"),
        ):
            store.put("a", "1")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)


def certificates(folder: Path) -> None:
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, *new, "-x509", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl(folder, *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl(
            folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "san", "-out", f"{name}.pem"),
        )


def test_tls_with_client_certificate(tmp_path: Path, etcd: EtcdServer) -> None:
    try:
        certificates(tmp_path)
    except FileNotFoundError:
        pytest.skip("needs the openssl command")
    flags = ["--client-cert-auth"]
    for flag, name in (
        ("cert-file", "server.pem"),
        ("key-file", "server.key"),
        ("trusted-ca-file", "ca.pem"),
    ):
        flags += [f"--{flag}", str(tmp_path / name)]
    files = TlsFiles(ca=tmp_path / "ca.pem", cert=tmp_path / "client.pem", key=tmp_path / "client.key")
    with EtcdServer(tmp_path, flags, scheme="https") as server:
        with Store([server.url], namespace="/bamboo/j/", tls=files, timeout_s=20.0) as store:
            seen = Recorder()
            store.watch("", seen)
            assert store.create("a", "1")
            seen.wait_for("put", "a")
        # Neither without the client's certificate nor in plain text, nor with other mistakes.
        for url, tls, cure in (
            (server.url, TlsFiles(ca=files.ca), "set BAMBOO_STORE_CERT and BAMBOO_STORE_KEY"),
            (server.url.replace("https", "http"), None, "write https://"),
            (server.url, None, "another authority than BAMBOO_STORE_CA holds"),
            (server.url.replace("127.0.0.1", "localhost"), files, r"other names than --store \(BAMBOO_STORE\) has"),
            (etcd.url.replace("http", "https"), files, "write http://"),
        ):
            assert re.search(cure, refusal(url, tls))
