"""Where whole pipelines meet that train with each other as long as they are there (sample dropping).

A step is done by the pipelines all of whose stages have sent their gradients, when no other living one is missing. Each
gets the mean, stage by stage, summed up in the order of slots. A pipeline that comes gets the state of a living one
between two steps; without one, the newest saved state.
"""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Sent:
    step: int
    gradients: bytes


@dataclass(eq=False)
class _Pipeline:
    """The connections of a pipeline's stages, as far as they are there.

    Attributes:
        live: it takes part in steps; before that it waits for a state.
        sent: what its stages have sent of the current step.
    """

    stages: dict[int, socket.socket] = field(default_factory=dict)
    live: bool = False
    sent: dict[int, _Sent] = field(default_factory=dict)
    state: dict[int, bytes] = field(default_factory=dict)
    asked: bool = False


class Hub:
    """Serves pipelines until it is closed.

    Attributes:
        address: where it listens.
        steps: (number, slots of the pipelines that took part) in the order in which they were agreed on.
        problems: what must not be.
        checks: digests of weights that were compared with one that was there before.

    Args:
        stages: of every pipeline.
        every: steps between two saved states.
        first: pipelines that the first step waits for.
    """

    def __init__(self, stages: int, every: int, first: int) -> None:
        self._stages, self._every, self._first = stages, every, first
        self._lock = threading.Lock()
        self._pipelines: dict[int, _Pipeline] = {}
        self._saved: tuple[int, dict[int, bytes]] | None = None
        self._digests: dict[tuple[int, int], str] = {}
        self._closing = False
        self.steps: list[tuple[int, tuple[int, ...]]] = []
        self.problems: list[str] = []
        self.checks = 0
        self._step = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)
        self._thread.start()

    @property
    def saved_step(self) -> int:
        """The newest step whose state is saved; -1 if there is none."""
        return -1 if self._saved is None else self._saved[0]

    def drop(self, slot: int) -> None:
        """The pipeline is gone."""
        with self._lock:
            gone = self._pipelines.pop(slot, None)
            for connection in gone.stages.values() if gone else ():
                connection.close()
            self._go_on()

    def close(self) -> None:
        """End all connections and threads."""
        self._closing = True
        self._listener.close()
        for slot in list(self._pipelines):
            self.drop(slot)

    # -- threads --------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._attend, args=(connection,), daemon=True).start()

    def _attend(self, connection: socket.socket) -> None:
        """Until the other end is gone. The supervisor sees the end of its process, and drops the pipeline."""
        with connection, connection.makefile("rb") as stream:
            try:
                hello = json.loads(stream.readline())
                slot, stage = hello["slot"], hello["stage"]
                with self._lock:
                    pipeline = self._pipelines.setdefault(slot, _Pipeline())
                    pipeline.stages[stage] = connection
                    self._go_on()
                while line := stream.readline():
                    words = json.loads(line)
                    content = stream.read(words["bytes"])
                    with self._lock:
                        if self._pipelines.get(slot) is pipeline and len(content) == words["bytes"]:
                            self._take(pipeline, stage, words, content)
            except (OSError, ValueError):  # killed while it was sending, or closed by drop()
                return

    # -- with the lock --------------------------------------------------------------------------------------

    def _take(self, pipeline: _Pipeline, stage: int, words: dict[str, Any], content: bytes) -> None:
        if "digest" not in words:
            pipeline.state[stage] = content
        else:
            pipeline.sent[stage] = _Sent(words["step"], content)
            key = words["step"], stage
            self.checks += key in self._digests
            if self._digests.setdefault(key, words["digest"]) != words["digest"]:
                self.problems.append(f"weights of stage {stage} differ before step {words['step']}")
        self._go_on()

    def _go_on(self) -> None:
        """Do what can be done now."""
        live = {slot: p for slot, p in sorted(self._pipelines.items()) if p.live}
        for pipeline in live.values():
            if len(pipeline.state) == self._stages:
                self._saved, pipeline.state, pipeline.asked = (self._step, pipeline.state), {}, False
        waiting = [p for p in self._pipelines.values() if not p.live and len(p.stages) == self._stages]
        if len(waiting) >= self._first and (not live or self.saved_step == self._step):
            self._first = 1
            # With others: their state of just now. Without: that of the last checkpoint, or the weights they have.
            if not live:
                self._step = max(0, self.saved_step)
                self._digests = {key: value for key, value in self._digests.items() if key[0] <= self._step}
            for pipeline in waiting:
                self._admit(pipeline)
            live = {slot: p for slot, p in sorted(self._pipelines.items()) if p.live}
        if not live or any(p.asked for p in live.values()):
            return
        if all(len(p.sent) == self._stages for p in live.values()):
            self._commit(live)

    def _admit(self, pipeline: _Pipeline) -> None:
        pipeline.live = True
        for stage, connection in pipeline.stages.items():
            content = b"" if self._saved is None else self._saved[1][stage]
            _send(connection, {"step": self._step}, content)

    def _commit(self, live: dict[int, _Pipeline]) -> None:
        self._step += 1
        self.steps.append((self._step, tuple(live)))
        waits = any(not p.live and len(p.stages) == self._stages for p in self._pipelines.values())
        wanted = waits or self._step % self._every == 0
        donor = min(live)
        for stage in range(self._stages):
            mean = _mean([p.sent[stage].gradients for p in live.values()])
            for slot, pipeline in live.items():
                words = {"pipelines": len(live), "state": wanted and slot == donor}
                _send(pipeline.stages[stage], words, mean)
        for pipeline in live.values():
            pipeline.sent = {}
        live[donor].asked = wanted


def _mean(parts: list[bytes]) -> bytes:
    import torch

    tensors = [torch.frombuffer(bytearray(part), dtype=torch.float32) for part in parts]
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    mean: bytes = (total / len(tensors)).numpy().tobytes()
    return mean


def _send(connection: socket.socket, words: dict[str, Any], content: bytes) -> None:
    try:
        connection.sendall(json.dumps({**words, "bytes": len(content)}).encode() + b"\n" + content)
    except OSError:  # its process is gone, which the supervisor sees
        return
