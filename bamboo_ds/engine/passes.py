"""The instructions of one iteration, executed for whichever role is bound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.pipe import schedule as stock
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter

from .. import schedule
from ..comm.transport import Lane, Payload
from ..errors import ProtocolError
from ..topology import Role
from .commit import Contribution, encode, global_norm
from .lanes import Stream, assists
from .members import EngineState
from .replica import checksum
from .rng import forward_seed, keyed_generators
from .runtime import StageRuntime


def detached(value: Any) -> Payload:
    """A tensor or a tuple of tensors without its graph."""
    return value.detach() if torch.is_tensor(value) else tuple(t.detach() for t in value)


def as_leaves(payload: Payload) -> Any:
    """Received activations as autograd leaves: floating-point tensors collect gradients."""
    if payload is None:
        raise ProtocolError("a message of activations carries no tensor")
    if torch.is_tensor(payload):
        return payload.detach().requires_grad_(payload.is_floating_point())
    return tuple(t.detach().requires_grad_(t.is_floating_point()) for t in payload)


class PassExecutor(EngineState, PipelineEngine):  # type: ignore[misc]  # DeepSpeed is untyped
    """DeepSpeed's pipeline engine with our transport, retention, redundant passes, replication and commit.

    DeepSpeed's own methods do all the computing. What differs is where tensors come from and go to.
    """

    # -- roles and batches ----------------------------------------------------------------------------

    def _exec_use_role(self, role: Role) -> None:
        self._binding.use(self._binding.runtimes[role])

    def _exec_load_micro_batch(self, buffer_id: int) -> None:
        self._loading = buffer_id
        super()._exec_load_micro_batch(buffer_id)

    def _next_batch(self) -> Any:
        batches = self._batches[self._binding.current.role.pipeline]
        return batches.batch(self._loading, self.is_first_stage(), self.is_last_stage())

    # -- forward and backward ---------------------------------------------------------------------------

    def _exec_forward_pass(self, buffer_id: int) -> None:
        runtime = self._binding.current
        if self._evaluating:
            super()._exec_forward_pass(buffer_id)
            return
        if buffer_id != runtime.forwards:
            raise ProtocolError(f"forward {buffer_id} of role {runtime.role} comes after {runtime.forwards} forwards")
        begin = time.perf_counter()
        seed = forward_seed(self._seed, self.global_steps, runtime.role, buffer_id)
        with keyed_generators(seed, self.device):
            super()._exec_forward_pass(buffer_id)
        if self.is_last_stage():
            # Redundant forwards run ahead of their backwards, so each micro-batch keeps its own loss.
            runtime.micro_losses[buffer_id] = self.loss
        else:
            runtime.activations[buffer_id] = detached(self.pipe_buffers["outputs"][buffer_id])
        runtime.forwards += 1
        self._idle.record((runtime.role, "forward"), time.perf_counter() - begin)

    def _exec_backward_pass(self, buffer_id: int) -> None:
        runtime = self._binding.current
        if buffer_id != runtime.backwards:
            raise ProtocolError(
                f"backward {buffer_id} of role {runtime.role} comes after {runtime.backwards} backwards"
            )
        begin = time.perf_counter()
        if self.is_last_stage():
            self.loss = runtime.micro_losses.pop(buffer_id)
        super()._exec_backward_pass(buffer_id)
        if self.is_last_stage():
            self.loss = self.loss.detach()
        # DeepSpeed frees the outputs of inner stages only.
        self.pipe_buffers["outputs"][buffer_id] = None
        inputs, self.pipe_buffers["inputs"][buffer_id] = self.pipe_buffers["inputs"][buffer_id], None
        if not self.is_first_stage():
            runtime.gradients[buffer_id] = self._input_gradients(inputs)
        runtime.backwards += 1
        self._idle.record((runtime.role, "backward"), time.perf_counter() - begin)

    @staticmethod
    def _input_gradients(inputs: Any) -> Payload:
        tensors = (inputs,) if torch.is_tensor(inputs) else inputs
        floating = [t for t in tensors if t.is_floating_point()]
        gradients = tuple(t.grad for t in floating if t.grad is not None)
        if len(gradients) < len(floating):
            raise RuntimeError(
                "a stage's floating-point input has no gradient after the backward pass: every floating-point tensor "
                "that a stage returns must be used by the next one"
            )
        return gradients[0] if torch.is_tensor(inputs) else gradients

    # -- sends and receives -----------------------------------------------------------------------------

    def _neighbour(self, step: int) -> Role:
        role = self._binding.current.role
        return Role(role.pipeline, role.stage + step)

    def _keep(self, store: dict[int, Payload], micro_batch: int) -> Payload:
        """What is sent; it stays in ``store`` until commit if a takeover could need it."""
        return store[micro_batch] if self._retain else store.pop(micro_batch)

    def _exec_send_activations(self, buffer_id: int) -> None:
        payload = self._keep(self._binding.current.activations, buffer_id)
        self._transport.send(self._lanes[Stream.ACTIVATION, self._neighbour(+1)], buffer_id, payload)

    def _exec_send_grads(self, buffer_id: int) -> None:
        target = self._neighbour(-1)
        payload = self._keep(self._binding.current.gradients, buffer_id)
        self._transport.send(self._lanes[Stream.GRADIENT, target], buffer_id, payload)
        shadow = self._lanes.get((Stream.SHADOW_GRADIENT, target))
        if shadow is not None and not self._interrupted:
            self._transport.send(shadow, buffer_id, payload)

    def _exec_resend_activation(self, buffer_id: int) -> None:
        payload = self._binding.current.activations[buffer_id]
        self._transport.send(self._lanes[Stream.ACTIVATION, self._neighbour(+1)], buffer_id, payload)

    def _exec_resend_grad(self, buffer_id: int) -> None:
        payload = self._binding.current.gradients[buffer_id]
        self._transport.send(self._lanes[Stream.GRADIENT, self._neighbour(-1)], buffer_id, payload)

    def _receive(self, lane: Lane, sequence: int, place: tuple[Any, ...]) -> Payload:
        """Receive, and remember for how long the member would have been idle at this place."""
        arrival = self._transport.arrival(lane)
        payload = self._transport.recv(lane, sequence)
        begin = self._bubble_begin.pop(place, None)
        if begin is not None:
            self._idle.observe(place, (arrival if arrival is not None else time.monotonic()) - begin)
        return payload

    def _exec_recv_activations(self, buffer_id: int) -> None:
        role = self._binding.current.role
        payload = self._receive(self._lanes[Stream.ACTIVATION, role], buffer_id, (role, "activation", buffer_id))
        self.pipe_buffers["inputs"][buffer_id] = as_leaves(payload)

    def _exec_recv_grads(self, buffer_id: int) -> None:
        role = self._binding.current.role
        self.grad_layer = self._receive(self._lanes[Stream.GRADIENT, role], buffer_id, (role, "grad", buffer_id))

    # -- redundant passes -------------------------------------------------------------------------------

    def _exec_fill_bubble(self, awaits: str, buffer_id: int | None, role: Role | None) -> None:
        current = self._binding.current.role
        place: tuple[Any, ...]
        if awaits == "replica":
            assert role is not None
            lane, place = self._lanes.replica(role, self._job.session.member), (role, awaits, None)
        else:
            stream = Stream.ACTIVATION if awaits == "activation" else Stream.GRADIENT
            lane, place = self._lanes[stream, current], (current, awaits, buffer_id)
        begin = self._bubble_begin[place] = time.monotonic()
        while not self._transport.ready(lane):
            work = self._redundant_work()
            if work is None:
                return
            replica, kind = work
            duration = self._idle.duration((replica.role, kind), fallback=(current, kind))
            if not self._idle.fits(place, time.monotonic() - begin, duration):
                return
            self._run_redundant(replica, kind)

    def _exec_redundant_forward(self) -> None:
        for _ in range(2 if self._mode.eager_backward else 1):
            work = self._redundant_work()
            if work is not None:
                self._run_redundant(*work)

    def _redundant_work(self) -> tuple[StageRuntime, str] | None:
        """The next redundant pass that could run now without waiting for anybody."""
        if not self._mode.eager_forward:
            return None
        for replica in self._binding.replicas():
            role = replica.role
            assisted = self._plan.shadow(role) == self._job.session.member and assists(self._plan, role)
            if replica.reduced is not None or not assisted:
                continue
            m, last = replica.backwards, role.stage == self.num_stages - 1
            if self._mode.eager_backward and not self._interrupted and m < replica.forwards:
                lane = self._lanes.get((Stream.SHADOW_GRADIENT, role))
                if last or (lane is not None and self._transport.ready(lane)):
                    return replica, "backward"
            m = replica.forwards
            if m >= self.micro_batches or self._over_budget(replica):
                continue
            if role.stage > 0 and m not in self._binding.runtimes[self._plan.world.predecessor(role)].activations:
                continue
            batches = self._batches[role.pipeline]
            if role.stage == 0 and not batches.ready(m, "inputs"):
                continue
            if last and not batches.ready(m, "labels"):
                continue
            return replica, "forward"
        return None

    def _over_budget(self, replica: StageRuntime) -> bool:
        budget = self._settings.redundancy.memory_budget_mb
        return budget is not None and replica.saved_bytes >= budget * 2**20

    def _run_redundant(self, replica: StageRuntime, kind: str) -> None:
        before = self._binding.current
        role = replica.role
        if kind == "forward":
            m = replica.forwards
            source = None
            if role.stage > 0:
                source = self._binding.runtimes[self._plan.world.predecessor(role)].activations[m]
            self._binding.use(replica)
            if role.stage > 0:
                self.pipe_buffers["inputs"][m] = as_leaves(source)
            if role.stage in (0, self.num_stages - 1):
                self._exec_load_micro_batch(m)
            if self._settings.redundancy.memory_budget_mb is None:
                self._exec_forward_pass(m)
            else:
                with self._counting_saved_bytes(replica):
                    self._exec_forward_pass(m)
        else:
            m = replica.backwards
            self._binding.use(replica)
            if not self.is_last_stage():
                self.grad_layer = self._transport.recv(self._lanes[Stream.SHADOW_GRADIENT, role], m)
            self._exec_backward_pass(m)
        self._binding.use(before)

    @staticmethod
    def _counting_saved_bytes(replica: StageRuntime) -> Any:
        """Count what autograd saves in the body; parameters and saved inputs that are counted already are not."""
        seen = {p.untyped_storage().data_ptr() for p in replica.module.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                replica.saved_bytes += storage.nbytes()
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

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
            sums.append(self._get_gradients_for_reduction()[0])
            if self.is_last_stage():
                each.reduced_loss = self._pipeline_losses()
        if self.is_data_parallel and self.pipeline_enable_backward_allreduce:
            total = [g.clone() for g in sums[0]]
            for more in sums[1:]:
                for gradient, addend in zip(total, more, strict=True):
                    gradient.add_(addend)
            self.buffered_allreduce_fallback(grads=total, elements_per_buffer=MEMORY_OPT_ALLREDUCE_SIZE)
            sums = [total, *([g.clone() for g in total] for _ in same[1:])]
        for each, reduced in zip(same, sums, strict=True):
            each.reduced = reduced

    def _pipeline_losses(self) -> torch.Tensor:
        """The pipeline's mean loss and its mean additional losses, as float64."""
        losses = [self._scale_loss_by_gas(self.total_loss)]
        losses += [self._scale_loss_by_gas(x) for x in (self.total_additional_losses or {}).values()]
        return torch.stack([x.detach().reshape(()).double().cpu() for x in losses])

    def _exec_send_replica(self) -> None:
        runtime = self._binding.current
        assert runtime.reduced is not None
        check = -1 if runtime.checksum is None else runtime.checksum
        header = torch.tensor([check, len(runtime.reduced)], dtype=torch.int64)
        loss = runtime.reduced_loss if runtime.reduced_loss is not None else torch.empty(0, dtype=torch.float64)
        buffers = [b.detach() for b in runtime.module.buffers()]
        payload = (header, loss, *runtime.reduced, *buffers)
        for lane in self._lanes.replicas(runtime.role):
            self._transport.send(lane, self._sequence, payload)

    def _exec_recv_replica(self, role: Role) -> None:
        lane = self._lanes.replica(role, self._job.session.member)
        payload = self._receive(lane, self._sequence, (role, "replica", None))
        assert isinstance(payload, tuple)
        header, loss, *tensors = payload
        check, count = header.tolist()
        learner = self._learners.get(role)
        if learner is not None:
            learner.incoming = tensors[:count], tensors[count:]
            return
        replica = self._binding.runtimes[role]
        replica.reduced, replica.received_buffers = tensors[:count], tensors[count:]
        replica.reduced_loss = loss if loss.numel() else None
        if check >= 0 and replica.checksum is not None:
            self._compare(replica, check)

    def _compare(self, replica: StageRuntime, expected: int) -> None:
        role = [replica.role.pipeline, replica.role.stage]
        if replica.checksum == expected:
            self._job.channel.event(
                "replica_verified", step=self._committed_steps, role=role, checksum=f"{expected:08x}"
            )
            return
        replica.valid = False
        self._job.channel.event(
            "replica_mismatch",
            step=self._committed_steps,
            role=role,
            expected=f"{expected:08x}",
            found=f"{replica.checksum:08x}",
        )

    # -- commit and step ----------------------------------------------------------------------------------

    def _exec_commit(self) -> None:
        self._batches.complete(self.micro_batches)
        self._transport.drain()
        self._entered = True
        self._vector = self._agree(encode(self._plan.world, self._loss_count(), self._contribution()))

    def _agree(self, vector: torch.Tensor) -> tuple[float, ...]:
        """The sum of ``vector`` (float64) over all members: the commit of an operation.

        Every member also tells the newest epoch that it could enter. When all know of a new one, all switch after
        this operation.
        """
        members = self._plan.members
        told = torch.zeros(len(members), dtype=torch.float64)
        told[members.index(self._job.session.member)] = self._job.channel.boundary()
        total = self._transport.all_reduce(torch.cat([vector, told])).tolist()
        self._switch_due = min(total[len(vector) :]) > self._plan.epoch
        return tuple(total[: len(vector)])

    def _loss_count(self) -> int:
        return 1 + len(self.module.get_additional_losses() or {})

    def _contribution(self) -> Contribution:
        losses: dict[int, Sequence[float]] = {}
        squares: dict[Role, float] = {}
        for runtime in self._binding.owned():
            self._binding.use(runtime)
            if runtime.reduced_loss is not None:
                losses[runtime.role.pipeline] = runtime.reduced_loss.tolist()
            squares[runtime.role] = self._sum_of_squares(runtime)
        mismatches = [r.role for r in self._binding.replicas() if not r.valid]
        ahead = sum(replica.forwards for replica in self._binding.replicas())
        return Contribution(losses, squares, ahead, mismatches)

    def _sum_of_squares(self, runtime: StageRuntime) -> float:
        """Sum of squares of the gradients that count for clipping, in fp32 as DeepSpeed computes it.

        DeepSpeed counts a parameter on the first rank of the model-parallel group (which in a pipeline is its first
        stage) or where the parameter is marked as model-parallel.
        """
        if not self.gradient_clipping():
            return 0.0
        assert runtime.reduced is not None
        first = self.mpu.get_model_parallel_rank() == 0
        norms = [
            g.detach().float().norm(2.0)
            for p, g in zip(runtime.trainable(), runtime.reduced, strict=True)
            if first or is_model_parallel_parameter(p)
        ]
        return float(torch.stack(norms).pow(2.0).sum().float()) if norms else 0.0

    def _apply_reduced(self, runtime: StageRuntime) -> None:
        """Give the bound runtime's parameters the gradients (and buffers) that its optimizer step needs."""
        if runtime.reduced is None:
            raise ProtocolError(f"role {runtime.role} is to step without reduced gradients")
        for parameter, gradient in zip(runtime.trainable(), runtime.reduced, strict=True):
            parameter.grad = gradient.reshape(parameter.shape)
        if runtime.received_buffers is not None:
            with torch.no_grad():
                for buffer, received in zip(runtime.module.buffers(), runtime.received_buffers, strict=True):
                    buffer.copy_(received)

    def clip_fp32_gradients(self) -> None:
        """DeepSpeed's clipping, with the norm that the commit agreed on instead of collectives."""
        assert self._committed is not None
        norm = global_norm(self._plan.world, self._committed.squares).to(self.device)
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
            learner.keep(self._sequence, self._committed)
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
            runtime.checksum = checksum(runtime)

    def _report_progress(self, step: int) -> None:
        # DeepSpeed's constructor reports, too, before there are runtimes.
        binding = self.__dict__.get("_binding")
        if binding is None or binding.current.owned:
            super()._report_progress(step)

    _INSTRUCTION_MAP = {
        **PipelineEngine._INSTRUCTION_MAP,
        stock.LoadMicroBatch: _exec_load_micro_batch,
        stock.ForwardPass: _exec_forward_pass,
        stock.BackwardPass: _exec_backward_pass,
        stock.SendActivation: _exec_send_activations,
        stock.RecvActivation: _exec_recv_activations,
        stock.SendGrad: _exec_send_grads,
        stock.RecvGrad: _exec_recv_grads,
        stock.ReduceGrads: _exec_reduce_grads,
        stock.OptimizerStep: _exec_optimizer_step,
        schedule.UseRole: _exec_use_role,
        schedule.FillBubble: _exec_fill_bubble,
        schedule.RedundantForward: _exec_redundant_forward,
        schedule.ResendActivation: _exec_resend_activation,
        schedule.ResendGrad: _exec_resend_grad,
        schedule.SendReplica: _exec_send_replica,
        schedule.RecvReplica: _exec_recv_replica,
        schedule.Commit: _exec_commit,
        schedule.StepReplica: _exec_step_replica,
    }
