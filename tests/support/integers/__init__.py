"""Jobs on integers: the schedule, the planner and the decisions of recoveries, with numbers in the place of tensors.

Each member is a coroutine that executes the programs of :mod:`bamboo_ds.schedule`. A micro-batch's result is its
number, a sum of gradients the tuple of the numbers that are in it, an optimizer's state the number of its steps.
A *cut* ends an epoch between any two instructions of any members: some are lost, or none where a plan interrupts an
iteration; of what is on its way a part has arrived, and the others go on as the engine does: by the planner's plan, the
reports of all, and the decision that follows from these (:func:`bamboo_ds.engine.recovery.reports.decision_of`).

What is checked, and where:

* every micro-batch counts once in each sum, in its order: ``Instructions._sums_of``, ``Copies.step``
* nobody waits for what nobody sends: ``World.run``; and nobody sends what nobody receives: ``World._check_committed``
* no member has more micro-batches under way than its plan says: ``Programs._check_under_way``
* the passes that are left are done, and no others: ``World._check_committed``; what is told as redone was done before:
  ``Recovery.check_redone``
* all members decide alike, in whatever order they know the reports: ``Recovery.decide``
* owners and replicas have the same state: :func:`check_end`

What the engine's own parts make of it, with tensors and threads: :mod:`tests.model.test_takeover_cuts`.
"""

from .case import Case, Fatal
from .leader import Leader
from .world import World, check_end

__all__ = ["Case", "Fatal", "Leader", "World", "check_end"]
