"""The operations of a job (see :mod:`.recovery`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from ..errors import EpochChanged, ReplicaMismatch
from ..schedule import Commit, RoleProgress, commit_program, member_program
from ..topology import Role
from .commit import decode
from .lanes import Stream
from .recomputing import end_iteration
from .saving import saved
from .schedulers import Standing

if TYPE_CHECKING:
    from .bamboo import BambooPipelineEngine


logger = logging.getLogger("bamboo_ds")


class TrainIteration:
    """One iteration: pipeline, reduction, replication, commit, step."""

    watched = True
    steps = True
    goes_on = True

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine
        self._lasting: list[Role] = []
        self._begin = time.monotonic()
        engine._binding.refresh()
        engine._stood = Standing.of(engine._home)
        engine._use_training_batches()
        if engine._exact is not None:
            engine._exact.begin()

    @property
    def draws(self) -> bool:
        return not self._engine._batches.shared

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        engine = self._engine
        for runtime in engine._binding.runtimes.values():
            runtime.module.train()
        engine._evaluating = False
        torch.clear_autocast_cache()  # within the script's own context it outlives steps, on each copy another time
        engine._batches.draw_ahead(engine.micro_batches)
        program = member_program(
            engine._plan,
            engine._job.session.member,
            engine.micro_batches,
            progress,
            engine._settings.redundancy.placement.value if engine._mode.eager_forward else "none",
        )
        for runtime in engine._binding.runtimes.values():
            engine._binding.use(runtime)
            engine._reserve_pipe_buffers(engine.micro_batches)
        self._execute(program, until_commit=True)

    def commit(self) -> None:
        engine = self._engine
        self._execute(commit_program(engine._plan, engine._job.session.member), until_commit=True)

    def repeatable(self) -> bool:
        engine = self._engine
        return all(engine._is_complete(runtime) for runtime in engine._binding.owned())

    def finish(self, behind: bool) -> None:
        engine = self._engine
        assert engine._vector is not None
        layout = engine._plan.world
        engine._committed = decode(layout, engine._form(), engine._vector)
        self._execute(commit_program(engine._plan, engine._job.session.member)[1:], until_commit=False)
        mismatches = engine._committed.mismatches
        if behind:
            engine._batches.drop()
        else:
            engine._collect_leftovers(engine.micro_batches, gradients=not engine._interrupted)
        engine._binding.begin_iteration()
        engine._changed.clear()
        for runtime in engine._binding.runtimes.values():
            if behind and runtime.trained and runtime is not engine._home:
                runtime.train_only(runtime.trained)  # of the next iteration, in which others are already
            else:
                runtime.trained = None
        end_iteration()
        engine._exhausted = False
        engine._history.add_iteration(engine._committed.losses, engine._skipped())
        engine._committed_steps += 1
        engine._consumed += engine.micro_batches
        engine._advance_home()
        if engine._accounts.on:
            engine._account()
        if mismatches and not behind:
            self._mend(mismatches)
        engine._advance_copies()
        engine._saves.poll()
        engine._job.progressed(engine._committed_steps)
        engine._report_step(time.monotonic() - self._begin)
        if not behind:
            self._give_up()

    def _mend(self, mismatches: tuple[Role, ...]) -> None:
        """Copy the state of ``mismatches`` again, but of those that differed before as well.

        A replica stays invalid if a loss prevents it.
        """
        engine = self._engine
        step = engine._committed_steps - 1
        self._lasting = [role for role in mismatches if engine._doubts.note(role, step)]
        try:
            engine._copy_state(role for role in mismatches if role not in self._lasting)
        except EpochChanged as error:
            # The next operation recovers; it refuses to take a role over from an invalid replica.
            logger.warning("replicas of %s were not mended: %s", mismatches, error)

    def _give_up(self) -> None:
        """Tell of replicas of this member that have just been found to differ for ever.

        Raises:
            ReplicaMismatch: it is to end the job (``redundancy.on_mismatch``).
        """
        engine = self._engine
        found = {role: engine._differing.pop(role) for role in list(engine._differing)}
        for role in self._lasting:
            if role not in found:
                continue  # another member's, or told of before
            error = ReplicaMismatch(role.pipeline, role.stage, found[role], type(engine._home.optimizer.inner).__name__)
            if engine._settings.redundancy.on_mismatch == "stop":
                raise error
            logger.error("%s", error)

    def _execute(self, program: tuple[PipeInstruction, ...], until_commit: bool) -> None:
        engine = self._engine
        handlers: Mapping[type, Callable[..., None]] = engine._INSTRUCTION_MAP
        for instruction in program:
            if type(instruction) is Commit and engine._rehearses():
                assert engine._exact is not None
                engine._exact.rehearse()
            handlers[type(instruction)](engine, **instruction.kwargs)
            engine._beat()
            if until_commit and type(instruction) is Commit:
                return


class Evaluation:
    """Forward passes of all micro-batches without gradients; done again from the start after a loss."""

    draws = True
    watched = True
    steps = False
    goes_on = True

    def __init__(self, engine: BambooPipelineEngine, iterator: Any, micro_batches: int, reduce: str | None) -> None:
        self._engine = engine
        self._micro_batches = micro_batches
        self._reduce = reduce
        self.losses: dict[int, Any] = {}
        engine._batches.use_iterator(engine._home.role.pipeline, engine._source(iterator), engine.batch_fn)

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        engine, layout = self._engine, self._engine._plan.world
        engine._evaluating = True
        try:
            with torch.no_grad():
                for runtime in engine._binding.owned():
                    engine._binding.use(runtime)
                    engine._reserve_pipe_buffers(self._micro_batches)
                    engine.module.eval()
                    engine.fwd_outputs = []
                engine._batches.draw_ahead(self._micro_batches)
                for m in range(self._micro_batches):
                    for runtime in engine._binding.owned():
                        self._forward(runtime.role, m, layout.stages)
                        engine._beat()
        finally:
            engine._evaluating = False
        self.commit()

    def _forward(self, role: Role, m: int, stages: int) -> None:
        engine = self._engine
        engine._exec_use_role(role)
        if role.stage > 0:
            payload = engine._transport.recv(engine._lanes[Stream.ACTIVATION, role], m)
            engine.pipe_buffers["inputs"][m] = payload
        if role.stage in (0, stages - 1):
            engine._exec_load_micro_batch(m)
        engine._exec_forward_pass(m)
        outputs = engine.pipe_buffers["outputs"][m]
        for buffers in engine.pipe_buffers.values():
            buffers[m] = None
        if role.stage < stages - 1:
            target = Role(role.pipeline, role.stage + 1)
            engine._transport.send(engine._lanes[Stream.ACTIVATION, target], m, outputs)

    def commit(self) -> None:
        engine = self._engine
        losses = []
        for runtime in engine._binding.owned():
            engine._binding.use(runtime)
            if engine.is_last_stage():
                reduced = engine._reduce_outputs(
                    engine.fwd_outputs, reduce=self._reduce, reduce_dp=False, micro_batches=self._micro_batches
                )
                self.losses[runtime.role.pipeline] = reduced
                if torch.is_tensor(reduced) and reduced.numel() == 1:
                    losses.append((runtime.role.pipeline, float(reduced)))
        engine._batches.complete(self._micro_batches)
        engine._transport.drain()
        engine._entered = True
        vector = torch.zeros(engine._plan.world.pipelines, dtype=torch.float64)
        for pipeline, loss in losses:
            vector[pipeline] = loss
        engine._vector = engine._agree(vector)

    def repeatable(self) -> bool:
        # The outputs of a last stage died with its owner; the others may have entered long before it was through.
        engine = self._engine
        return not any(r.adopted for r in engine._binding.owned() if r.role.stage == engine.num_stages - 1)

    def finish(self, behind: bool) -> None:
        engine = self._engine
        if behind:
            engine._batches.drop()
        else:
            engine._collect_leftovers(self._micro_batches, gradients=False)
        assert engine._vector is not None
        engine._history.add("evaluate", list(engine._vector))
        engine._binding.begin_iteration()
        for runtime in engine._binding.owned():
            runtime.module.train()
        engine._advance_copies()
        engine._saves.poll()


class CheckpointSave:
    """Copies of all roles' state. After the commit the members write them, while training goes on.

    With ``bamboo.checkpoint.asynchronous`` off they write before the commit, which waits for the complete checkpoint; a
    loss while they write makes them repeat all of it.

    Args:
        engine: the engine.
        folder, tag: of the checkpoint.
        latest: whether DeepSpeed's file ``latest`` is to name it.
        save: DeepSpeed's own saving of the role that is bound.

    Attributes:
        succeeded: whether the checkpoint is written, or complete if it was waited for.
    """

    draws = False
    watched = False
    steps = False
    goes_on = True
    succeeded = False

    def __init__(
        self, engine: BambooPipelineEngine, folder: str, tag: str, latest: bool, save: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._folder, self._tag, self._latest = folder, tag, latest
        self._save = save
        self._waits = not engine._settings.checkpoint.asynchronous
        self._attempt = 0
        self._left_out = self._complete = False

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        engine, saves = self._engine, self._engine._saves
        self._attempt, self._complete = engine._plan.epoch, False
        self._left_out = not saves.collect(engine, self._folder, self._tag, self._latest, self._save)
        if self._waits and not self._left_out:
            saves.write_and_wait()
            self._complete = saves.completed == saves.save_id(self._attempt, engine._sequence)
        self.commit()

    def commit(self) -> None:
        engine = self._engine
        engine._entered = True
        attempt = self._attempt if engine._leads() else 0
        vector = torch.tensor([attempt, self._left_out, self._complete], dtype=torch.float64)
        engine._vector = engine._agree(vector)

    def repeatable(self) -> bool:
        # The copies of a role that was taken over died with its owner.
        return not any(runtime.adopted for runtime in self._engine._binding.owned())

    def finish(self, behind: bool) -> None:
        engine, saves = self._engine, self._engine._saves
        assert engine._vector is not None
        attempt, left_out, complete = map(int, engine._vector)
        if left_out:
            saves.forget()
        else:
            saves.write()
        self.succeeded = bool(complete) if self._waits else not left_out
        name = saves.save_id(attempt, engine._sequence) if self.succeeded else None
        engine._history.add("save", saved(self._folder, self._tag, name))
        saves.poll()
        engine._binding.refresh()
        for runtime in engine._binding.runtimes.values():
            runtime.adopted = False
        engine._advance_copies()


class End:
    """The end of the script: nobody leaves before all have finished, and their checkpoints are written.

    It needs no word of etcd: it changes nothing, and what all have done before was committed.
    """

    draws = False
    watched = False
    steps = False
    goes_on = False

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        self._engine._saves.wait()
        self.commit()

    def commit(self) -> None:
        engine = self._engine
        engine._entered = True
        engine._vector = engine._agree(torch.zeros(1, dtype=torch.float64), fenced=False)

    def repeatable(self) -> bool:
        return True

    def finish(self, behind: bool) -> None:
        try:
            self._engine._transport.close()
        except EpochChanged as error:
            logger.info("a member was lost after all had finished: %s", error)
