"""The package's own rules that linters do not know."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        ("import bamboo_ds, bamboo_ds.config", "torch deepspeed grpc etcd3 hjson"),
        ("import bamboo_ds.worker.channel", "torch grpc etcd3"),
        ("import bamboo_ds.control.web.server, bamboo_ds.control.web.display", "torch"),
        (
            "from bamboo_ds.config import NoticesConfig\n"
            "from bamboo_ds.control.loop import AgentLoop\n"
            "from bamboo_ds.control.notices import NoticeWatcher, build_sources\n"
            "sources = ['aws', 'gcp', 'azure', 'file', 'http', 'nvml']\n"
            "assert len(build_sources(NoticesConfig(sources=sources, file='/f', url='http://h/'), {})) == 6\n"
            "watcher = NoticeWatcher([], print, AgentLoop())\n"
            "watcher.start()\n"
            "watcher.stop()",
            "torch aiohttp pynvml",
        ),
    ],
    ids=["the package", "a worker's channel", "the web server", "notices without a source"],
)
def test_what_is_not_imported(code: str, unwanted: str) -> None:
    """Every process of a job would wait for it."""
    told = f"{code}\nimport sys; print(*sorted({set(unwanted.split())} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"
