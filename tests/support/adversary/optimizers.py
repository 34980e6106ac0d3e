"""Kinds of optimizers and schedulers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.support.adversary.layers import happens

LR = 0.05


class Own(torch.optim.Optimizer):
    """A rule of its own: ``p -= lr * change(p)``, with momentum in whatever the kind keeps it in."""

    def __init__(self, groups: Any, lr: float = LR) -> None:
        super().__init__(groups, {"lr": lr, "decay": 0.0})
        self.prepare()

    def prepare(self) -> None:
        """What the constructor of this kind does besides."""

    def before(self) -> None:
        """At the beginning of a step."""

    def change(self, p: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """The change of a parameter."""
        assert p.grad is not None
        return p.grad

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        happens("optimizer")
        with torch.no_grad():
            self.before()
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        self.apply(p, group["lr"] * self.change(p, group))

    def apply(self, p: nn.Parameter, change: torch.Tensor) -> None:
        """Change a parameter."""
        p.sub_(change)


def _own(change: Any, prepare: Any = None, **more: Any) -> type[Own]:
    found = {"change": change, **more}
    if prepare is not None:
        found["prepare"] = prepare
    return type("OwnKind", (Own,), found)


def _averaged(before: Any, p: nn.Parameter) -> torch.Tensor:
    return p.grad.clone() if before is None else 0.5 * before + p.grad  # type: ignore[union-attr]


def _in_state(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    state = self.state[p]
    state["moment"] = _averaged(state.get("moment"), p)
    return state["moment"]


def _deep_state(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    state = self.state[p]
    if not state:
        state["tree"] = {"count": 0, "parts": [torch.zeros_like(p), (torch.zeros_like(p), None)], "name": "x", 3: True}
        state["flag"], state["none"], state["whole"] = True, None, torch.zeros((), dtype=torch.int64)
    tree = state["tree"]
    tree["count"] += 1
    state["flag"] = not state["flag"]
    state["whole"] += 1
    tree["parts"][0].mul_(0.5).add_(p.grad)
    tree["parts"][1] = (tree["parts"][1][0] + tree["parts"][0], None)
    return tree["parts"][0] + 0.01 * tree["parts"][1][0] / tree["count"] + 0.01 * state["whole"] * state["flag"]


def _history(kind: Callable[[], Any]) -> Any:
    def change(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
        state = self.state[p]
        past = state.setdefault("past", kind())
        past.append(p.grad.clone())
        if len(past) > 3:
            del past[0]
        return sum(past)  # type: ignore[return-value]

    return change


def _numpy_state(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    state = self.state[p]
    state["seen"] = state.get("seen", numpy.zeros(2)) + 1
    state["scalar"] = state.get("scalar", numpy.float32(0)) + numpy.float32(0.5)
    return p.grad * float(1 + 0.01 * state["seen"].sum() + 0.01 * state["scalar"])  # type: ignore[operator]


def _by_id(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    self.moments[id(p)] = _averaged(self.moments.get(id(p)), p)
    return self.moments[id(p)]


def _by_parameter(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    self.moments[p] = _averaged(self.moments.get(p), p)
    return self.moments[p]


def _on_parameter(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    p.moment = _averaged(getattr(p, "moment", None), p)  # type: ignore[attr-defined]
    return p.moment  # type: ignore[attr-defined]


def _number_on_parameter(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    p.seen = getattr(p, "seen", 0) + 1  # type: ignore[attr-defined]
    return p.grad * (1 + 0.01 * p.seen)  # type: ignore[attr-defined, operator]


def _by_place(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    place = next(n for n, each in enumerate(group["params"]) if each is p)
    self.moments[place] = _averaged(self.moments.get(place), p)
    return self.moments[place]


def _in_group(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    group["k"] = group.get("k", 0) + 1
    group["d"] = group.get("d", 1.0) + 0.01 * float(p.grad.abs().mean())  # type: ignore[union-attr]
    return p.grad * group["d"] * (1 + 0.001 * group["k"])  # type: ignore[operator]


def _tensor_in_group(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    group["d"] = group.get("d", torch.ones(())) + 0.01 * p.grad.abs().mean()  # type: ignore[union-attr]
    return p.grad * group["d"]  # type: ignore[operator]


def _counted(self: Any) -> None:
    self.count += 1


def _times_count(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    return p.grad * (1 + 0.01 * self.count)  # type: ignore[operator]


def _state_count(self: Any) -> None:
    self.state["k"] = self.state.get("k", 0) + 1


def _times_state_count(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    return p.grad * (1 + 0.01 * self.state["k"])  # type: ignore[operator]


class _Meter:
    def __init__(self) -> None:
        self.total = 0.0


def _measured(self: Any) -> None:
    self.meter.total += 1


def _times_meter(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    return p.grad * (1 + 0.01 * self.meter.total)  # type: ignore[operator]


def _tensor_count(self: Any) -> None:
    self.total = self.total + 1


def _times_total(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    return p.grad * (1 + 0.01 * self.total)  # type: ignore[operator]


def _of_class(self: Any) -> None:
    type(self).count += 1


def _global_norm(self: Any) -> None:
    grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
    self.norm = float(torch.stack([grad.norm() for grad in grads]).norm())
    self.norms = [*self.norms[-3:], self.norm]


def _by_norms(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    return p.grad / (1 + sum(self.norms))  # type: ignore[operator]


def _slow(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    """Lookahead."""
    state = self.state[p]
    if "slow" not in state:
        state["slow"], state["k"] = p.detach().clone(), 0
    state["k"] += 1
    if state["k"] % 2:
        return p.grad  # type: ignore[return-value]
    state["slow"].lerp_(p - group["lr"] * p.grad, 0.5)  # type: ignore[operator]
    return (p - state["slow"]) / group["lr"]


def _assigned(self: Any, p: nn.Parameter, change: torch.Tensor) -> None:
    p.data = p.data - change


def _noisy(self: Any, p: nn.Parameter, group: Any) -> torch.Tensor:
    return p.grad + 0.01 * torch.randn_like(p)  # type: ignore[operator]


class Wrapper(torch.optim.Optimizer):
    """Around another one, without torch's constructor."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class Subclass(torch.optim.AdamW):
    """Of one of torch's, which clips each gradient by itself first."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        happens("optimizer")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-0.1, 0.1)
        return super().step(closure)


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    decays = [p for _, p in named if p.ndim > 1]
    others = [p for _, p in named if p.ndim <= 1]
    groups = [
        {"params": decays, "weight_decay": 0.01, "name": "decay", "tags": ["a", 1], "lr_scale": 0.5},
        {"params": others, "weight_decay": 0.0, "name": "rest", "tags": [], "lr_scale": 1.0},
    ]
    return [group for group in groups if group["params"]]


def _params(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def _torch(kind: Any, **settings: Any) -> Any:
    return lambda net: kind(_params(net), **{"lr": LR, **settings})


def _kind(kind: Any) -> Any:
    return lambda net: kind(_params(net))


_optim = torch.optim
#: Kinds that draw: compared with the job's own undisturbed run.
RANDOM = {"noisy": _kind(_own(_noisy))}
KINDS: dict[str, Any] = {
    "sgd": _torch(_optim.SGD, momentum=0.9),
    "nesterov": _torch(_optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": _torch(_optim.Adam),
    "amsgrad": _torch(_optim.Adam, amsgrad=True),
    "foreach": _torch(_optim.Adam, foreach=True),
    "fused": _torch(_optim.AdamW, fused=True),
    "capturable-lr": lambda net: _optim.Adam(_params(net), lr=torch.tensor(LR), foreach=False),
    "adamw-groups": lambda net: _optim.AdamW(_groups(net), lr=LR),
    "named": lambda net: _optim.AdamW([(n, p) for n, p in net.named_parameters() if p.requires_grad], lr=LR),
    "rmsprop": _torch(_optim.RMSprop, centered=True, momentum=0.1),
    "adagrad": _torch(_optim.Adagrad),
    "adadelta": _torch(_optim.Adadelta),
    "nadam": _torch(_optim.NAdam),
    "radam": _torch(_optim.RAdam),
    "adamax": _torch(_optim.Adamax),
    "asgd": _torch(_optim.ASGD),
    "rprop": _torch(_optim.Rprop),
    "adafactor": _torch(_optim.Adafactor),
    "of-config": None,
    "function": "function",
    "subclass": lambda net: Subclass(_params(net), lr=LR),
    "own": _kind(Own),
    "in-state": _kind(_own(_in_state)),
    "deep-state": _kind(_own(_deep_state)),
    "list-state": _kind(_own(_history(list))),
    "deque-state": _kind(_own(_history(deque))),
    "numpy-state": _kind(_own(_numpy_state)),
    "by-id": _kind(_own(_by_id, lambda self: setattr(self, "moments", {}))),
    "by-parameter": _kind(_own(_by_parameter, lambda self: setattr(self, "moments", {}))),
    "by-place": _kind(_own(_by_place, lambda self: setattr(self, "moments", {}))),
    "on-parameter": _kind(_own(_on_parameter)),
    "number-on-parameter": _kind(_own(_number_on_parameter)),
    "in-group": _kind(_own(_in_group)),
    "tensor-in-group": _kind(_own(_tensor_in_group)),
    "counted": _kind(_own(_times_count, lambda self: setattr(self, "count", 0), before=_counted)),
    "state-count": _kind(_own(_times_state_count, before=_state_count)),
    "metered": _kind(_own(_times_meter, lambda self: setattr(self, "meter", _Meter()), before=_measured)),
    "tensor-count": _kind(
        _own(_times_total, lambda self: setattr(self, "total", torch.zeros(())), before=_tensor_count)
    ),
    "of-class": _kind(_own(_times_count, count=0, before=_of_class)),
    "norms": _kind(_own(_by_norms, lambda self: setattr(self, "norms", []), before=_global_norm)),
    "norm-deque": _kind(
        _own(
            _by_norms, lambda self: setattr(self, "norms", deque(maxlen=3)), before=lambda self: self.norms.append(1.0)
        )
    ),
    "defaultdict": _kind(_own(_by_id, lambda self: setattr(self, "moments", defaultdict(lambda: None)))),
    "lookahead": _kind(_own(_slow)),
    "assigned": _kind(_own(_in_state, apply=_assigned)),
    "wrapper": lambda net: Wrapper(_optim.SGD(_params(net), lr=LR)),
    **RANDOM,
}


class Samples:
    """A scheduler of the script's own, as Megatron's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int = 1) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = LR / (1 + 0.1 * self.samples) * group.get("lr_scale", 1.0)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


class Listed(Samples):
    """Keeps what it has given in a list."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.past: list[float] = []

    def step(self, increment: int = 1) -> None:
        super().step(increment)
        self.past.append(self.optimizer.param_groups[0]["lr"])
        for group in self.optimizer.param_groups:
            group["lr"] = sum(self.past) / len(self.past)


class Stateless(Samples):
    """Whose state_dict leaves out what it counts."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _half(step: int) -> float:
    return 1.0 / (1 + step)


_S = lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: _S.StepLR(o, 2, 0.5),
    "lambda": lambda o: _S.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "lambdas": lambda o: _S.LambdaLR(o, [_half for _ in o.param_groups]),
    "cosine": lambda o: _S.CosineAnnealingLR(o, 5),
    "restarts": lambda o: _S.CosineAnnealingWarmRestarts(o, 2, 2),
    "one-cycle": lambda o: _S.OneCycleLR(o, 0.1, total_steps=200),
    "cyclic": lambda o: _S.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "sequential": lambda o: _S.SequentialLR(o, [_S.ConstantLR(o, 0.5, 2), _S.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: _S.ChainedScheduler([_S.ConstantLR(o, 0.5, 2), _S.ExponentialLR(o, 0.9)]),
    "multiplicative": lambda o: _S.MultiplicativeLR(o, lambda step: 0.95),
    "polynomial": lambda o: _S.PolynomialLR(o, 30, 2.0),
    "samples": Samples,
    "listed": Listed,
    "stateless": Stateless,
}
