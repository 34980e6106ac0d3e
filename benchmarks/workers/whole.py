"""Worker of spot.py: a whole pipeline of stock DeepSpeed that trains with others which come and go.

Pipelines have the same weights, and step with the mean of the gradients of those that are there. Who they are is agreed
on once per step: with ``--hub`` by the supervisor of spot.py (sample dropping), with ``--lighthouse`` by torchft. Knows
nothing of bamboo.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.runtime.pipe import schedule
from spotted import Journal, build, micro_batches, options

#: Seconds for the others to answer, which may have to start first.
PATIENCE_S = 600.0


class State:
    """Weights and optimizer of a stage, as one flat fp32 tensor: of BF16_Optimizer, or of Adam over fp32 weights."""

    def __init__(self, engine: Any) -> None:
        self._sharded = engine.optimizer if hasattr(engine.optimizer, "fp32_groups_flat_partition") else None
        self._adam = engine.optimizer.optimizer if self._sharded else engine.optimizer
        groups = self._adam.param_groups
        self._weights = [weights for group in groups for weights in group["params"]]

    @property
    def _gradients(self) -> list[torch.Tensor]:
        if self._sharded:
            return list(self._sharded.fp32_groups_gradients_flat)
        return [weights.grad for weights in self._weights]

    def gradients(self) -> torch.Tensor:
        """(n,): a copy of the accumulated gradients."""
        return torch.cat([gradient.reshape(-1) for gradient in self._gradients])

    def set_gradients(self, flat: torch.Tensor) -> None:
        """Step with these."""
        for mine in self._gradients:
            mine.copy_(flat[: mine.numel()].view_as(mine))
            flat = flat[mine.numel() :]

    def save(self) -> torch.Tensor:
        """(3 n + k,): of k tensors the weights, Adam's moments and its number of steps; zeros before the first one."""
        parts = []
        for weights in self._weights:
            adam = self._adam.state.get(weights, {})
            zeros, step = torch.zeros_like(weights), adam.get("step", torch.zeros(()))
            parts += [weights.detach(), adam.get("exp_avg", zeros), adam.get("exp_avg_sq", zeros), step.reshape(1)]
        return torch.cat([part.detach().reshape(-1).float() for part in parts])

    def load(self, flat: torch.Tensor) -> None:
        """What :meth:`save` gave."""
        for weights in self._weights:
            n = weights.numel()
            mine, moment, square, step, flat = flat.split([n, n, n, 1, flat.numel() - 3 * n - 1])
            weights.data.copy_(mine.view_as(weights))
            if step.item():
                self._adam.state[weights] = {
                    "step": step.reshape(()).clone(),
                    "exp_avg": moment.clone().view_as(weights),
                    "exp_avg_sq": square.clone().view_as(weights),
                }
        if self._sharded:
            self._sharded.update_lp_params()

    def digest(self) -> str:
        """Of the weights."""
        whole = torch.cat([weights.detach().reshape(-1) for weights in self._weights])
        return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]

    def drop_gradients(self) -> None:
        """Forget them: there is no step."""
        if self._sharded:
            self._sharded.clear_hp_grads()
        else:
            self._adam.zero_grad()


class Connection:
    """Messages of a line of JSON and so many bytes."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._stream = connected.makefile("rb")

    def send(self, words: dict[str, Any], tensor: torch.Tensor | None = None) -> None:
        """Send one; ``tensor`` is fp32."""
        content = b"" if tensor is None else tensor.numpy().tobytes()
        self.socket.sendall(json.dumps({**words, "bytes": len(content)}).encode() + b"\n" + content)

    def receive(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The next one; raises :class:`ConnectionError` if there is none."""
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise ConnectionError("the other end is gone")
        words = json.loads(line)
        content = self._stream.read(words["bytes"])
        if len(content) != words["bytes"]:
            raise ConnectionError("the other end is gone")
        return words, torch.frombuffer(bytearray(content), dtype=torch.float32) if content else None


class HubPeers:
    """The supervisor knows who is there, averages, and passes states on."""

    def __init__(self, state: State, slot: int, stage: int, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._state = state
        self._hub = Connection(socket.create_connection((host, int(port)), PATIENCE_S))
        self._hub.send({"slot": slot, "stage": stage})
        words, tensor = self._hub.receive()
        if tensor is not None:
            state.load(tensor)
        self.step: int = words["step"]
        self.pipelines = 0
        self._wanted = False

    def begin(self) -> None:
        """A step begins."""

    def agree(self) -> bool:
        """Make the gradients those of all pipelines; whether there is a step."""
        words = {"step": self.step + 1, "digest": self._state.digest()}
        self._hub.send(words, self._state.gradients())
        answer, mean = self._hub.receive()
        assert mean is not None
        self._state.set_gradients(mean)
        self.pipelines, self._wanted = answer["pipelines"], answer["state"]
        return True

    def end(self) -> None:
        """The step is done."""
        self.step += 1
        if self._wanted:
            self._hub.send({"step": self.step}, self._state.save())


def exchange_before_step(engine: Any, state: State, peers: Any) -> None:
    """Have the engine agree with the other pipelines before each optimizer step."""
    handlers = dict(engine.HANDLERS)
    stock = handlers[schedule.OptimizerStep]

    def step(self: Any, *arguments: Any, **keywords: Any) -> None:
        if peers.agree():
            stock(self, *arguments, **keywords)
        else:
            state.drop_gradients()

    handlers[schedule.OptimizerStep] = step
    type(engine).HANDLERS = handlers


def main() -> None:
    """Train until killed."""
    parser = options()
    parser.add_argument("--slot", type=int, required=True, help="which of the pipelines' samples it trains")
    parser.add_argument("--hub", help="address of the supervisor")
    parser.add_argument("--lighthouse", help="address of torchft's")
    parser.add_argument("--checkpoint", type=Path, help="folder of states, for a start without others")
    parser.add_argument("--meet", type=int, default=1, help="groups that the first step waits for")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    rank = int(os.environ["RANK"])
    journal = Journal(arguments.out / "journal.jsonl") if rank == 0 else None
    engine = build(arguments)
    state = State(engine)
    if arguments.hub:
        peers: Any = HubPeers(state, arguments.slot, rank, arguments.hub)
    else:
        from fault_tolerant import TorchftPeers

        peers = TorchftPeers(engine, state, arguments)
    exchange_before_step(engine, state, peers)
    per_step = engine.gradient_accumulation_steps() * arguments.shares
    ends = engine.is_first_stage() or engine.is_last_stage()
    if journal:
        journal.tell("ready", step=peers.step)
    while peers.step < arguments.steps:
        begin = time.time()
        peers.begin()
        size = engine.train_micro_batch_size_per_gpu()
        first = peers.step * per_step
        data = micro_batches(arguments.slot, arguments.shares, arguments.shares, size, first) if ends else None
        before = peers.step
        loss = float(engine.train_batch(data_iter=data))
        peers.end()
        if journal:
            journal.tell(
                "step" if peers.step > before else "failed",
                step=peers.step,
                begin=begin,
                loss=loss,
                pipelines=peers.pipelines,
                slot=arguments.slot,
                digest=state.digest(),
            )


if __name__ == "__main__":
    main()
