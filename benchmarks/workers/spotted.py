"""Worker of spot.py: a pipeline of emulated devices over real samples. Knows nothing of bamboo.

The parameters, samples and losses are real; only time is emulated: a layer holds its "device" for a set time without
using the CPU. The batch of a step has the same samples however many pipelines and stages there are, in the same
micro-batches: where the number of pipelines is the same, the losses are the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from emulated import Hold, ended
from torch import nn

WIDTH = 16

# An optimizer of DeepSpeed's that is not used here would import torch's compiler, for seconds at every start.
_compile, torch.compile = torch.compile, lambda function: function
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402

torch.compile = _compile
# Samples cost nothing. DeepSpeed would start two processes per member that load them.
DeepSpeedEngine.deepspeed_io = partialmethod(DeepSpeedEngine.deepspeed_io, num_local_io_workers=0)


class EmulatedLayer(nn.Module):
    """(batch, WIDTH) -> (batch, WIDTH)."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.linear.weight.dtype)
        return Hold.apply(x + torch.tanh(self.linear(x)), self.seconds, 2 * self.seconds)


class Loss(nn.MSELoss):
    """In fp32, as is usual."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output.float(), target)


class Samples(torch.utils.data.Dataset):
    """Inputs and labels by index, (WIDTH,) each."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1 + index))
        return both[0], both[1]


def micro_batches(pipeline: int, pipelines: int, shares: int, size: int, first: int) -> Iterator[Any]:
    """Micro-batches of one of ``pipelines``, from the global micro-batch ``first`` on.

    The global ones are those that ``shares`` pipelines would draw in turn from the samples.
    """
    samples = Samples()
    number = first + pipeline
    while True:
        turn, share = divmod(number, shares)
        drawn = [samples[share + shares * (turn * size + i)] for i in range(size)]
        yield tuple(torch.stack(both) for both in zip(*drawn, strict=True))
        number += pipelines


class Writer(TorchCheckpointEngine):
    """Copies what DeepSpeed saves, and writes it in a thread while training goes on.

    When all files of this rank are written, the file ``done-<rank>`` says so.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(None)
        self.zipfile_serialization = True
        self._rank = engine.global_rank
        self._jobs: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()
        threading.Thread(target=self._write, daemon=True).start()

    def save(self, state_dict: Any, path: str) -> None:
        self._jobs.put((_copied(state_dict), path))

    def commit(self, info: Any) -> bool:
        self._jobs.put((None, os.path.join(info.save_dir, info.tag, f"done-{self._rank}")))
        return True

    def _write(self) -> None:
        while True:
            state, path = self._jobs.get()
            if state is None:
                Path(path).touch()
            else:
                super().save(state, path)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return type(value)((key, _copied(each)) for key, each in value.items())
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return value


class Journal:
    """Lines of JSON, each with the time in seconds since 1970."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115

    def tell(self, what: str, **words: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps({"what": what, "at": time.time(), **words}) + "\n")


def options() -> argparse.ArgumentParser:
    """Those that every worker of spot.py takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True, help="of a pipeline")
    parser.add_argument("--layer-s", type=float, required=True, help="of a forward pass; backward takes twice as long")
    parser.add_argument("--start-s", type=float, default=0.0, help="more of a start, without using the CPU")
    parser.add_argument("--shares", type=int, required=True, help="pipelines that the order of samples is that of")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--save-every", type=int, default=0, help="steps between two checkpoints; 0: none")
    return deepspeed.add_config_arguments(parser)


def build(arguments: argparse.Namespace, **more: Any) -> Any:
    """DeepSpeed's engine."""
    time.sleep(arguments.start_s)
    torch.manual_seed(0)
    specs = [LayerSpec(EmulatedLayer, arguments.layer_s) for _ in range(arguments.layers)]
    net = PipelineModule(specs, num_stages=arguments.stages, loss_fn=Loss(), partition_method="uniform")
    return deepspeed.initialize(args=arguments, model=net, model_parameters=list(net.parameters()), **more)[0]


def source(engine: Any, shares: int) -> Iterator[Any] | None:
    """The batches that a stock engine goes on with, where its stage needs them."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    pipelines = engine.grid.data_parallel_size
    first = engine.global_steps * engine.gradient_accumulation_steps() * pipelines
    size = engine.train_micro_batch_size_per_gpu()
    return micro_batches(engine.grid.data_parallel_id, pipelines, shares, size, first)


def main() -> None:
    """Train until the end, or until killed."""
    parser = options()
    parser.add_argument("--stop-file", type=Path, help="names the last step, once it is there")
    parser.add_argument("--save-until", type=int, default=10**9, help="last step after which a checkpoint is made")
    parser.add_argument("--load", type=Path, help="the checkpoint to begin with")
    parser.add_argument(
        "--elastic", action="store_true", help="the framework makes checkpoints and feeds the pipelines"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began = time.time()
    deepspeed.init_distributed()
    connected = time.time()
    journal = Journal(arguments.out / "journal.jsonl") if os.environ["RANK"] == "0" and not arguments.elastic else None
    engine = build(arguments, training_data=Samples() if arguments.elastic else None)
    built = time.time()
    folder = arguments.out / "checkpoints"
    if not arguments.elastic:
        engine.checkpoint_engine = Writer(engine)
        load = arguments.load
        if load and engine.load_checkpoint(str(load.parent), load.name)[0] is None:
            raise RuntimeError(f"the checkpoint {load} cannot be loaded")
    data = None if arguments.elastic else source(engine, arguments.shares)
    if journal:
        journal.tell("ready", step=engine.global_steps, began=began, connected=connected, built=built)
    losses = []
    for step in range(engine.global_steps + 1, arguments.steps + 1):
        begin = time.time()
        losses.append(float(engine.train_batch(data_iter=data)))
        if journal:
            journal.tell("step", step=step, begin=begin, loss=losses[-1])
        if arguments.stop_file and ended(arguments.stop_file, step):
            break
        if arguments.save_every and step % arguments.save_every == 0 and step <= arguments.save_until:
            begin = time.time()
            engine.save_checkpoint(str(folder), tag=f"step{step}", save_latest=arguments.elastic)
            if journal:
                journal.tell("save", step=step, seconds=time.time() - begin)
    (arguments.out / f"result-{os.getpid()}.json").write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
