"""Clients of a job's page and metrics."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from .patience import Patience

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def ask(
    url: str, path: str, token: str | None = None, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of an answer. Redirections are not followed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30.0)
    try:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def seen(url: str, token: str) -> dict[str, Any]:
    """The view of the job."""
    status, _, body = ask(url, "/api/view", token)
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


def served_at(url: str) -> bool:
    """Whether there is a server."""
    try:
        return ask(url, "/healthz")[0] == 200
    except OSError:
        return False


def parsed(text: str) -> Samples:
    """Samples of an exposition by name and labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def scraped(url: str, token: str) -> Samples:
    """What Prometheus would get."""
    patience, pause = Patience(20.0), threading.Event()
    status, headers, body = ask(url, "/metrics", token)
    while status == 503 and not patience.over():  # a new leader reads the events
        pause.wait(0.05)
        status, headers, body = ask(url, "/metrics", token)
    assert status == 200, body
    assert headers["Content-Type"].startswith("text/plain")
    return parsed(body.decode())


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def counters(samples: Samples) -> Samples:
    """Those that must never go back."""
    ends = ("_total", "_count", "_sum", "_bucket")
    return {key: number for key, number in samples.items() if key[0].endswith(ends)}


def gone_back(before: Samples, after: Samples) -> list[Any]:
    """Counters that are less than they were."""
    return [(key, was, after.get(key)) for key, was in counters(before).items() if after.get(key, -1.0) < was]


def streamed(url: str, token: str) -> Iterable[dict[str, Any]]:
    """The data of server-sent events, until the server ends."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20.0)
    try:
        connection.request("GET", "/api/stream", headers={"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
    finally:
        connection.close()
