"""The end of an iteration: reduction, replication, commit, optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule as stock

from .. import schedule
from ..comm.session import Answer
from ..errors import ProtocolError
from ..state import join, split
from ..topology import Role
from .answers import Answers, Refusal, stepping_alone
from .commit import Contribution, Form, Measured, encode, global_norm
from .passes import PassExecutor
from .refusals import check_gradients
from .replica import checksums, combined
from .rng import Drawing
from .runtime import StageRuntime

#: How many of the tensors that differ are named.
_NAMED = 100


class StepExecutor(PassExecutor):
    """Reduces gradients, agrees on an iteration, and steps; with DeepSpeed's own optimizers."""

    # -- reduction and replication ------------------------------------------------------------------------

    def _exec_reduce_grads(self) -> None:
        """Average the gradients over the pipelines into ``runtime.reduced`` of all roles of this stage.

        With several pipelines the sums of this role stay untouched in the parameters' ``grad`` until the
        iteration commits: a member lost during the reduction makes the others repeat it from them.
        """
        runtime = self._binding.current
        # A collective counts a member once: roles of one stage are summed here and reduced with the last of them.
        same = [r for r in self._binding.owned() if r.role.stage == runtime.role.stage]
        if runtime is not same[-1] or all(r.reduced is not None for r in same):
            return
        sums = []
        for each in same:
            self._binding.use(each)
            check_gradients(each.module)
            sums.append(self._local_sums(each))
            if self.is_last_stage():
                each.reduced_loss = self._pipeline_losses()
        # Even one pipeline alone reduces: in another precision the sums are rounded.
        rounds = any(g.dtype != self.communication_data_type for g in sums[0])
        if (self.is_data_parallel or rounds) and self.pipeline_enable_backward_allreduce:
            total = same[-1].optimizer.average(sums)
            sums = [total, *([g.clone() for g in total] for _ in same[1:])]
        for each, reduced in zip(same, sums, strict=True):
            self._binding.use(each)
            each.measured = each.optimizer.measure(reduced)
            each.reduced = each.optimizer.keep(reduced)

    def _pipeline_losses(self) -> torch.Tensor:
        """The pipeline's mean loss and its mean additional losses, as float64."""
        losses = [self._scale_loss_by_gas(self.total_loss)]
        losses += [self._scale_loss_by_gas(x) for x in (self.total_additional_losses or {}).values()]
        return torch.stack([x.detach().reshape(()).double().cpu() for x in losses])

    def _exec_send_replica(self) -> None:
        runtime = self._binding.current
        assert runtime.reduced is not None
        check = -1 if runtime.checksum is None else runtime.checksum
        parts = runtime.parts if check >= 0 and self._doubts.has(runtime.role, self._committed_steps) else []
        trained = runtime.trains() if runtime.trained else []
        counts = (check, len(runtime.reduced), len(parts), len(trained))
        header = torch.tensor([*counts, *parts, *trained, *runtime.checksums()], dtype=torch.int64)
        loss = runtime.reduced_loss if runtime.reduced_loss is not None else torch.empty(0, dtype=torch.float64)
        changed = self._changed if runtime is self._home else ()
        text, layers = split(runtime.layers.capture(changed))
        places = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        assert runtime.measured is not None
        measured = torch.tensor([runtime.measured.overflow, *runtime.measured.squares], dtype=torch.float64)
        payload = (header, measured, loss, places, *runtime.reduced, *layers)
        for lane in self._lanes.replicas(runtime.role):
            self._transport.send(lane, self._sequence, payload)

    def _exec_recv_replica(self, role: Role) -> None:
        lane = self._lanes.replica(role, self._job.session.member)
        payload = self._receive(lane, self._sequence, (role, "replica", None))
        assert isinstance(payload, tuple)
        header, measured, loss, places, *tensors = payload
        check, count, parted, changed, *numbers = header.tolist()
        parts, trained, consumed = numbers[:parted], numbers[parted : parted + changed], numbers[parted + changed :]
        trained = [bool(each) for each in trained]
        reduced = tensors[:count]
        layers = join(places.cpu().numpy().tobytes().decode(), tensors[count:])
        self._transport.take(self._lanes.told[role, self._job.session.member])  # the same
        learner = self._learners.get(role)
        if learner is not None:
            learner.incoming = reduced, layers, trained
            return
        replica = self._binding.runtimes[role]
        replica.layers.changes.follow(*layers["changes"])
        replica.reduced, replica.received_layers = reduced, layers
        if trained:
            replica.train_only(trained)
        overflow, *squares = measured.tolist()
        replica.measured = Measured(bool(overflow), tuple(squares))
        replica.reduced_loss = loss if loss.numel() else None
        replica.consumed = dict(enumerate(consumed))
        if check >= 0 and replica.checksum is not None and replica.valid:
            self._compare(replica, check, parts)

    def _compare(self, replica: StageRuntime, expected: int, parts: Sequence[int]) -> None:
        """Compare the replica with its owner's checksum, and with those of its tensors where they are told."""
        role = [replica.role.pipeline, replica.role.stage]
        if replica.checksum == expected:
            self._job.channel.event(
                "replica_verified", step=self._committed_steps, role=role, checksum=f"{expected:08x}"
            )
            return
        replica.valid = False
        names = [name for name, _ in replica.named_tensors()]
        differ = [n for n, own, other in zip(names, replica.parts, parts, strict=False) if own != other]
        self._differing[replica.role] = differ[:_NAMED]
        self._job.channel.event(
            "replica_mismatch",
            step=self._committed_steps,
            role=role,
            expected=f"{expected:08x}",
            found=f"{replica.checksum:08x}",
            tensors=differ[:_NAMED],
        )

    # -- shards -------------------------------------------------------------------------------------------

    def _exchange_shards(self) -> None:
        """Bring the parameters of all runtimes up to date, after steps that did so with their own shards only.

        All members take part, once between two operations. A runtime that is up to date gets what it has.
        """
        member, runtimes = self._job.session.member, self._binding.runtimes
        self._binding.refresh()
        for (role, _), lane in self._lanes.shards.items():
            if lane.source == member:
                self._transport.send(lane, self._sequence, tuple(runtimes[role].optimizer.shard()))
        shards = {role: runtime.optimizer.shard() for role, runtime in runtimes.items() if runtime.owned}
        for (role, _), lane in self._lanes.shards.items():
            if lane.destination == member:
                shards[role] = list(self._transport.recv(lane, self._sequence))  # type: ignore[arg-type]
        for runtime in runtimes.values():
            layout = self._plan.world
            for role in layout.siblings(runtime.role):
                if role in shards and role != runtime.role:
                    runtime.optimizer.fill(layout.copy_of(role), shards[role])
            runtime.stale = False
        self._transport.drain()

    # -- commit and step ----------------------------------------------------------------------------------

    def _exec_commit(self) -> None:
        self._batches.complete(self.micro_batches)
        self._transport.drain()
        self._entered = True
        contribution = self._contribution()
        self._vector = self._agree(encode(self._plan.world, self._form(), contribution))

    def _agree(self, vector: torch.Tensor, fenced: bool = True) -> tuple[float, ...]:
        """The sum of ``vector`` (float64) over all members: the commit of an operation.

        Every member also tells the newest epoch that it could enter. When all know of a new one, all switch after
        this operation. A member that may not commit now (see :mod:`bamboo_ds.control.fencing`) waits before it, unless
        nothing follows from the operation that others could contradict (``fenced`` false).
        """
        if fenced:
            self._job.await_fence()
        members = self._plan.members
        told = torch.zeros(len(members), dtype=torch.float64)
        told[members.index(self._job.session.member)] = self._job.boundary(self._saves.busy)
        total = self._transport.all_reduce(torch.cat([vector, told])).tolist()
        if fenced:
            self._job.await_fence()  # what was on its way for long may come too late
        self._switch_due = min(total[len(vector) :]) > self._plan.epoch
        return tuple(total[: len(vector)])

    def _accounted(self) -> int:
        """Micro-batches of a pipeline that the commit accounts for."""
        return self.micro_batches if self._accounts.on else 0

    def _form(self) -> Form:
        """What an iteration's commit consists of."""
        losses = 1 + len(self.module.get_additional_losses() or {})
        return Form(losses, self._norm_count(), self._accounted())

    def _contribution(self) -> Contribution:
        losses: dict[int, Sequence[float]] = {}
        measured: dict[Role, Measured] = {}
        consumed = {r.role: r.checksums() for r in self._binding.owned() if r.consumed}
        for runtime in self._binding.owned():
            if runtime.reduced_loss is not None:
                losses[runtime.role.pipeline] = runtime.reduced_loss.tolist()
            assert runtime.measured is not None
            measured[runtime.role] = runtime.measured
        mismatches = [r.role for r in self._binding.replicas() if not r.valid]
        ahead = sum(replica.forwards for replica in self._binding.replicas())
        ahead -= 0 if self._exact is None else self._exact.redone
        return Contribution(losses, measured, ahead, mismatches, consumed)

    def _norm_count(self) -> int:
        """Norms that an optimizer step computes."""
        return self._home.optimizer.norms

    def _apply_reduced(self, runtime: StageRuntime) -> None:
        """Give the bound runtime the gradients that its optimizer step needs, and what its owner's layers keep."""
        if runtime.reduced is None:
            raise ProtocolError(f"role {runtime.role} is to step without reduced gradients")
        runtime.optimizer.apply(runtime.reduced)
        if runtime.received_layers is not None:
            runtime.layers.restore(runtime.received_layers)

    @contextmanager
    def _answering(self, runtime: StageRuntime, answer: Answer | None = None) -> Iterator[None]:
        """In the body this process is the rank of ``runtime``, and the collectives of its groups are answered.

        Args:
            runtime: is bound.
            answer: default: answers from what the commit agreed on, which is what DeepSpeed's optimizers ask for.
        """
        layout, rank = self._plan.world, self._plan.world.rank(runtime.role)
        if answer is None and not runtime.optimizer.wraps:
            answer = Refusal(runtime.optimizer.inner)
        elif answer is None:
            assert self._committed is not None
            found = self._committed
            answer = Answers(layout, rank, found.overflow, found.squares, runtime.optimizer.sums)
        with self._job.session.acting_for(rank, answer):
            yield

    def _take_model_step(self, lr_kwargs: Any) -> None:
        runtime = self._binding.current
        alone = stepping_alone(runtime.optimizer.inner, partial(self._answering, runtime))
        with self._answering(runtime), alone, self._keyed(Drawing.STEP, runtime):
            super()._take_model_step(lr_kwargs)
        runtime.stale = self._plan.world.sharded

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed's clipping, with the norm that the commit agreed on instead of collectives."""
        assert self._committed is not None
        norm = global_norm(self._plan.world, self._committed.squares[0]).to(self.device)
        limit = torch.tensor([float(self.gradient_clipping())], device=norm.device)
        factor = torch.min(torch.tensor([1.0], device=norm.device), limit / (norm + 1e-6))
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(factor)

    def _exec_optimizer_step(self, lr_kwargs: Any = None) -> None:
        runtime = self._binding.current
        self._apply_reduced(runtime)
        super()._exec_optimizer_step(lr_kwargs)
        self._note_checksum(runtime)

    def _exec_step_replica(self, role: Role) -> None:
        learner = self._learners.get(role)
        if learner is not None:
            assert self._committed is not None
            learner.keep(self._sequence, self._committed, self._stood)
            return
        before = self._binding.current
        runtime = self._binding.use(self._binding.runtimes[role])
        self._apply_reduced(runtime)
        self._step_quietly()
        self._note_checksum(runtime)
        self._binding.use(before)

    def _step_quietly(self) -> None:
        """The optimizer step of the bound runtime, without DeepSpeed's reports."""
        self._force_grad_boundary = True
        self._take_model_step(None)
        self._force_grad_boundary = False

    def _note_checksum(self, runtime: StageRuntime) -> None:
        every = self._settings.redundancy.verify_every
        due = every > 0 and self._mode.replicas and self.global_steps % every == 0
        runtime.checksum = None
        if due:
            self._binding.refresh()
            runtime.parts = checksums(runtime)
            runtime.checksum = combined(runtime.parts)

    def _report_progress(self, step: int) -> None:
        # DeepSpeed's constructor reports, too, before there are runtimes.
        binding = self.__dict__.get("_binding")
        if binding is None or binding.current.owned:
            super()._report_progress(step)

    _INSTRUCTION_MAP = {
        **PassExecutor._INSTRUCTION_MAP,
        stock.ReduceGrads: _exec_reduce_grads,
        stock.OptimizerStep: _exec_optimizer_step,
        schedule.SendReplica: _exec_send_replica,
        schedule.RecvReplica: _exec_recv_replica,
        schedule.Commit: _exec_commit,
        schedule.StepReplica: _exec_step_replica,
    }
