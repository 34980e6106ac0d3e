"""The operations of a job (see :mod:`.recovery`)."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.pipe.schedule import PipeInstruction

from ..errors import EpochChanged
from ..schedule import Commit, RoleProgress, commit_program, member_program
from ..topology import Role
from .commit import decode
from .lanes import Stream

if TYPE_CHECKING:
    from .bamboo import BambooPipelineEngine


logger = logging.getLogger("bamboo_ds")


class TrainIteration:
    """One iteration: pipeline, reduction, replication, commit, step."""

    goes_on = True

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine
        self._begin = time.monotonic()
        engine._use_training_batches()

    @property
    def draws(self) -> bool:
        return not self._engine._batches.shared

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        engine = self._engine
        for runtime in engine._binding.runtimes.values():
            runtime.module.train()
        engine._evaluating = False
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
        last = [r for r in engine._binding.owned() if r.role.stage == engine.num_stages - 1]
        return all(runtime.reduced_loss is not None for runtime in last)

    def finish(self, behind: bool) -> None:
        engine = self._engine
        assert engine._vector is not None
        layout = engine._plan.world
        engine._committed = decode(layout, engine._loss_count(), engine._vector)
        self._execute(commit_program(engine._plan, engine._job.session.member)[1:], until_commit=False)
        mismatches = engine._committed.mismatches
        if behind:
            engine._batches.drop()
        else:
            engine._collect_leftovers(engine.micro_batches, gradients=not engine._interrupted)
        engine._binding.begin_iteration()
        engine._history.add("train", [list(losses) for losses in engine._committed.losses])
        engine._committed_steps += 1
        engine._consumed += engine.micro_batches
        engine._advance_home()
        if mismatches and not behind:
            self._mend(mismatches)
        engine._advance_copies()
        engine._job.progressed(engine._committed_steps)
        engine._report_step(time.monotonic() - self._begin)

    def _mend(self, mismatches: tuple[Role, ...]) -> None:
        """Copy the state of ``mismatches`` to their shadows again. A replica stays invalid if a loss prevents it."""
        engine = self._engine
        try:
            engine._copy_state([role for role in mismatches if engine._plan.shadow(role) is not None])
        except EpochChanged as error:
            # The next operation recovers; it refuses to take a role over from an invalid replica.
            logger.warning("replicas of %s were not mended: %s", mismatches, error)

    def _execute(self, program: tuple[PipeInstruction, ...], until_commit: bool) -> None:
        engine = self._engine
        handlers: Mapping[type, Callable[..., None]] = engine._INSTRUCTION_MAP
        for instruction in program:
            handlers[type(instruction)](engine, **instruction.kwargs)
            if until_commit and type(instruction) is Commit:
                return


class Evaluation:
    """Forward passes of all micro-batches without gradients; done again from the start after a loss."""

    draws = True
    goes_on = True

    def __init__(self, engine: BambooPipelineEngine, iterator: Any, micro_batches: int, reduce: str | None) -> None:
        self._engine = engine
        self._micro_batches = micro_batches
        self._reduce = reduce
        self.losses: dict[int, Any] = {}
        engine._batches.use_iterator(
            engine._home.role.pipeline, iterator if engine._is_source() else None, engine.batch_fn
        )

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


class CheckpointSave:
    """All roles' files into a folder that becomes the checkpoint by one rename, after everybody has written."""

    draws = False
    goes_on = True

    def __init__(
        self, engine: BambooPipelineEngine, folder: str, tag: str, latest: bool, save: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._latest = latest
        self._target = Path(folder) / tag
        self._partial = Path(folder) / ".bamboo-partial"
        self._tag = tag
        self._save = save

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        engine = self._engine
        leads = engine._leads()
        if leads:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
        engine._transport.barrier()
        for runtime in engine._binding.owned():
            engine._binding.use(runtime)
            self._save(str(self._partial))
        engine._transport.barrier()
        if leads:
            (self._partial / self._tag).mkdir(exist_ok=True)
            if self._target.exists():
                shutil.rmtree(self._target)
            os.replace(self._partial / self._tag, self._target)
            shutil.rmtree(self._partial)
            if self._latest:
                write_atomically(self._target.parent / "latest", self._tag)
        self.commit()

    def commit(self) -> None:
        engine = self._engine
        engine._entered = True
        vector = torch.zeros(1, dtype=torch.float64)
        engine._vector = engine._agree(vector)

    def repeatable(self) -> bool:
        return True

    def finish(self, behind: bool) -> None:
        engine = self._engine
        engine._binding.refresh()
        for runtime in engine._binding.runtimes.values():
            runtime.adopted = False
        engine._history.add("save", {"folder": os.path.abspath(self._target.parent), "tag": self._tag})
        engine._advance_copies()


class End:
    """The end of the script: nobody leaves before all have finished."""

    draws = False
    goes_on = False

    def __init__(self, engine: BambooPipelineEngine) -> None:
        self._engine = engine

    def run(self, progress: Mapping[Role, RoleProgress] | None) -> None:
        self.commit()

    def commit(self) -> None:
        engine = self._engine
        engine._entered = True
        engine._vector = engine._agree(torch.zeros(1, dtype=torch.float64))

    def repeatable(self) -> bool:
        return True

    def finish(self, behind: bool) -> None:
        self._engine._transport.close()


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at ``path``; a reader sees the old text or the new one, also after a crash."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)
