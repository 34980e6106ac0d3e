"""The border between the engine and the script: what the script changes, and the losses that hit its collectives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...comm.calls.script import Lacking, ScriptCollectives, ThreadContext
from ...errors import EpochChanged, FatalLoss, UnsupportedError
from ...topology import Role
from ..context.records import ScriptPhase
from ..context.shared import InContext
from ..joining.replay import Replay
from ..recovery.announcements import Announcements
from ..recovery.copies import Copies
from ..recovery.takeover import Takeover
from ..replicas.building import StageBuilder
from ..replicas.refusals import (
    check_optimizer,
    check_optimizer_hooks,
    check_step,
    compiled_in,
    hooks_of,
    refuse_compiled,
    refuse_hooks,
    registered,
)
from ..script.assigned import described, parts_in
from ..script.changes import CURE, Adjustable, Weights, away_from, without_process
from ..stage.optimizers import NoOptimizer, check_freezing
from ..stage.wrappers import is_sharded, stage_optimizer

logger = logging.getLogger("bamboo_ds")

#: What follows from parts that are missing.
_OF_COLLECTIVES = (
    "Sums and means of what all ranks have alike are right; those of parameters or optimizer states of each rank, such "
    "as a norm over all stages, are wrong until each rank has a process that computes its stage again"
)
_OF_MESSAGES = "What the script computes from it must be right without it: both ranks have to have the same"


@dataclass(eq=False)
class ScriptCalls(InContext):
    """Knows whether the main thread is in the engine or in the script, and recovers in the script's collectives."""

    builder: StageBuilder
    copies: Copies
    replay: Replay
    takeover: Takeover
    collectives: ScriptCollectives
    announcements: Announcements
    #: Depth of calls of the engine.
    _depth: int = field(default=0, init=False)
    #: How the engine has left to the script what it may set.
    _left: Adjustable = field(init=False)
    _weights: Weights = field(init=False)
    #: Modules besides the layers that the script has put into its stage since then.
    _parts: set[str] = field(default_factory=set, init=False)
    _trained: list[bool] = field(init=False)
    #: How many hooks had been registered then.
    _hooks: int = field(init=False)
    #: What was compiled then of the local role's stage.
    _compiled: frozenset[str] = field(init=False)
    _warned: bool = field(default=False, init=False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The body is a call of the script: what it does is the engine's.

        Raises:
            UnsupportedError: it comes from within another one.
        """
        self.progress.operation.check_idle()
        if not self._depth:
            self.collectives.flush()
            self.follow()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.leave()

    def leave(self) -> None:
        """Remembers, as the script goes on, how it finds what it may set."""
        self.binding.refresh()
        local = self.binding.local
        if self.progress.script.behind:  # the operation before the one that it takes part in may be done now
            self.copies.note_position((self.progress.sequence - 1, False))
        self._left = Adjustable.of(local)
        self._note_count()
        self._weights = Weights(local.layers)
        self._trained = local.trains()
        self._hooks = registered()
        self._compiled = compiled_in(local.module)

    def follow(self) -> None:
        """Gives to all roles what the script has set since it went on."""
        self.binding.refresh()
        local = self.binding.local
        self._note_count()
        given = isinstance(local.optimizer, NoOptimizer) and local.attributes["basic_optimizer"] is not None
        if given:
            self._take_optimizer()
        assigned = self._follow_settings() and not self.progress.script.behind
        if given and not self.progress.script.behind:
            self._copy_optimizers()
        written = not (self.progress.script.behind) and self._follow_weights()
        frozen = local.trains() != self._trained and self._follow_freezing()
        self.announcements.assigned |= assigned
        if written or frozen:
            self.announcements.tell(written, local.trained if frozen else None)
        check_step(local.attributes["basic_optimizer"])
        if self.builder.compiled_with is None:  # else the engine has compiled them for it
            refuse_compiled(compiled_in(local.module) - self._compiled)
        if registered() != self._hooks:
            refuse_hooks(hooks_of(local.module, self._hooks))
            check_optimizer_hooks(local.attributes["basic_optimizer"])

    def _take_optimizer(self) -> None:
        """The script has given an optimizer to an engine that had none, by ``engine._configure_optimizer``.

        Raises:
            UnsupportedError: it is one that copies of the stage could not have.
            FatalLoss: this member computes a stage whose script is lost, and has given none.
        """
        local, left = self.binding.local, self._left.values
        basic, wrapper = local.attributes["basic_optimizer"], local.attributes["optimizer"]
        check_optimizer(basic, self.epoch.layout.copies > 1 or self.epoch.job.settings.redundancy.mode.replicas)
        check_optimizer_hooks(basic)
        if is_sharded(wrapper) and self.epoch.layout.copies > 1 and not self.epoch.layout.sharded:
            raise UnsupportedError(
                f"a {type(wrapper).__name__} that is given after deepspeed.initialize is not supported with several "
                "pipelines: give the optimizer to deepspeed.initialize"
            )
        others = [
            (runtime.role.pipeline, runtime.role.stage) for runtime in self.binding.owned() if runtime is not local
        ]
        if others:
            plan = self.epoch.plan  # a member that joins has none yet
            checkpoint = self.epoch.job.newest_checkpoint(plan)
            raise FatalLoss(others, plan.lost, checkpoint, part="an optimizer, given after deepspeed.initialize, of ")
        local.optimizer = stage_optimizer(self.builder.ds, self.builder.groups, local)
        for runtime in self.binding.replicas():
            self.binding.drop(runtime.role)
        self._left, self._weights, self._hooks = Adjustable.of(local), Weights(local.layers), registered()
        self._left = self._left.as_if(left)

    def _copy_optimizers(self) -> None:
        """Copies of stages get their optimizers; all members do so before the same operation.

        Raises:
            FatalLoss: a loss has interrupted it.
        """
        try:
            self.copies.copy_state(self.epoch.layout.roles)
        except EpochChanged as error:
            checkpoint = self.epoch.job.newest_checkpoint(self.epoch.plan)
            raise FatalLoss([], self.epoch.plan.lost, checkpoint) from error
        self.copies.tell_replicas()

    def _follow_settings(self) -> bool:
        """Gives settings and attributes to all roles; whether attributes that members compare are among them."""
        local = self.binding.local
        changed = Adjustable.of(local).since(self._left, shared=(self.builder.ds.engine,))
        self._parts = parts_in(changed.values)
        if not changed:
            return False
        if self._parts:
            local.layers.look_again()
        assigned = described(changed.values)
        self.progress.script.assigned.update(assigned)
        if changed.replacement is not None:
            local.pristine = changed.replacement.pristine
        joins = self.job.channel.joiner and self.progress.script.behind
        if joins and self.replay.position != self.progress.script.target:
            return False  # what the others did long ago: copies that this member gets have it
        for runtime in self.binding.runtimes.values():
            if runtime is not local:
                runtime.catch_up()
                if not self.progress.script.behind:
                    changed.check(runtime)
                changed.give(runtime)
        self.binding.reload()
        self.copies.follow_settings(changed)
        return bool(assigned)

    def _follow_weights(self) -> bool:
        """Notes whether the script has changed its stage, for the holders of the stage's replica.

        Raises:
            UnsupportedError: it has put other parameters there, or gradients.
            FatalLoss: no script does so with a stage whose own is lost.
        """
        self._weights.check_parameters()
        self._weights.check_gradients()
        changed = self._weights.changed(self._parts)
        if not changed:
            return False
        role, changes = self.binding.local.role, self.binding.local.layers.changes
        away = away_from(self.epoch.plan, role, self.progress.script.known_changes, changes.count)
        if away:
            self._restart(away, f"the script that changes {changed[0]} and the like in ")
        changes.note(self.progress.steps)
        if changes.count > 1:  # it would go on to do so
            self.job.channel.need_every_rank()
        if self.progress.steps:
            self._tell_once(
                f"the script has changed {changed[0]} of its stage between two calls. Replicas follow, but a loss "
                "right after such a change makes the job start again, and so does any loss where it goes on to do so, "
                f"with a worker for each rank: {CURE}"
            )
        self.progress.script.changed.update(changed)
        return True

    def _tell_once(self, what: str) -> None:
        """Tells what the script does to its stage that needs the process of each rank."""
        if not self._warned:
            self._warned = True
            logger.warning("%s", what)

    def _restart(self, roles: list[Role], part: str) -> None:
        """Raises ``FatalLoss``: only the lost scripts of ``roles`` could do what this one has just done.

        A restart has a worker for each rank.
        """
        self.job.channel.need_every_rank()
        lost, checkpoint = self.epoch.plan.lost, self.epoch.job.newest_checkpoint(self.epoch.plan)
        raise FatalLoss([(role.pipeline, role.stage) for role in roles], lost, checkpoint, part=part)

    def _note_count(self) -> None:
        """Notes by how much DeepSpeed's count of steps, which checkpoints and scripts set, is ahead of the job's."""
        if not self.progress.script.behind:
            self.job.channel.ahead = self.binding.local.attributes["global_steps"] - self.progress.steps

    def _follow_freezing(self) -> bool:
        """The script has frozen parameters of its stage, or made them trainable: whether others must know.

        Raises:
            UnsupportedError: it cannot be followed exactly.
            FatalLoss: no script does so with a stage whose own is lost.
        """
        local = self.binding.local
        away = [] if self.progress.script.behind else without_process(self.epoch.plan)
        if away:
            self._restart(away, "the script that freezes parameters, or makes them trainable, in ")
        if self.binding.runtimes.get(local.role) is not local or not local.owned:
            return False  # a member that joins replays what the stage's owner has done
        check_freezing(local.optimizer)
        local.trained = local.trains()
        if self.progress.steps:
            self._tell_once(
                "the script has frozen parameters of its stage between two calls, or made them trainable. Replicas "
                "follow; after the loss of a rank nobody does so with its stage, and the next such change makes the "
                "job start again, with a worker for each rank. Do it in a function that all copies of a stage follow: "
                "bamboo_ds.for_each_stage(engine, lambda engine: freeze(engine.module))"
            )
        return True

    # -- the script's collectives -------------------------------------------------------------------------

    def place(self) -> ThreadContext:
        """The place of the main thread."""
        if self._depth or self.progress.script.phase is ScriptPhase.RESUMING:
            return "engine"
        return "replay" if self.progress.script.behind else "script"

    def recover(self) -> None:
        """Recovers from a loss that has hit the script, and remembers for the next operation how it goes on."""
        self.follow()
        self._depth += 1
        try:
            self.takeover.recover_between("between two operations")
            self.binding.use(self.binding.local)
            self.leave()
        finally:
            self._depth -= 1

    def tell(self, lacking: Lacking) -> None:
        """A collective of the script goes on with other parts than those of lost ranks, or a message is left out."""
        listed = {name: ", ".join(map(str, getattr(lacking, name))) for name in ("ranks", "lost", "moved")}
        lost = f"no process runs as ranks ({listed['lost']}) now, and {lacking.result}" if lacking.lost else ""
        moved = f"other members compute the stages of ranks ({listed['moved']}) now" if lacking.moved else ""
        logger.warning(
            "%s over ranks %s, called at %s: %s. %s. This is said once for each place",
            lacking.operation,
            listed["ranks"],
            lacking.place,
            "; ".join(filter(None, (lost, moved))),
            _OF_MESSAGES if lacking.operation in ("send", "recv") else _OF_COLLECTIVES,
        )
        self.job.channel.event(
            "collective_incomplete",
            epoch=self.epoch.plan.epoch,
            step=self.progress.steps,
            operation=lacking.operation,
            ranks=list(lacking.ranks),
            lost_ranks=list(lacking.lost),
            moved_ranks=list(lacking.moved),
            place=lacking.place,
        )
