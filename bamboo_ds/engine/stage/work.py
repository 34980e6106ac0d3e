"""The work of a member for one role in one iteration: its share of the passes, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...comm.wire.payloads import Payload, Staged
from ...errors import ProtocolError
from ...schedule import PartProgress
from ...state import Tree
from .commit import Measured

#: DeepSpeed's buffers of a stage or of a part of one, by kind and micro-batch.
Buffers = dict[str, list[Any]]


@dataclass(eq=False)
class Part:
    """The work that this member has done of a part of a stage in the current iteration; of all of it, mostly.

    Attributes:
        begin: its first block.
        end: the first block behind it.
        buffers: DeepSpeed's, by kind and micro-batch.
        forwards: forward passes finished (redundant ones for a replica).
        backwards: backward passes accumulated.
        activations: outputs sent to the next part or stage, by micro-batch, detached. Kept until commit: they are what
            its new owner needs.
        gradients: gradients of the inputs, sent to the part or stage before, by micro-batch.
        micro_losses: loss of each micro-batch between its forward and its backward (last stage).
        saved: bytes that autograd has saved for redundant forwards of this iteration, by micro-batch, until their
            backwards.
        since: see :class:`~bamboo_ds.schedule.PartProgress`.
        given: gradients of its outputs that had arrived before a loss and are not used yet, by micro-batch.
        marks: what the layers keep and the losses are after so many forward passes, for the sums that go with them.
    """

    begin: int
    end: int
    buffers: Buffers
    forwards: int = field(default=0, init=False)
    backwards: int = field(default=0, init=False)
    activations: dict[int, Payload | Staged] = field(default_factory=dict, init=False)
    gradients: dict[int, Payload | Staged] = field(default_factory=dict, init=False)
    micro_losses: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    saved: dict[int, int] = field(default_factory=dict, init=False)
    since: int = field(default=0, init=False)
    given: dict[int, Payload] = field(default_factory=dict, init=False)
    marks: dict[int, Tree] = field(default_factory=dict, init=False)

    @property
    def begun(self) -> bool:
        """Whether a pass is done."""
        return self.forwards > 0

    def progress(self) -> PartProgress:
        """The passes that are finished."""
        return PartProgress(self.begin, self.end, self.forwards, self.backwards, self.since)

    @property
    def gradients_held(self) -> int:
        """The number of micro-batches, without a gap, whose output gradients are used or here."""
        count = self.backwards
        while count in self.given:
            count += 1
        return count

    def use_given(self, until: int) -> None:
        """Uses what is here of gradients up to micro-batch ``until``; what comes from there on is sent again.

        Raises:
            ProtocolError: one is missing.
        """
        self.given = {m: gradient for m, gradient in self.given.items() if self.backwards <= m < until}
        missing = [m for m in range(self.backwards, until) if m not in self.given]
        if missing:
            raise ProtocolError(f"gradients of micro-batches {missing} are gone, and no part holds them any more")

    def forget(self, to: PartProgress) -> None:
        """Drops what is of passes that do not count at ``to``, or are over."""
        flying = range(to.backwards, to.forwards)
        for values in self.buffers.values():
            for m in range(len(values)):
                if m not in flying:
                    values[m] = None
        stores: list[tuple[dict[int, Any], range]] = [
            (self.activations, range(to.since, to.forwards)),
            (self.gradients, range(to.since, to.backwards)),
            (self.micro_losses, flying),
            (self.saved, flying),
            (self.marks, range(to.backwards + 1, to.forwards + 1)),
        ]
        for store, kept in stores:
            for m in [m for m in store if m not in kept]:
                del store[m]
        self.forwards, self.backwards, self.since = to.forwards, to.backwards, to.since


@dataclass(frozen=True)
class PartSums:
    """Sums that the shadow of a role has computed of it, for the owner.

    Attributes:
        gradients: of trainable parameters, by ``id``.
        losses: mean losses of the pipeline, if the part ends it.
    """

    gradients: dict[int, torch.Tensor]
    losses: torch.Tensor | None


class Share:
    """The share of this member in a stage in one iteration: all of it, mostly.

    Args:
        blocks: number of blocks of the stage.
        buffers: DeepSpeed's, for passes of all of it.

    Attributes:
        parts: what is computed here, in the order of the layers; of a replica that this member computes nothing of for
            its owner: what it computes redundantly.
        part: the one that passes act on.
        helps: whether this member computes a part of the role as its shadow.
        partial_pass: whether a loss has interrupted a pass that had changed something already.
        spent: whether what is here was computed as the owner of the whole stage, which this member is not any more.
        first_layers: what the layers kept before the first forward, where passes may have to be done again from the
            first one on, here or where the stage is copied to.
        received: what the shadow has computed of an owned role, which is not in this member's own sums.
    """

    def __init__(self, blocks: int, buffers: Buffers) -> None:
        self.blocks = blocks
        self.parts = [Part(0, blocks, buffers)]
        self.part = self.parts[0]
        self.helps = self.partial_pass = self.spent = False
        self.first_layers: Tree | None = None
        self.received: PartSums | None = None

    @property
    def begun(self) -> bool:
        """Whether a pass is done."""
        return any(part.begun for part in self.parts)

    @property
    def reversible(self) -> bool:
        """Whether passes can be done again from the first one on: none is done, or what the layers kept is known."""
        return self.first_layers is not None or not self.begun

    @property
    def divided(self) -> bool:
        """Whether the stage is not computed as one here."""
        return len(self.parts) > 1 or self.ranges != [(0, self.blocks)]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The blocks of each part: the first one, and the one behind the last."""
        return [(part.begin, part.end) for part in self.parts]

    def choose(self, begin: int) -> Part:
        """Passes act on the part that begins with block ``begin`` from now on; on the first one, if there is none."""
        self.part = next((part for part in self.parts if part.begin == begin), self.parts[0])
        return self.part

    def divide(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Computes these blocks. Parts that are there stay as they are; gradients of others must not be in the sums."""
        buffers, known = self.parts[0].buffers, dict(zip(self.ranges, self.parts, strict=True))
        self.parts = [
            known.get(each) or Part(*each, {name: [None] * len(buffers[name]) for name in buffers}) for each in ranges
        ]
        self.part = self.parts[0]


@dataclass
class Results:
    """Results of a role's passes in one iteration, here or at its owner, up to its optimizer step.

    Attributes:
        tied: gradients of tied weights, summed over the stages that hold them, by place in the list of trainable
            parameters.
        reduced: what the optimizer step needs of the gradients after the data-parallel reduction; ``None`` until then.
        measured: what the commit has to know of them.
        loss: the pipeline's mean loss (and additional losses), if the role is the last stage and all of its forwards
            are done or its replica was received.
        layers: what the layers keep, which came with a replica's reduced gradients; applied at the step.
        consumed: checksum of each micro-batch that a first or last stage has loaded, with ``observe.checksums``; of a
            stage that is both, those of the labels behind those of the inputs. It travels with the reduced gradients
            that the micro-batch has contributed to.
    """

    tied: dict[int, torch.Tensor] = field(default_factory=dict)
    reduced: list[torch.Tensor] | None = None
    measured: Measured | None = None
    loss: torch.Tensor | None = None
    layers: Tree | None = None
    consumed: dict[int, int] = field(default_factory=dict)

    def drop_reduction(self) -> None:
        """Drops what was reduced; the micro-batches that were loaded stay."""
        self.tied.clear()
        self.reduced = self.measured = self.loss = self.layers = None

    def checksums(self) -> list[int]:
        """``consumed`` in order, once all micro-batches are loaded."""
        return [self.consumed[m] for m in range(len(self.consumed))]


@dataclass
class Verification:
    """Whether a replica equals its owner, as far as they have compared.

    Attributes:
        checksum: of the state after the last step, if that step was one to verify.
        tensors: checksums of the single tensors, which ``checksum`` is made of.
        shared: of what the same stage of other pipelines has equal, if it is to be compared with those.
        valid: false between a failed comparison and the copy that mends the replica.
    """

    checksum: int | None = None
    tensors: list[int] = field(default_factory=list)
    shared: int | None = None
    valid: bool = True
