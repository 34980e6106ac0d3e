"""The parts of an iteration, put together."""

from __future__ import annotations

from collections.abc import Collection

from ...topology import Role
from ..checkpoints.own import OwnCheckpoints
from ..checkpoints.saving import Saves
from ..context.shared import EngineContext
from ..data.supply import BatchSupply
from ..replicas.building import StageBuilder
from ..replicas.construction import Construction
from .boundaries import Boundaries
from .committing import Commits
from .corruption import Corruption
from .division import Division
from .exactness import ExactChecks
from .exchanged import ExchangedWeights
from .generators import RoleGenerators
from .measures import Measures
from .passes import Passes
from .reduction import Reduction
from .redundant import RedundantPasses
from .replication import Replication
from .slices import SlicedPasses
from .steps import Steps
from .sums import PartialSums


class IterationParts:
    """The parts that execute the instructions of an iteration.

    Args:
        context: of the engine.
        supply: of batches.
        saves: of this member.
        builder: of further roles.
        tied_stages: stages whose gradients are summed with those of other stages.
        measures: what is measured of passes.

    Attributes:
        constructions: replicas that this member builds, by role.
    """

    def __init__(
        self,
        context: EngineContext,
        supply: BatchSupply,
        saves: Saves,
        builder: StageBuilder,
        tied_stages: Collection[int],
        measures: Measures,
    ) -> None:
        self.measures = measures
        self.constructions: dict[Role, Construction] = {}
        self.reduction = Reduction(context, tied_stages)
        self.checks = ExactChecks(context, self.reduction, builder, supply)
        self.slices, generators = SlicedPasses(context), RoleGenerators(context)
        self.sums = PartialSums(context)
        self.passes = Passes(context, supply, self.slices, generators, self.checks, measures, self.sums)
        self.boundaries = Boundaries(context, measures.idle)
        self.division = Division(context, self.boundaries, self.reduction, self.sums)
        self.redundant = RedundantPasses(
            context, supply, self.passes, self.boundaries, self.checks, measures, self.sums
        )
        self.exchanged = ExchangedWeights(context)
        self.own = OwnCheckpoints(context, saves)
        self.steps = Steps(context, generators, builder)
        self.replication = Replication(context, self.boundaries, self.checks, self.steps, self.constructions)
        self.corruption = Corruption(context, self.replication)
        differing = self.replication.differing
        self.commits = Commits(context, supply, self.own, self.checks, self.constructions, differing)
