"""Tensor slices: layers that are cut over several members, and communicate inside their passes.

A member computes one slice of each of its stages, and all slices of a stage do each of its passes together; their
orders agree on which pass is next (:func:`~bamboo_ds.schedule.compute_order`). Two things are different from layers
that are whole. Layers take their group from wherever the script has it, so that groups are exchanged below them
(:meth:`~bamboo_ds.comm.session.Session.among_slices`). And a loss may strike in the middle of a pass, which is *torn*
then: a part of its gradients is in the sums already. A role with a torn pass begins the iteration again, and so do the
other slices of the stage (:func:`~bamboo_ds.schedule.settle`).

Redundant forward passes would communicate as well, at times when the members that could answer do something else: there
are none (:func:`~.lanes.assists`), and a role that is taken over begins the iteration from its beginning.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from ..config import RedundancyMode
from ..schedule import RoleProgress
from ..topology import Layout, Role, batch_sources
from .layers import copied
from .members import EngineState
from .runtime import StageRuntime

logger = logging.getLogger("bamboo_ds")


def mode_for(mode: RedundancyMode, layout: Layout, rank: int) -> RedundancyMode:
    """What of ``mode`` is possible with this layout; the process of rank 0 says so if it is not all."""
    if layout.slices == 1 or not mode.eager_forward:
        return mode
    if rank == 0:
        acts_as = RedundancyMode.LAZY.value
        logger.warning("with tensor slices no redundant passes run: redundancy.mode %s acts as %s", mode.value, acts_as)
    return RedundancyMode.LAZY


class SlicingExecutor(EngineState, PipelineEngine):  # type: ignore[misc]  # DeepSpeed is untyped
    """Passes whose layers communicate with the other slices of their stage."""

    _passing = False  # DeepSpeed's constructor asks

    def _send_whole(self) -> None:
        """Send boundary tensors whole: each of a role's holders must be able to go on from them alone.

        DeepSpeed's ``pipe_partitioned`` and ``grad_partitioned`` send every slice a part of a tensor that all slices
        have whole, before and after. So without them nothing is computed differently.
        """
        self.is_pipe_partitioned = self.is_grad_partitioned = False

    @contextmanager
    def _among_slices(self) -> Iterator[None]:
        """In the body the layers of the bound role communicate with its other slices."""
        layout = self._layout
        if layout.slices == 1:
            yield
            return
        home, bound = (map(layout.rank, layout.slices_with(r.role)) for r in (self._home, self._binding.current))
        with self._job.session.among_slices(tuple(home), tuple(bound)):
            yield

    @contextmanager
    def _in_pass(self, keeps: bool) -> Iterator[None]:
        """The body is a pass of the bound role.

        Args:
            keeps: whether it may leave something behind if it is interrupted, so that it cannot simply be done again.
        """
        runtime = self._binding.current
        timing = {name for name, timer in self._timers().items() if timer.started_}
        self._passing = True
        self._job.session.passing = self._layout.slices == 1
        try:
            with self._among_slices():
                yield
        except BaseException:  # goes on up; a loss may come in any form
            runtime.torn = runtime.torn or keeps
            for name, timer in self._timers().items():
                if timer.started_ and name not in timing:
                    timer.stop()
            raise
        finally:
            self._passing = self._job.session.passing = False

    if hasattr(PipelineEngine, "curriculum_enabled_legacy"):

        def curriculum_enabled_legacy(self) -> bool:
            """As DeepSpeed's before 0.19, which asks in a pass too, to hand the sequence length to the model.

            Layers of pipelines do not take it: DeepSpeed spares them by the name of its own engine's class.
            """
            return not self._passing and bool(super().curriculum_enabled_legacy())

    def _timers(self) -> Mapping[str, Any]:
        """DeepSpeed's, by name."""
        return getattr(self.timers, "timers", {})

    def _note_layers(self, runtime: StageRuntime) -> None:
        """The first pass of an iteration begins: keep what later passes change of what the layers keep.

        Those of slices and of replicas may be done again from the first one on.
        """
        if (self._layout.slices > 1 or not runtime.owned) and runtime.first_layers is None:
            runtime.first_layers = copied(runtime.layers.capture())

    def _begin_again(self, progress: Mapping[Role, RoleProgress]) -> None:
        """Forget the passes of this member's roles that ``progress`` does not know of: their slices do them again."""
        self._binding.refresh()
        for runtime in self._binding.owned():
            known = progress[runtime.role]
            same = (known.forwards, known.backwards) == (runtime.forwards, runtime.backwards) and not runtime.torn
            if not (same or known.reduced):
                logger.info("role %s begins the iteration again with its other slices", runtime.role)
                runtime.begin_again()
        self._binding.reload()

    # -- batches ------------------------------------------------------------------------------------------

    def _is_source(self) -> bool:
        """Whether this member draws batches for its home pipeline."""
        return self._job.session.member in batch_sources(self._plan, self._home.role.pipeline)

    def _source(self, iterator: Any) -> Any:
        """Where this member draws batches from for its home pipeline, given the script's iterator; ``None``: nowhere.

        Of several slices mostly the first one has an iterator, and ``batch_fn`` gives the others what it has read.
        """
        if not self._is_source():
            return None
        return itertools.repeat(None) if iterator is None and self._layout.slices > 1 else iterator

    def _processed(self, batch: Any) -> Any:
        """A batch as the bound role uses it.

        With tensor slices ``batch_fn`` may communicate, so that all slices call it when they load the batch; else it is
        called where the batch is drawn.
        """
        if self._layout.slices == 1 or not self.batch_fn:
            return batch
        with self._among_slices():
            return self.batch_fn(batch)
