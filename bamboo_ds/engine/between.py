"""What happens between two operations: the script's own collectives, and the losses that hit them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import torch

from ..comm.script import Lacking, Place
from ..errors import EpochChanged, UnsupportedError
from .changes import CURE, Adjustable, Weights, check_at_home
from .optimizers import HalfOptimizer
from .refusals import check_optimizer_hooks, check_step, hooks_of, refuse_compiled, refuse_hooks, registered
from .resuming import ResumingExecutor

logger = logging.getLogger("bamboo_ds")

_P = ParamSpec("_P")
_R = TypeVar("_R")
_E = TypeVar("_E", bound="ScriptingExecutor")


def engine_call(method: Callable[Concatenate[_E, _P], _R]) -> Callable[Concatenate[_E, _P], _R]:
    """A method that a script calls: what it does is the engine's."""

    @functools.wraps(method)
    def call(self: _E, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with self._inside():
            return method(self, *args, **kwargs)

    return call


class ScriptingExecutor(ResumingExecutor):
    """Knows whether the main thread is in the engine or in the script, and recovers in the script's collectives.

    Attributes:
        _left_at: how the script has found what it may set, after the engine's last call.
        _weights: the same of its stage.
        _trained_then: which parameters of the script's own stage were trainable at that time.
        _hooks_then: how many hooks had been registered at that time.
        _compiled_then: what was compiled of the script's own stage at that time.
    """

    _depth = 0
    _left_at: Adjustable
    _weights: Weights
    _warned = False
    _trained_then: list[bool]
    _hooks_then: int
    _compiled_then: frozenset[str]

    @contextmanager
    def _inside(self) -> Iterator[None]:
        if not self._depth:
            self._script.flush()
            self._follow_script()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._leave_to_script()

    def _leave_to_script(self) -> None:
        """The script goes on: remember how it finds what it may set."""
        self._binding.refresh()
        self._left_at = Adjustable.of(self._home)
        self._note_count()
        self._weights = Weights(self._home.layers)
        self._trained_then = self._home.trains()
        self._hooks_then = registered()
        self._compiled_then = self._home.layers.compiled()

    def _follow_script(self) -> None:
        """Give to all roles what the script has set since it went on."""
        self._binding.refresh()
        found = Adjustable.of(self._home)
        self._note_count()
        if found != self._left_at:
            changed = found.since(self._left_at)
            for runtime in self._binding.runtimes.values():
                if runtime is not self._home:
                    changed.give(runtime)
        written = not (self._job.replaying or self._joining) and self._follow_weights()
        frozen = self._home.trains() != self._trained_then and self._follow_freezing()
        if written or frozen:
            self._tell_changes(written, self._home.trained if frozen else None)
        check_step(self._home.attributes["basic_optimizer"])
        self._check_compiled()
        if registered() != self._hooks_then:
            refuse_hooks(hooks_of(self._home.module, self._hooks_then))
            check_optimizer_hooks(self._home.attributes["basic_optimizer"])

    def _check_compiled(self) -> None:
        """Refuse what the script has compiled since it went on, but for what the engine has compiled for it."""
        if self._compiled_with is None:
            refuse_compiled(self._home.layers.compiled() - self._compiled_then)

    def _follow_weights(self) -> bool:
        """Note whether the script has changed its stage, for the holders of the stage's replica.

        Raises:
            UnsupportedError: it cannot have done so with all stages.
        """
        self._weights.check_parameters()
        self._weights.check_gradients()
        changed = self._weights.changed()
        if not changed:
            return False
        home = self._home
        check_at_home(changed, self._plan, home.role, self._known_changes, home.layers.changes.count)
        home.layers.changes.note(self._committed_steps)
        if self._committed_steps and not self._warned:
            self._warned = True
            logger.warning(
                "the script has changed %s of its stage between two calls. Replicas follow, but a loss right after "
                "such a change makes the job start again, and a change while a member has another one's stage ends "
                "it: %s",
                changed[0],
                CURE,
            )
        self._changed.update(changed)
        return True

    def _note_count(self) -> None:
        """Note by how much DeepSpeed's count of steps, which checkpoints and scripts set, is ahead of the job's."""
        if not (self._joining or self._job.replaying or self._resumed is not None):
            self._job.channel.ahead = self._home.attributes["global_steps"] - self._committed_steps

    def _follow_freezing(self) -> bool:
        """The script has frozen parameters of its stage, or made them trainable: whether others must know.

        Raises:
            UnsupportedError: it cannot be followed exactly.
        """
        home = self._home
        if self._binding.runtimes.get(home.role) is not home or not home.owned:
            return False  # a member that joins replays what the stage's owner has done
        if isinstance(home.optimizer, HalfOptimizer):
            raise UnsupportedError(
                "the script has frozen parameters, or made them trainable, after deepspeed.initialize: with fp16 and "
                "without ZeRO do it before"
            )
        others = [str(each.role) for each in self._binding.owned() if each is not home]
        if others:
            raise UnsupportedError(
                f"the script has frozen parameters of stage {home.role.stage}, or made them trainable. This member "
                f"also computes {', '.join(others)}, whose own script is lost and can freeze nothing there: restart "
                "from a checkpoint with a worker for each stage"
            )
        home.trained = home.trains()
        return True

    def _tell_changes(self, written: bool, trained: list[bool] | None) -> None:
        """Tell the holders of the stage's replica; they may need it for a takeover.

        Nothing else is sent in this iteration before they have it.
        """
        told = torch.tensor([self._committed_steps, written, *(trained or ())], dtype=torch.int64)
        try:
            for (role, _), lane in self._lanes.told.items():
                if role == self._home.role and lane.source == self._job.session.member:
                    self._transport.send(lane, self._sequence, told)
            self._transport.drain()
        except EpochChanged as error:
            logger.info("interrupted before operation %d: %s", self._sequence, error)

    def _tell_again(self) -> None:
        if not self._joining and (self._changed or self._home.trained):
            self._tell_changes(bool(self._changed), self._home.trained)

    def _where(self) -> Place:
        if self._depth or self._resumed is not None:
            return "engine"
        return "replay" if self._job.replaying or self._joining else "script"

    def _tell_lacking(self, lacking: Lacking) -> None:
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
        self._job.channel.event(
            "collective_incomplete",
            epoch=self._plan.epoch,
            step=self._committed_steps,
            operation=lacking.operation,
            ranks=list(lacking.ranks),
            lost_ranks=list(lacking.lost),
            moved_ranks=list(lacking.moved),
            place=lacking.place,
        )

    def _recover_between(self) -> None:
        """Recover from a loss that has hit the script, and remember for the next operation how it goes on."""
        self._follow_script()
        self._depth += 1
        try:
            while True:
                try:
                    self._go_on_from(self._recover())
                    break
                except EpochChanged as error:
                    logger.info("interrupted between two operations: %s", error)
            self._binding.use(self._home)
            self._leave_to_script()
        finally:
            self._depth -= 1
