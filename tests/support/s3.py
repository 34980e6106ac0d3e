"""A server of S3 on this host (moto), which tests kill and start again."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import fsspec

from .etcd import wait_until
from .ports import free_port

BUCKET = "checkpoints"
#: Not to be found in anything that a job leaves behind.
SECRET = "bamboo-test-secret-7f3a"
SERVER = """
import sys
from moto.server import main
main(["-H", "127.0.0.1", "-p", sys.argv[1]])
"""


class S3Server:
    """A server with a bucket. What is in it is gone when it ends.

    Attributes:
        variables: by which processes find it, and may use it.
    """

    def __init__(self, folder: Path) -> None:
        self.port, self._log = free_port(), folder / "s3.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.variables = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "bamboo-test-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, with an empty bucket."""
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(self.port)], stdout=log, stderr=subprocess.STDOUT
            )
        wait_until(self._answers, "the server of S3 answers", 60.0)
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self._log.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        # Clients are kept by their arguments, among which is no endpoint: the next server would be asked at this one's.
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def keys(url: str) -> list[str]:
    """Names of all objects below ``url``."""
    from bamboo_ds.state.storage.client import Objects

    return sorted(Objects(url).find())
