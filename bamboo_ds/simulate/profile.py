"""Costs of a model's layers on a device: files, and presets by the shapes of published models."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path

from pydantic import Field

from ..errors import ConfigError
from ..topology.memory import Precision
from .given import Given, checked

GIB = 2**30


class Layer(Given):
    """A layer, or ``count`` equal ones in a row."""

    count: int = Field(1, ge=1, description="so many such layers in a row")
    forward_s: float = Field(ge=0, description="seconds of a forward pass of one micro-batch")
    backward_s: float = Field(ge=0, description="of a backward pass, with what is computed again for it")
    update_s: float = Field(0.0, ge=0, description="of the optimizer step")
    parameters: int = Field(0, ge=0, description="number of trainable parameters")
    boundary_bytes: int = Field(0, ge=0, description="of its output for one micro-batch")
    kept_bytes: int = Field(0, ge=0, description="kept for the backward pass of one micro-batch, without its input")


class Profile(Given):
    """A model on a device, and how it is trained."""

    name: str
    source: str = Field("", description="where shapes and times come from")
    device: str = Field("", description="the device, and what is assumed of its speed")
    layers: tuple[Layer, ...] = Field(min_length=1)
    micro_batch: int = Field(ge=1, description="samples of a micro-batch")
    global_batch: int = Field(ge=1, description="samples of an iteration")
    stages: int = Field(ge=1, description="stages of a pipeline, unless --stages says otherwise")
    pipelines: int | None = Field(None, ge=1, description="pipelines, unless --pipelines says otherwise")
    precision: Precision = "fp16"
    zero: bool = Field(False, description="ZeRO-1: pipelines divide the optimizer's state among themselves")
    optimizer: str = Field("adam", description="by which bytes of state per parameter are known")
    memory_bytes: int | None = Field(None, gt=0, description="of a device; null: not looked at")
    workspace_bytes: int = Field(0, ge=0, description="of a device, for what passes need while they run")

    @cached_property
    def each(self) -> tuple[Layer, ...]:
        """All layers, one by one."""
        return tuple(layer for layer in self.layers for _ in range(layer.count))

    @property
    def gradient_bytes(self) -> int:
        """Bytes per parameter of the gradients that members exchange."""
        return 2 if self.precision == "fp16" else 4

    @property
    def parameters(self) -> int:
        """The number of parameters of all layers."""
        return sum(layer.parameters for layer in self.each)

    def on_device(self, speed: float, memory_bytes: int | None) -> Profile:
        """The same on a device that is so many times as fast, and has so much memory; ``None``: as much."""
        times = ("forward_s", "backward_s", "update_s")
        layers = tuple(
            layer.model_copy(update={name: getattr(layer, name) / speed for name in times}) for layer in self.layers
        )
        # Not by a copy, which would keep what has been worked out of other layers.
        fields = {name: getattr(self, name) for name in Profile.model_fields}
        return Profile(**{**fields, "layers": layers, "memory_bytes": memory_bytes or self.memory_bytes})

    def micro_batches(self, pipelines: int) -> int:
        """Micro-batches of each pipeline in an iteration.

        Raises:
            ConfigError: there are not enough samples for as many pipelines.
        """
        count, rest = divmod(self.global_batch, self.micro_batch * pipelines)
        if not count or rest:
            raise ConfigError(
                f"profile {self.name}: {self.global_batch} samples are no whole number of micro-batches of "
                f"{self.micro_batch} for each of {pipelines} pipelines: choose --pipelines, or another global_batch"
            )
        return count

    def partition(self, stages: int) -> list[tuple[int, int]]:
        """First layer of each stage and the one behind its last: as even in time as whole layers allow.

        By DeepSpeed's own division of weights, as its ``PipelineModule`` does it by numbers of parameters.

        Raises:
            ConfigError: there are fewer layers than stages.
        """
        if stages > len(self.each):
            raise ConfigError(f"--stages {stages}: profile {self.name} has {len(self.each)} layers; choose fewer")
        return _partition(tuple(round((layer.forward_s + layer.backward_s) * 1e9) for layer in self.each), stages)


@lru_cache(maxsize=1024)
def _partition(weights: tuple[int, ...], stages: int) -> list[tuple[int, int]]:
    from deepspeed.runtime.utils import partition_balanced  # takes its time to load

    bounds = partition_balanced(list(weights), stages)
    found = list(pairwise(bounds))
    if all(begin < end for begin, end in found):
        return found
    # Some layers are so long that others are left without any: then every stage gets one at least.
    even = [stage * len(weights) // stages for stage in range(stages + 1)]
    return list(pairwise(even))


# -- presets --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A transformer.

    Attributes:
        blocks: number of transformer blocks.
        hidden: width.
        heads: of attention.
        sequence: tokens of a sample.
        vocabulary: number of tokens that there are.
        source: of these numbers.
    """

    blocks: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    source: str


@dataclass(frozen=True)
class Device:
    """A device, and how much of it training uses.

    Attributes:
        flops: of its tensor units in fp16, per second.
        utilisation: share of them that passes reach.
        bytes_per_s: of its memory, by which optimizer steps go.
        memory_bytes: for states, activations and workspace.
        text: both in words.
    """

    flops: float
    utilisation: float
    bytes_per_s: float
    memory_bytes: int
    text: str


V100 = Device(
    125e12,
    0.30,
    900e9,
    16 * GIB,
    "NVIDIA V100 16 GB of an EC2 p3.2xlarge: 125 TFLOP/s (data sheet), of which 30 % are ASSUMED, as Shoeybi et al."
    " (Megatron-LM, 2019) reach with one V100",
)

_BERT = Shape(24, 1024, 16, 512, 30522, "BERT-large: Devlin et al., NAACL 2019: 24 layers, width 1024, 16 heads")
_GPT2 = Shape(48, 1600, 25, 1024, 50257, "GPT-2 (1.5B): Radford et al., 2019: 48 layers, width 1600, 1024 tokens")
_GPT3 = "Brown et al., NeurIPS 2020, table 2.1"


def transformer(
    name: str,
    shape: Shape,
    stages: int,
    micro_batch: int,
    global_batch: int,
    recompute: bool = True,
    device: Device = V100,
) -> Profile:
    """A profile by counting operations (Narayanan et al., SC 2021) and activations (Korthikanti et al., MLSys 2023)."""
    h, s, v, b = shape.hidden, shape.sequence, shape.vocabulary, micro_batch
    speed = device.flops * device.utilisation

    def layer(count: int, flops: float, parameters: int, kept: int, again: bool) -> Layer:
        forward = b * flops / speed
        return Layer(
            count=count,
            forward_s=forward,
            backward_s=forward * (3 if again else 2),
            update_s=parameters * 32 / device.bytes_per_s,  # Adam reads and writes its state of 16 bytes
            parameters=parameters,
            boundary_bytes=2 * s * b * h,
            kept_bytes=0 if again else kept,
        )

    inside = s * b * h * 34 + 5 * shape.heads * s * s * b
    layers = (
        layer(1, 0.0, v * h + s * h, s * b * h, False),
        layer(shape.blocks, 24 * s * h * h + 4 * s * s * h, 12 * h * h + 13 * h, inside, recompute),
        layer(1, 2 * s * h * v, v * h, 4 * s * b * v, False),
    )
    how = "activations of blocks are computed again for backward passes" if recompute else "all activations are kept"
    return Profile(
        name=name,
        source=f"{shape.source}; {how}; operations as Narayanan et al. (SC 2021) count them, activations as Korthikanti"
        " et al. (MLSys 2023); micro-batch, global batch and stages are choices",
        device=device.text,
        layers=layers,
        micro_batch=micro_batch,
        global_batch=global_batch,
        stages=stages,
        memory_bytes=device.memory_bytes,
        workspace_bytes=GIB + (inside if recompute else 0),  # the context of CUDA and libraries: assumed
    )


def presets() -> dict[str, Profile]:
    """The presets by name."""
    found = (
        transformer("bert-large", _BERT, 4, 4, 1024, recompute=False),
        transformer("gpt-2", _GPT2, 8, 4, 512),
        transformer("gpt-3-2.7b", Shape(32, 2560, 32, 2048, 50257, f"GPT-3 2.7B: {_GPT3}"), 16, 4, 512),
        transformer("gpt-3-6.7b", Shape(32, 4096, 32, 2048, 50257, f"GPT-3 6.7B: {_GPT3}"), 32, 4, 1024),
    )
    return {profile.name: profile for profile in found}


def load(name: str) -> Profile:
    """The preset of this name, or the profile in this file.

    Raises:
        ConfigError: there is neither, or the file is no profile.
    """
    known = presets()
    if name in known:
        return known[name]
    path = Path(name)
    if not path.is_file():
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"presets are {', '.join(known)}"
        raise ConfigError(f"--profile {name}: there is no such preset or file; {hint}")
    return checked(f"--profile {name}", lambda: Profile.model_validate_json(path.read_bytes()))
