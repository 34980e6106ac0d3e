"""The border between the engine and the script: what the script changes, and the losses that hit its collectives."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..comm.script import Lacking, Place, ScriptCollectives
from ..errors import EpochChanged, UnsupportedError
from .changes import CURE, Adjustable, Weights, check_local
from .lanes import Stream
from .optimizers import HalfOptimizer
from .records import CurrentEpoch, Progress
from .refusals import Hooks, check_optimizer_hooks, hooks_of, refuse_hooks
from .replay import Replay
from .runtime import RuntimeBinding
from .takeover import Takeover

logger = logging.getLogger("bamboo_ds")


@dataclass(eq=False)
class ScriptCalls:
    """Knows whether the main thread is in the engine or in the script, and recovers in the script's collectives."""

    binding: RuntimeBinding
    epoch: CurrentEpoch
    progress: Progress
    replay: Replay
    takeover: Takeover
    collectives: ScriptCollectives
    #: Depth of calls of the engine.
    _depth: int = field(default=0, init=False)
    #: How the engine has left to the script what it may set.
    _left: Adjustable = field(init=False)
    _weights: Weights = field(init=False)
    _trained: list[bool] = field(init=False)
    _hooks: Hooks = field(init=False)
    #: Calls of the engine before which hooks are looked for: scripts register them when they begin.
    _looks: int = field(default=5, init=False)
    _warned: bool = field(default=False, init=False)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The body is a call of the script: what it does is the engine's."""
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
        """The script goes on: remember how it finds what it may set."""
        self.binding.refresh()
        local = self.binding.local
        self._left = Adjustable.of(local)
        self._note_count()
        self._weights = Weights(local.layers)
        self._trained = local.trains()
        if self._looks:
            self._hooks = hooks_of(local.module)

    def follow(self) -> None:
        """Give to all roles what the script has set since it went on."""
        self.binding.refresh()
        local = self.binding.local
        found = Adjustable.of(local)
        self._note_count()
        if found != self._left:
            changed = found.since(self._left)
            for runtime in self.binding.runtimes.values():
                if runtime is not local:
                    changed.give(runtime)
        if not (self.epoch.job.replaying or self.replay.joining.active):
            self._weights.check_gradients()
            self._follow_weights()
        if local.trains() != self._trained:
            self._follow_freezing()
        if self._looks:
            self._looks -= 1
            refuse_hooks(hooks_of(local.module) - self._hooks)
            check_optimizer_hooks(local.attributes["basic_optimizer"])

    def _follow_weights(self) -> None:
        """Note what the script has changed of its stage, for the holders of the stage's replica.

        Raises:
            UnsupportedError: it cannot have done so with all stages.
        """
        changed = self._weights.changed()
        if not changed:
            return
        check_local(changed, self.epoch.plan)
        if self.progress.steps and not self._warned:
            self._warned = True
            logger.warning(
                "the script has changed %s of its stage between two calls. Replicas follow, but a loss right after "
                "such a change makes the job start again, and a change while a member has another one's stage ends "
                "it: %s",
                changed[0],
                CURE,
            )
        self.progress.changed.update(changed)

    def _note_count(self) -> None:
        """Note by how much DeepSpeed's count of steps, which checkpoints and scripts set, is ahead of the job's."""
        if not self.replay.under_way:
            self.epoch.channel.ahead = self.binding.local.attributes["global_steps"] - self.progress.steps

    def _follow_freezing(self) -> None:
        """The script has frozen parameters of its stage, or made them trainable: its shadow must know.

        Raises:
            UnsupportedError: it cannot be followed exactly.
        """
        local = self.binding.local
        if self.binding.runtimes.get(local.role) is not local or not local.owned:
            return  # a member that joins replays what the stage's owner has done
        if isinstance(local.optimizer, HalfOptimizer):
            raise UnsupportedError(
                "the script has frozen parameters, or made them trainable, after deepspeed.initialize: with fp16 and "
                "without ZeRO do it before"
            )
        others = [str(each.role) for each in self.binding.owned() if each is not local]
        if others:
            raise UnsupportedError(
                f"the script has frozen parameters of stage {local.role.stage}, or made them trainable. This member "
                f"also computes {', '.join(others)}, whose own script is lost and can freeze nothing there: restart "
                "from a checkpoint with a worker for each stage"
            )
        local.trained = local.trains()
        lane = self.epoch.lanes.get((Stream.TRAINED, local.role))
        if lane is None:
            return
        try:
            # Nothing else is sent in this iteration before the shadow has it: it may be needed for a takeover.
            trained = torch.tensor(local.trained, dtype=torch.uint8)
            self.epoch.transport.send(lane, self.progress.sequence, trained)
            self.epoch.transport.drain()
        except EpochChanged as error:
            logger.info("interrupted before operation %d: %s", self.progress.sequence, error)

    # -- the script's collectives -------------------------------------------------------------------------

    def place(self) -> Place:
        """Where the main thread is."""
        if self._depth or self.replay.resuming.checkpoint is not None:
            return "engine"
        return "replay" if self.epoch.job.replaying or self.replay.joining.active else "script"

    def recover(self) -> None:
        """Recover from a loss that has hit the script, and remember for the next operation how it goes on."""
        self.follow()
        self._depth += 1
        try:
            self.takeover.recover_between("between two operations")
            self.binding.use(self.binding.local)
            self.leave()
        finally:
            self._depth -= 1

    def tell(self, lacking: Lacking) -> None:
        """A collective of the script goes on without parts of ranks."""
        listed = {name: ", ".join(map(str, getattr(lacking, name))) for name in ("ranks", "lost", "moved")}
        lost = f"lost ranks ({listed['lost']}) have no part in it, so {lacking.result}" if lacking.lost else ""
        moved = f"other members compute the stages of ranks ({listed['moved']}) now" if lacking.moved else ""
        logger.warning(
            "%s over ranks %s, called at %s: %s. What a script sums up from the parameters or optimizer states of each "
            "rank, such as a norm over all stages, is wrong until each rank has a process that computes its stage "
            "again. This is said once for each place",
            lacking.operation,
            listed["ranks"],
            lacking.place,
            "; ".join(filter(None, (lost, moved))),
        )
        self.epoch.channel.event(
            "collective_incomplete",
            epoch=self.epoch.plan.epoch,
            step=self.progress.steps,
            operation=lacking.operation,
            ranks=list(lacking.ranks),
            lost_ranks=list(lacking.lost),
            moved_ranks=list(lacking.moved),
            place=lacking.place,
        )
