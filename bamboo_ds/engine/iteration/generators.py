"""Random numbers of a role's passes and steps, wherever these run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...topology import Role
from ..context.shared import InContext
from ..stage.rng import Drawing, drawing_seed, keyed_attributes, keyed_generators, seed_attributes, seed_generators
from ..stage.runtime import StageRuntime


@dataclass(eq=False)
class RoleGenerators(InContext):
    """Random numbers of roles' passes and steps."""

    @contextmanager
    def keyed(self, drawing: Drawing, runtime: StageRuntime, micro_batch: int = 0) -> Iterator[None]:
        """In the body random numbers are those of the role of ``runtime``, equal on its owner and its shadow.

        All slices draw the same. Copies of the model draw different numbers in their passes; in a step they draw the
        same ones, if they all update the same parameters. In backward passes only torch's generators are keyed, and
        those that layers have themselves.

        Args:
            runtime: is bound.
        """
        seed = self._seed(drawing, runtime, micro_batch)
        others = drawing is not Drawing.BACKWARD
        with keyed_generators(seed, self.ds.device, self.layout.slice_of(runtime.role), others):
            if not runtime.layers.generators:
                yield
                return
            with keyed_attributes(runtime.layers.generators, seed):
                yield

    def blocks(self, runtime: StageRuntime, micro_batch: int) -> Callable[[int], None]:
        """A function that seeds the same generators for a block of the bound ``runtime`` in a forward pass."""

        def seed_block(block: int) -> None:
            seed = self._seed(Drawing.FORWARD, runtime, micro_batch, block)
            seed_generators(seed, self.ds.device, self.layout.slice_of(runtime.role))
            seed_attributes(runtime.layers.generators, seed)

        return seed_block

    def _seed(self, drawing: Drawing, runtime: StageRuntime, micro_batch: int, block: int = 0) -> int:
        layout, role = self.layout, runtime.role
        same = drawing is Drawing.STEP and not layout.sharded
        everywhere = Role(0 if same else layout.copy_of(role), role.stage)
        # Several evaluations may follow a step.
        step = len(self.history) if drawing is Drawing.EVALUATION else self.ds.global_steps
        return drawing_seed(drawing, self.progress.seed, step, everywhere, micro_batch, block)
