"""Facts that two copies of a stage must have alike, their differences, and the reasons; of the check of first steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...bare import bare
from ...topology import Role
from ..replicas.replica import capture
from ..stage.beside import Contents
from ..stage.runtime import StageRuntime
from ..stage.tracing import checksum

#: What is compared, by what it is called: tensors as they are, all else as text.
Facts = dict[str, Any]

#: What is compared: what passes give, all that a replica has, and what is kept beside it.
REHEARSAL, REPLICA, BESIDE = "rehearsal", "replica", "beside"
#: What is said of layers, whose results are compared as well.
NOT_SENT = (
    "the check of the first steps: what copies of role %s do not get has changed: %s. It has made no difference in "
    "these steps. If results may depend on it later, keep it in tensors and numbers in attributes or buffers of "
    "layers, give it from get_extra_state, or from the state_dict of a scheduler"
)
#: What the default representation of an object ends with; it is another one in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
#: The largest difference, as a part of the largest number of a tensor, that may come from rounding alone.
_ROUNDING = 1 / 16

_ELSEWHERE = (
    "the time, the process or the host (other processors, or other versions of libraries): leave them out of what is "
    "computed, and use hosts of one kind",
    "a kernel that is not deterministic: torch.use_deterministic_algorithms(True)",
)
_DATA = (
    "data: the iterators of a pipeline's first and last stage give different batches, or augment them with random "
    "numbers of the rank: seed them by engine.grid.get_data_parallel_rank()"
)
_PASSES = (
    "what the script sets after deepspeed.initialize (the loss function, settings of the module): give it before",
    "state of layers that copies do not have (lists, dictionaries and tensors in attributes, variables of the script, "
    "changes through .data): make it buffers or numbers, or return it from get_extra_state",
    "random numbers that are not keyed (Python's and NumPy's in a backward pass, a generator that is no attribute of a "
    "layer): draw torch's",
)
_STEPS = (
    "what the script sets after deepspeed.initialize (a learning-rate scheduler): give it to deepspeed.initialize",
    "what the optimizer's step uses besides its state (objects in its attributes, variables of the script): keep it in "
    "the state of parameters",
    "weights that the script changes through .data: change them under torch.no_grad()",
)


def reasons(what: str, ends: bool) -> tuple[str, str]:
    """The meaning of a difference of two copies in ``what`` was compared, and its possible reasons.

    Args:
        what: was compared.
        ends: of a stage that loads batches.
    """
    if what == REHEARSAL:
        causes = [*((_DATA,) if ends else ()), *_PASSES, *_ELSEWHERE]
        return "its shadow computes something else than its owner from the same inputs", "; ".join(causes)
    if what == REPLICA:
        return "after the step its replica is not what its owner has", "; ".join((*_STEPS, *_ELSEWHERE))
    return "a copy that was made after the first step lacks what its owner has gathered", _STEPS[1]


def lacks(theirs: Mapping[str, int], mine: Mapping[str, Contents]) -> list[str]:
    """Names of what an owner has, by digests, and a copy has not."""
    return [name for name, digest in theirs.items() if name not in mine or mine[name].digest != digest]


def state_of(runtime: StageRuntime) -> Facts:
    """All that a replica must equal, by name. The runtime's attributes must be up to date."""
    facts: Facts = dict(runtime.named_tensors())
    state = capture(runtime)
    optimizer, layers = state["optimizer"], state["layers"]
    for name, part in (
        ("trainable parameters", state["trains"]),
        ("number of layer", layers["numbers"]),
        ("extra state of layer", layers["extra"]),
        ("group of the optimizer", optimizer["inner"]["param_groups"]),
        ("attribute of the optimizer", optimizer["attributes"]),
        ("loss scaler", optimizer["scaler"]),
        ("learning-rate scheduler", state["scheduler"]),
        ("counter", state["counters"]),
    ):
        facts.update(_leaves(name, part))
    return facts


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, each with its path; what is no tensor as text, in which every bit of a number shows."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _leaves(f"{path} {name}", each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _leaves(f"{path} {number}", each)
    else:
        yield path, value if torch.is_tensor(value) else as_text(value)


def as_text(value: Any) -> str:
    """``value`` as text that is equal in all processes where the values are."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(as_text, value)))}}}"  # hashes of text differ between processes
    return _ADDRESS.sub("", repr(value))


def summed(facts: Facts) -> Facts:
    """``facts`` with checksums in the place of tensors."""
    return {name: f"checksum {checksum(each)}" if torch.is_tensor(each) else each for name, each in facts.items()}


def suspects(mine: Facts, theirs: Facts) -> list[str]:
    """Names of what two copies do not have alike, of what :func:`summed` gives of them; in the owner's order."""
    return [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]


def differences(mine: Facts, theirs: Facts) -> list[str]:
    """The owner's facts that differ from ``mine``, in their order, and by how much where that is a number."""
    differing = []
    for name in {**theirs, **mine}:
        if name not in mine or name not in theirs:
            differing.append(f"{name} (only the {'shadow' if name in mine else 'owner'} has it)")
            continue
        own, other = mine[name], theirs[name]
        if not torch.is_tensor(own) or not torch.is_tensor(other):
            if own is not other and (torch.is_tensor(own) or torch.is_tensor(other) or own != other):
                differing.append(name if not isinstance(own, str) else f"{name} ({own} instead of {other})")
        elif (own.dtype, own.shape) != (other.dtype, other.shape):
            kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (own, other)]
            differing.append(f"{name} ({' instead of '.join(kinds)})")
        elif checksum(own) != checksum(other):
            differing.append(f"{name} (by up to {_apart(own, other)[0]:.3g})")
    return differing


def only_rounded(mine: Facts, theirs: Facts) -> bool:
    """Whether all that is known in numbers differs by no more than kernels that are not deterministic may round."""
    if mine.keys() != theirs.keys():
        return False
    known = False
    for name, own in mine.items():
        other = theirs[name]
        if not torch.is_tensor(own) or not torch.is_tensor(other):
            if isinstance(own, str) and own != other:
                return False
            continue  # checksums: whatever follows from them is known in numbers, too
        if (own.dtype, own.shape) != (other.dtype, other.shape):
            return False
        apart, largest = _apart(own, other)
        if not apart <= _ROUNDING * largest:
            return False
        known |= apart > 0
    return known


def _apart(own: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """The largest difference of two tensors of one shape, and the largest number of them."""
    own, other = bare(own), bare(other)
    if not own.numel():
        return 0.0, 0.0
    wide = torch.complex128 if own.is_complex() else torch.float64
    first, second = (each.cpu().to(wide) for each in (own, other))
    return (first - second).abs().max().item(), max(first.abs().max().item(), second.abs().max().item())


@dataclass
class Tally:
    """The counts of what this member has compared, and the seconds that it has taken.

    ``changed``: roles that it has left out after their scripts had changed them; ``exhausted``: those whose rehearsal
    has exhausted the memory, which it leaves out from then on.
    """

    steps: int = 0
    rehearsals: int = 0
    tensors: int = 0
    differing: int = 0
    seconds: float = 0.0
    roles: set[Role] = field(default_factory=set)
    changed: set[Role] = field(default_factory=set)
    exhausted: set[Role] = field(default_factory=set)

    def told(self) -> dict[str, Any]:
        """The same as JSON has it; roles as pipeline and stage."""
        values = vars(self).items()
        return {
            name: sorted((role.pipeline, role.stage) for role in value) if isinstance(value, set) else value
            for name, value in values
        }


def total(told: Iterable[dict[str, Any]], name: str) -> int:
    """The sum of what all members have counted."""
    return sum(each[name] for each in told)


def union(told: Iterable[dict[str, Any]], name: str) -> set[tuple[int, int]]:
    """Pipeline and stage of the roles that any member names."""
    return {(pipeline, stage) for each in told for pipeline, stage in each[name]}


def in_words(roles: Iterable[Sequence[int]]) -> str:
    """Roles, given as pipeline and stage, in words."""
    return ", ".join(f"stage {stage} of pipeline {pipeline}" for pipeline, stage in roles)
