"""The process groups of each role, and how this process acts in them for a role that is not its script's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ...comm.attachment import DRAW, Alone, Answer, slices_name
from ...comm.session import Session
from ...topology import Layout, Role
from .tied import ties


class RoleGroups:
    """Groups have names that are equal on all members.

    Args:
        session: this process's data plane.
        layout: the logical world.
    """

    def __init__(self, session: Session, layout: Layout) -> None:
        self.layout = layout
        self._session = session

    def install(self, role: Role, grid: Any) -> None:
        """Gives ``grid`` the groups of ``role``'s stage."""
        layout, rank = self.layout, self.layout.rank(role)
        ranks = [layout.rank(sibling) for sibling in layout.siblings(role)]
        name = f"bamboo/data/{role.stage}/{layout.slice_of(role)}"
        grid.dp_group, grid.dp_proc_group = ranks, self._session.logical_group(name, ranks, rank)
        if layout.slices > 1:
            ranks = [layout.rank(each) for each in layout.slices_with(role)]
            grid.slice_group = ranks
            grid.slice_proc_group = self._session.logical_group(slices_name(ranks), ranks, rank)

    def connect_ties(self, module: Any, role: Role) -> None:
        """Gives ``module``, the stage of ``role``, what DeepSpeed's constructor makes for its tied layers."""
        layout, comms = self.layout, {}
        for key, stages in ties(module).items():
            if role.stage not in stages:
                continue
            ranks = [layout.rank(Role(role.pipeline, stage)) for stage in stages]
            name = f"bamboo/tied/{key}/{role.pipeline}"
            comms[key] = {
                "ranks": ranks,
                "group": self._session.logical_group(name, ranks, layout.rank(role)),
                "weight_attr": module.tied_weight_attrs[key],
                "module": module.tied_modules[key],
            }
            for parameter in module.tied_modules[key].parameters():
                # DeepSpeed's optimizers with masters count a tied layer on its first stage.
                parameter.ds_pipe_replicated = role.stage != stages[0]
        module.tied_comms = comms

    def acting_for(self, role: Role, answer: Answer) -> AbstractContextManager[None]:
        """In the body this process is the rank of ``role``, and collectives are answered by ``answer``."""
        return self._session.attachment.acting_for(self.layout.rank(role), answer)

    def note_pass(self, passing: bool) -> None:
        """The main thread begins or ends a pass. Layers that are whole call no collectives in it."""
        self._session.attachment.passing = passing and self.layout.slices == 1

    def alone(self, what: Alone) -> AbstractContextManager[None]:
        """In the body ``what`` of the script runs, which must not communicate; tensor slices draw batches together."""
        return nullcontext() if what is DRAW and self.layout.slices > 1 else self._session.attachment.among_nobody(what)

    def check(self) -> None:
        """Raises ``EpochChanged`` if the current epoch is aborted."""
        self._session.check()

    def among_slices(self, local: Role, role: Role, passing: bool) -> AbstractContextManager[None]:
        """In the body layers communicate with the other slices of ``role``; the script's stage is that of ``local``.

        Args:
            passing: in a pass.
        """
        layout = self.layout
        if layout.slices == 1:
            return nullcontext()
        mine, bound = ([layout.rank(each) for each in layout.slices_with(r)] for r in (local, role))
        return self._session.attachment.among_slices(mine, bound, passing)
