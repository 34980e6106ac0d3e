"""The progress from which an interrupted iteration is resumed: as much as fits together.

A role that was taken over goes on from the newest sums that its lost owner has sent (``redundancy.sync_every``), or
from the redundant passes that its heir has done. What the owner had given to its neighbours before that is gone::

    stage 1          F0 F1 F2 F3 B0 B1 B2          has received the gradients of 0 .. 3, and used those of 0 .. 2
    stage 2, lost    F0 F1 F2 F3 B0 B1 B2 B3       its sums of 4 micro-batches are at its heir, those of 2 as well
    stage 3          F0 F1 F2 F3 B0 B1 B2 B3 B4    has used the outputs of 0 .. 4

Stage 2 can go on with micro-batch 4: stage 1 has kept gradient 3, and stage 3 needs no output before 5. Had stage 1 not
received gradient 3, stage 2 would go on from its sums of 2, and send gradients 2 and 3 again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ..topology import Layout, Role
from .progress import PartProgress, RoleProgress, beside


def settle(
    layout: Layout, micro_batches: int, progress: Mapping[Role, RoleProgress], tied: Collection[int] = ()
) -> Mapping[Role, RoleProgress]:
    """The progress that a resumed iteration can build on: the most of ``progress`` that fits together.

    Every part begins with the most that it can go on from (:func:`ways`), and takes the next best as long as something
    asks for that:

    1. *A neighbour needs what is not here.* The next part needs the outputs of a part from its own ``forwards`` on; the
       part before needs the gradients from those on that it has used or kept. What is before ``since`` is gone. A role
       that was taken over with its reduced gradients alone has nothing for others at all.
    2. *Reductions are done by all.* The roles of a stage in all copies of the model are reduced together: what all of
       them hold is kept. If one of them lacks it all do the reduction again, for which those that were taken over do
       their passes again. So do stages that are reduced with others, always.
    3. *Tensor slices of a stage do their passes together.* What went into a sum of gradients cannot be taken out of it,
       and of a backward pass there is nothing left to do it again with. So all of them go on from the same place: that
       of one that was taken over, or of one where a loss came when some had finished a pass and others had not.

    Every part can begin the iteration again, and needs nothing then that its neighbours do not hold or compute again:
    so it ends. No part is asked for less than every answer needs, so there is none that builds on more.

    Args:
        layout: the logical world.
        micro_batches: micro-batches per pipeline and iteration.
        progress: progress of every role.
        tied: stages that hold weights of other stages, too, and are reduced with these.
    """
    roles = {role: _Settling(done, micro_batches) for role, done in progress.items()}
    parts = [[done.begin for done in roles[role].parts] for role in layout.roles]

    def place(role: Role) -> tuple[int, int]:
        return role.stage, layout.slice_of(role)

    def lacks(role: Role, index: int) -> bool:
        """Whether a neighbour of the part needs what is not here."""
        since, rank = roles[role].now(index).since, layout.rank(role)
        before, after = (beside(layout, parts, rank, index, step) for step in (-1, 1))
        if after is not None and roles[layout.roles[after[0]]].now(after[1]).forwards < since:
            return True
        return before is not None and roles[layout.roles[before[0]]].given(before[1]) < since

    # Stages, by slice, that some copy of the model has not reduced.
    lacking = {place(role) for role, done in progress.items() if role.stage in tied or not done.reduced}

    def give_way(role: Role, index: int) -> None:
        if roles[role].reduced:
            lacking.add(place(role))
        roles[role].take_next(index)

    again = True
    while again:
        again = False
        for role, mine in roles.items():
            if mine.reduced and place(role) in lacking:
                mine.reduced, again = False, True
            for index in range(len(mine.parts)):
                while lacks(role, index):
                    give_way(role, index)
                    again = True
        for role in layout.roles if layout.slices > 1 else ():
            together = layout.slices_with(role)
            if layout.slice_of(role) == 0 and len({roles[each].place for each in together}) > 1:
                furthest = max(roles[each].place for each in together)
                for each in together:
                    if roles[each].place == furthest:
                        give_way(each, 0)
                again = True
    return {role: mine.settled() for role, mine in roles.items()}


def ways(done: PartProgress) -> list[PartProgress]:
    """The points from which a part can go on, the most finished passes first, the iteration's beginning last.

    As it is, unless a pass is broken. From any sums that its member holds: of newer ones than its own, forward passes
    that it has finished beyond them stay finished.
    """
    found = {done.passes(0, 0, 0)}
    if not done.broken:
        found.add(done.passes())
    for count in done.sums:
        if count <= done.backwards:  # of its own: what it has given to others before is here
            found.add(done.passes(count, count, min(done.since, count)))
        else:
            found.add(done.passes(count if done.broken else max(done.forwards, count), count, count))
    return sorted(found, key=lambda each: (each.backwards, each.forwards, -each.since), reverse=True)


class _Settling:
    """A role, and what it could go on from.

    Attributes:
        reduced: it counts as finished.
        parts: as they were told.
    """

    def __init__(self, done: RoleProgress, micro_batches: int) -> None:
        self._done, self._all = done, micro_batches
        self.reduced, self.parts = done.reduced, done.parts
        self._ways = [ways(part) for part in done.parts]

    def now(self, index: int) -> PartProgress:
        """The progress that part ``index`` goes on from."""
        way = self._ways[index][0]
        if not self.reduced:
            return way
        return way.passes(self._all, self._all, self._all if self._done.state_only else way.since)

    def given(self, index: int) -> int:
        """The number of micro-batches of whose outputs part ``index`` has the gradients, or needs none any more."""
        now = self.now(index)
        # Those that were used are not here any more.
        kept = self.parts[index].given if now.backwards >= self.parts[index].backwards else 0
        return max(now.backwards, kept)

    @property
    def place(self) -> tuple[int, int]:
        """Finished passes of a role that is not divided: those of slices have to be the same."""
        now = self.now(0)
        return now.backwards, now.forwards

    def take_next(self, index: int) -> None:
        """Part ``index`` is not to go on from where it would have."""
        if self.reduced:
            self.reduced = False
        else:
            self._ways[index].pop(0)

    def settled(self) -> RoleProgress:
        """The settled progress."""
        return replace(self._done, parts=tuple(each[0] for each in self._ways), reduced=self.reduced)
