"""Tensor slices: layers that are cut over several members, and communicate inside their passes.

A member computes one slice of each of its stages, and all slices of a stage do each of its passes together; their
orders agree on which pass is next (:func:`~bamboo_ds.schedule.compute_order`). Two things are different from layers
that are whole. Layers take their group from wherever the script has it, so that groups are exchanged below them
(:meth:`~bamboo_ds.comm.attachment.Attachment.among_slices`). And a loss may strike in the middle of a pass, which is
partial then: a part of its gradients is in the sums already. A role with a partial pass goes back to sums that it has
kept (:mod:`.sums`), or to the beginning of the iteration, and so do the other slices of the stage
(:func:`~bamboo_ds.schedule.settle`).

Redundant forward passes would communicate as well, at times when the members that could answer do something else: there
are none (:func:`~..context.channels.assists`), and a role that is taken over goes on from sums alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...comm.inner import runs_behind
from ...config import RedundancyMode
from ...topology import Layout
from ..context.shared import InContext

logger = logging.getLogger("bamboo_ds")


def mode_for(mode: RedundancyMode, layout: Layout, rank: int) -> RedundancyMode:
    """The part of ``mode`` that this layout allows; the process of rank 0 says so if that is not all of it."""
    if layout.ahead or not mode.eager_forward:
        return mode
    if rank == 0 and mode is not RedundancyMode.AUTO:
        why = "tensor slices" if layout.slices > 1 else "one pipeline stage"
        acts_as = RedundancyMode.LAZY.value
        logger.warning("with %s no redundant passes run: redundancy.mode %s acts as %s", why, mode.value, acts_as)
    return RedundancyMode.LAZY


@dataclass(eq=False)
class SlicedPasses(InContext):
    """Passes whose layers may communicate with the other slices of their stage.

    Attributes:
        passing: a pass is under way.
    """

    passing: bool = field(default=False, init=False)

    def among(self, passing: bool = False) -> AbstractContextManager[None]:
        """In the body the layers of the bound role communicate with its other slices; ``passing``: in a pass."""
        return self.groups.among_slices(self.binding.local.role, self.binding.current.role, passing)

    def _note(self, passing: bool) -> None:
        self.passing = passing
        self.groups.note_pass(passing)

    @contextmanager
    def in_pass(self, keeps: bool) -> Iterator[None]:
        """The body is a pass of the bound role.

        Args:
            keeps: whether it may leave something behind if it is interrupted, so that it cannot simply be done again.
        """
        runtime = self.binding.current
        timing = {name for name, timer in self._timers().items() if timer.started_}
        self._note(True)
        try:
            with self.among(passing=True):
                yield
        except BaseException as error:  # goes on up; a loss may come in any form
            runtime.share.partial_pass = runtime.share.partial_pass or keeps
            for name, timer in self._timers().items():
                if timer.started_ and name not in timing:
                    timer.stop()
            if isinstance(error, Exception) and runs_behind(self.ds.device):
                self.groups.check()  # a layer may have failed on what an abort had left of a result
            raise
        finally:
            self._note(False)

    def _timers(self) -> Mapping[str, Any]:
        """DeepSpeed's timers, by name."""
        return getattr(self.ds.timers, "timers", {})

    def processed(self, batch: Any) -> Any:
        """A batch as the bound role uses it.

        With tensor slices ``batch_fn`` may communicate, so that all slices call it when they load the batch; else it is
        called where the batch is drawn.
        """
        if self.groups.layout.slices == 1 or not self.ds.batch_fn:
            return batch
        with self.among(), self.binding.for_script():
            return self.ds.batch_fn(batch)
