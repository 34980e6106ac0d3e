"""Kinds of layers, each with something that people's layers have. All compute ``x + tanh(linear(x)) * factor``."""

from __future__ import annotations

import enum
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 8
#: Called with the name of a place wherever code of the script runs.
HOOKS: list[Callable[[str], None]] = []
#: What a script has in a variable, which layers read.
GLOBALS: dict[str, Any] = {"calls": 0, "temperature": 1.0}


def happens(place: str) -> None:
    """Code of the script runs at ``place``."""
    for hook in HOOKS:
        hook(place)


class Layer(nn.Module):
    """The plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None:
        """What the constructor of this kind does besides."""

    def factor(self, x: torch.Tensor) -> Any:
        """What this kind multiplies with."""
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        happens("forward")
        x = x.to(next(self.parameters()).dtype)
        return 0.9 * x + torch.tanh(self.linear(x)) * self.factor(x)


class Meter:
    """An object of the script's."""

    def __init__(self) -> None:
        self.total = 0.0


class Phase(enum.Enum):
    """States of a layer."""

    ODD, EVEN = 1, 2


@dataclass
class Settings:
    """Settings of a layer, which passes change."""

    count: int = 0


class OwnParameter(nn.Parameter):
    """A parameter with more."""


class Double(torch.autograd.Function):
    """With a backward pass of its own, which counts in the context."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = 2.0
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * ctx.scale


def _kept(prepare: Callable[[Any], None], factor: Callable[[Any, torch.Tensor], Any]) -> type[Layer]:
    return type("Kept", (Layer,), {"prepare": prepare, "factor": factor})


def _sets(**values: Callable[[], Any]) -> Callable[[Any], None]:
    def prepare(layer: Any) -> None:
        for name, make in values.items():
            setattr(layer, name, make())

    return prepare


def _buffer(layer: Any, name: str, value: torch.Tensor, persistent: bool = True) -> None:
    layer.register_buffer(name, value, persistent)


# -- what passes change ---------------------------------------------------------------------------------------
def _counted(layer: Any, x: torch.Tensor) -> Any:
    layer.calls += 1
    return 1 + 0.01 * layer.calls


def _running(layer: Any, x: torch.Tensor) -> Any:
    layer.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return 1 + layer.mean


def _replaced_buffer(layer: Any, x: torch.Tensor) -> Any:
    layer.mean = 0.9 * layer.mean + 0.1 * x.detach().mean(0)
    return 1 + layer.mean


def _listed(layer: Any, x: torch.Tensor) -> Any:
    layer.past.append(float(x.detach().mean()))
    return 1 + 0.1 * sum(layer.past)


def _short(layer: Any, x: torch.Tensor) -> Any:
    layer.past = [*layer.past[-2:], float(x.detach().mean())]
    return 1 + 0.1 * sum(layer.past)


def _tensors(layer: Any, x: torch.Tensor) -> Any:
    layer.past = [*layer.past[-2:], x.detach().mean()]
    return 1 + 0.1 * sum(layer.past)


def _tabled(layer: Any, x: torch.Tensor) -> Any:
    layer.table[len(layer.table) % 3] = x.detach().mean()
    return 1 + 0.1 * sum(layer.table.values())


def _metered(layer: Any, x: torch.Tensor) -> Any:
    layer.meter.total += float(x.detach().mean())
    return 1 + 0.1 * layer.meter.total


def _numpied(layer: Any, x: torch.Tensor) -> Any:
    layer.seen = layer.seen + numpy.float64(0.01)
    return 1 + float(layer.seen)


def _arrayed(layer: Any, x: torch.Tensor) -> Any:
    layer.seen = layer.seen + 0.01
    return 1 + float(layer.seen.sum())


def _array_inside(layer: Any, x: torch.Tensor) -> Any:
    layer.seen += 0.01
    return 1 + float(layer.seen.sum())


def _texted(layer: Any, x: torch.Tensor) -> Any:
    layer.phase = "odd" if layer.phase == "even" else "even"
    return 1.0 if layer.phase == "odd" else 1.1


def _enumerated(layer: Any, x: torch.Tensor) -> Any:
    layer.phase = Phase.ODD if layer.phase is Phase.EVEN else Phase.EVEN
    return 1.0 if layer.phase is Phase.ODD else 1.1


def _flagged(layer: Any, x: torch.Tensor) -> Any:
    layer.flag = not layer.flag
    return 1.0 if layer.flag else 1.1


def _tupled(layer: Any, x: torch.Tensor) -> Any:
    layer.pair = layer.pair[1], layer.pair[0] + 1
    return 1 + 0.01 * layer.pair[0]


def _set(layer: Any, x: torch.Tensor) -> Any:
    layer.seen = layer.seen | {len(layer.seen)}
    return 1 + 0.01 * len(layer.seen)


def _complexed(layer: Any, x: torch.Tensor) -> Any:
    layer.spin *= 1j
    return 1 + 0.1 * layer.spin.real


def _fractioned(layer: Any, x: torch.Tensor) -> Any:
    layer.part += Fraction(1, 100)
    return 1 + float(layer.part)


def _late(layer: Any, x: torch.Tensor) -> Any:
    if not hasattr(layer, "mean"):
        layer.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
    return _running(layer, x)


def _lazy(layer: Any, x: torch.Tensor) -> Any:
    if layer.first is None:
        layer.first = x.detach().mean()
    return 1 + 0.1 * layer.first


def _of_class(layer: Any, x: torch.Tensor) -> Any:
    type(layer).calls += 1
    return 1 + 0.01 * type(layer).calls


def _global(layer: Any, x: torch.Tensor) -> Any:
    GLOBALS["calls"] += 1
    return 1 + 0.01 * GLOBALS["calls"]


def _data_settings(layer: Any, x: torch.Tensor) -> Any:
    layer.settings.count += 1
    return 1 + 0.01 * layer.settings.count


def _private(layer: Any, x: torch.Tensor) -> Any:
    layer.__dict__["_hidden"] = layer.__dict__["_hidden"] + 1
    return 1 + 0.01 * layer.__dict__["_hidden"]


def _queued(layer: Any, x: torch.Tensor) -> Any:
    layer.past.append(x.detach().mean())
    return 1 + 0.1 * sum(layer.past)


def _written(layer: Any, x: torch.Tensor) -> Any:
    layer.linear.weight.data.mul_(0.999)
    return 1.0


def _written_openly(layer: Any, x: torch.Tensor) -> Any:
    with torch.no_grad():
        layer.linear.weight.mul_(0.999)
    return 1.0


def _on_parameter(layer: Any, x: torch.Tensor) -> Any:
    layer.linear.weight.seen = getattr(layer.linear.weight, "seen", 0) + 1
    return 1 + 0.01 * layer.linear.weight.seen


def _inner(layer: Any, x: torch.Tensor) -> Any:
    layer.linear.calls = getattr(layer.linear, "calls", 0) + 1
    return 1 + 0.01 * layer.linear.calls


class ExtraState(Layer):
    """Keeps a list that is its extra state."""

    def prepare(self) -> None:
        self.hidden = [0]

    def get_extra_state(self) -> Any:
        return {"hidden": list(self.hidden)}

    def set_extra_state(self, state: Any) -> None:
        self.hidden = list(state["hidden"])

    def factor(self, x: torch.Tensor) -> Any:
        self.hidden[0] += 1
        return 1 + 0.01 * self.hidden[0]


# -- what is as it is -----------------------------------------------------------------------------------------
class Falsy(Layer):
    """As an empty container."""

    def __len__(self) -> int:
        return 0


class Equal(Layer):
    """Equal to all others."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layer)

    def __hash__(self) -> int:
        return 1


class Delegating(Layer):
    """Has whatever its linear layer has."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "linear":
                raise
            return getattr(super().__getattr__("linear"), name)


class Strict(Layer):
    """Takes no attribute that its constructor has not set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("sealed") and name not in self.__dict__ and name not in ("training",):
            raise AttributeError(f"Strict has no {name}")
        super().__setattr__(name, value)

    def prepare(self) -> None:
        self.sealed = True


class Copied(Layer):
    """With a copy of its own making."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        made = Copied()
        made.load_state_dict(self.state_dict())
        return made


class Hooked(Layer):
    """With hooks that its constructor registers."""

    def prepare(self) -> None:
        self.linear.register_forward_hook(lambda module, inputs, output: output * 1.1)
        self.linear.weight.register_hook(lambda gradient: gradient * 0.5)


class Unused(Layer):
    """Has a parameter that no pass uses."""

    def prepare(self) -> None:
        self.spare = nn.Parameter(torch.ones(3))


class Sometimes(Layer):
    """Uses a parameter in every other pass only."""

    def prepare(self) -> None:
        self.gain, self.calls = nn.Parameter(torch.ones(WIDTH)), 0

    def factor(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.gain if self.calls % 2 else 1.0


class ByMode(Layer):
    """Other in evaluations."""

    def factor(self, x: torch.Tensor) -> Any:
        return 1.0 if self.training else 0.5


class Frozen(Layer):
    """Some of it does not learn."""

    def prepare(self) -> None:
        self.linear.bias.requires_grad_(False)


class Strange(Layer):
    """Parameters and buffers of unusual shapes."""

    def prepare(self) -> None:
        self.single = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(WIDTH, 1).expand(WIDTH, WIDTH).contiguous())
        self.own = OwnParameter(torch.ones(WIDTH))
        whole = torch.arange(4.0 * WIDTH)
        _buffer(self, "part", whole[WIDTH : 2 * WIDTH])
        _buffer(self, "other", whole[: 2 * WIDTH])
        _buffer(self, "empty", torch.zeros(0))
        _buffer(self, "spread", torch.ones(1).expand(WIDTH))
        _buffer(self, "count", torch.zeros((), dtype=torch.int64))
        _buffer(self, "mask", torch.ones(WIDTH, dtype=torch.bool))
        _buffer(self, "wide", torch.ones(WIDTH, dtype=torch.float64))
        _buffer(self, "nothing", None)  # type: ignore[arg-type]

    def factor(self, x: torch.Tensor) -> Any:
        self.count += 1
        self.part += 0.01  # a part of ``other``, too
        own = self.single * self.own * (1 + 0.01 * (x @ self.turned)).mean()
        own = own * self.spread * self.mask * (1 + 0.001 * self.other.sum()) * self.wide.to(x.dtype)
        return own * (1 + 0.01 * self.count)


class Aliased(Layer):
    """A buffer that is a parameter's memory, and one that two submodules share."""

    def prepare(self) -> None:
        self.first, self.second = nn.Module(), nn.Module()
        shared = torch.zeros(WIDTH)
        self.first.register_buffer("seen", shared)
        self.second.register_buffer("seen", shared)
        _buffer(self, "view", self.linear.bias.data)

    def factor(self, x: torch.Tensor) -> Any:
        self.first.seen.add_(0.01)
        return 1 + self.second.seen + 0.1 * self.view


class Shared(Layer):
    """Uses one submodule twice, under two names."""

    def prepare(self) -> None:
        self.again = self.linear

    def factor(self, x: torch.Tensor) -> Any:
        return torch.sigmoid(self.again(x))


class Normed(Layer):
    """With a norm of its weight and power iterations, which passes change."""

    def prepare(self) -> None:
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Weighted(Layer):
    """With a parametrized weight."""

    def prepare(self) -> None:
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class Batched(Layer):
    """With statistics of torch's."""

    def prepare(self) -> None:
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


class Recomputed(Layer):
    """Computes its inside again in the backward pass."""

    def factor(self, x: torch.Tensor) -> Any:
        return checkpoint(lambda inputs: torch.sigmoid(self.linear(inputs)), x, use_reentrant=False)


class OwnBackward(Layer):
    """With an autograd function."""

    def factor(self, x: torch.Tensor) -> Any:
        return Double.apply(torch.sigmoid(x))


class Dict(Layer):
    """Parameters in containers."""

    def prepare(self) -> None:
        self.rows = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(2)])
        self.table = nn.ParameterDict({"first": nn.Parameter(torch.ones(WIDTH)), "a-b": nn.Parameter(torch.ones(1))})

    def factor(self, x: torch.Tensor) -> Any:
        return self.rows[0] * self.rows[1] * self.table["first"] * self.table["a-b"]


class Recurrent(Layer):
    """Whose weights torch keeps in one flat piece on some devices."""

    def prepare(self) -> None:
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def factor(self, x: torch.Tensor) -> Any:
        return torch.sigmoid(self.cells(x.unsqueeze(1))[0].squeeze(1))


class Warm(Layer):
    """Reads a variable of the script's."""

    def factor(self, x: torch.Tensor) -> Any:
        return GLOBALS["temperature"]


class Annealed(Layer):
    """Reads an attribute that scripts change."""

    def prepare(self) -> None:
        self.temperature = 1.0

    def factor(self, x: torch.Tensor) -> Any:
        return self.temperature


# -- what draws -----------------------------------------------------------------------------------------------
class Dropped(Layer):
    """With dropout."""

    def factor(self, x: torch.Tensor) -> Any:
        return nn.functional.dropout(torch.ones_like(x), 0.2, self.training)


class Drawing(Layer):
    """With generators of its own."""

    def prepare(self) -> None:
        self.of_torch, self.of_python = torch.Generator(), random.Random(3)
        self.of_numpy = numpy.random.default_rng(3)

    def factor(self, x: torch.Tensor) -> Any:
        noise = torch.rand((), generator=self.of_torch).item() + self.of_python.random() + self.of_numpy.random()
        return 1 + 0.1 * noise


class Chancy(Layer):
    """With Python's and NumPy's generators."""

    def factor(self, x: torch.Tensor) -> Any:
        return 1 + 0.1 * random.random() + 0.1 * numpy.random.rand()


#: Kinds whose results a shadow computes from random numbers of the job's own, which are not stock DeepSpeed's.
RANDOM = {"dropped": Dropped, "drawing": Drawing, "chancy": Chancy}
KINDS: dict[str, type[Layer]] = {
    "plain": Layer,
    "counted": _kept(_sets(calls=int), _counted),
    "running": _kept(lambda layer: _buffer(layer, "mean", torch.zeros(WIDTH)), _running),
    "running-hidden": _kept(lambda layer: _buffer(layer, "mean", torch.zeros(WIDTH), False), _running),
    "replaced-buffer": _kept(lambda layer: _buffer(layer, "mean", torch.zeros(WIDTH)), _replaced_buffer),
    "listed": _kept(_sets(past=list), _listed),
    "short": _kept(_sets(past=list), _short),
    "tensors": _kept(_sets(past=list), _tensors),
    "tabled": _kept(_sets(table=dict), _tabled),
    "counters": _kept(_sets(table=Counter), _tabled),
    "metered": _kept(_sets(meter=Meter), _metered),
    "numpied": _kept(_sets(seen=numpy.float64), _numpied),
    "arrayed": _kept(_sets(seen=lambda: numpy.zeros(2)), _arrayed),
    "array-inside": _kept(_sets(seen=lambda: numpy.zeros(2)), _array_inside),
    "texted": _kept(_sets(phase=lambda: "odd"), _texted),
    "enumerated": _kept(_sets(phase=lambda: Phase.ODD), _enumerated),
    "flagged": _kept(_sets(flag=bool), _flagged),
    "tupled": _kept(_sets(pair=lambda: (0, 1)), _tupled),
    "set": _kept(_sets(seen=set), _set),
    "complexed": _kept(_sets(spin=lambda: 1j), _complexed),
    "fractioned": _kept(_sets(part=Fraction), _fractioned),
    "late": _kept(_sets(), _late),
    "lazy": _kept(_sets(first=lambda: None), _lazy),
    "of-class": type("OfClass", (Layer,), {"calls": 0, "factor": _of_class}),
    "global": _kept(_sets(), _global),
    "settings": _kept(_sets(settings=Settings), _data_settings),
    "private": _kept(_sets(_hidden=int), _private),
    "queued": _kept(_sets(past=lambda: deque(maxlen=3)), _queued),
    "written": _kept(_sets(), _written),
    "written-openly": _kept(_sets(), _written_openly),
    "on-parameter": _kept(_sets(), _on_parameter),
    "inner": _kept(_sets(), _inner),
    "extra-state": ExtraState,
    "falsy": Falsy,
    "equal": Equal,
    "delegating": Delegating,
    "strict": Strict,
    "copied": Copied,
    "hooked": Hooked,
    "unused": Unused,
    "sometimes": Sometimes,
    "by-mode": ByMode,
    "frozen": Frozen,
    "strange": Strange,
    "aliased": Aliased,
    "shared": Shared,
    "normed": Normed,
    "weighted": Weighted,
    "batched": Batched,
    "recomputed": Recomputed,
    "own-backward": OwnBackward,
    "dict": Dict,
    "recurrent": Recurrent,
    "warm": Warm,
    "annealed": Annealed,
    **RANDOM,
}
