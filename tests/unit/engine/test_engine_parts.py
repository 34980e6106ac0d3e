"""Parts of the engine, each alone: what members do at a recovery, and what crosses the boundaries of stages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.monitor import csv_monitor
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.utils._pytree import tree_map

from bamboo_ds.compat import cast_module
from bamboo_ds.config import BambooConfig
from bamboo_ds.engine.context.channels import Channels
from bamboo_ds.engine.context.history import History
from bamboo_ds.engine.context.records import Progress
from bamboo_ds.engine.data.batches import PipelineBatches, Source
from bamboo_ds.engine.data.supply import BatchSupply, Needs
from bamboo_ds.engine.iteration.boundaries import Boundaries
from bamboo_ds.engine.iteration.measures import IdleTimes
from bamboo_ds.engine.operations.monitors import Monitors
from bamboo_ds.engine.recovery.roles import RoleTransfer
from bamboo_ds.engine.stage.blocks import with_blocks
from bamboo_ds.engine.stage.commit import alike, encode_drawn
from bamboo_ds.engine.stage.runtime import StageRuntime
from bamboo_ds.errors import EpochChanged, FatalLoss, UnsupportedError
from bamboo_ds.schedule import Decision, PartProgress, RoleProgress
from bamboo_ds.topology import Layout, Plan, Role, initial_plan, takeover, with_redundancy
from tests.support.channels import Mailboxes
from tests.support.nccl.streams import LateMark, LateStreams
from tests.support.planning import undivided

pytestmark = pytest.mark.claim("guides/scripts.md", "reference/guarantees.md")

STAGES = 4
MICRO_BATCHES = 6


def plan_of(layout: Layout) -> Plan:
    return with_redundancy(initial_plan([f"m{rank}" for rank in range(layout.size)]), layout, True)


class Binding:
    """The runtimes of a member, none of which is bound to anything."""

    def __init__(self, plan: Plan, member: str) -> None:
        self.dropped: list[Role] = []
        self.runtimes = {
            role: StageRuntime(role, owned=plan.owner(role) == member, attributes={"pipe_buffers": {}})
            for role in (*plan.owned_by(member), *plan.shadowed_by(member))
        }
        for runtime in self.runtimes.values():
            runtime.optimizer = SimpleNamespace(clear=lambda: None, abandon_pass=lambda: None)  # type: ignore[assignment]
        self.current = next(iter(self.runtimes.values()))

    def owned(self) -> list[StageRuntime]:
        return [runtime for runtime in self.runtimes.values() if runtime.owned]

    def drop(self, role: Role) -> None:
        self.dropped.append(role)
        del self.runtimes[role]

    def refresh(self) -> None:
        pass

    reload = refresh


def member_of(plan: Plan, member: str, on_mismatch: str = "stop") -> RoleTransfer:
    """What makes a member's roles follow a plan, with its runtimes under ``plan``."""
    job = SimpleNamespace(newest_checkpoint=lambda plan: None)
    builder: Any = SimpleNamespace(
        park=lambda plan: None, place=lambda plan: None, make_room=lambda: None, move=lambda runtime, parked: None
    )
    context: Any = SimpleNamespace(
        settings=BambooConfig.model_validate({"redundancy": {"on_mismatch": on_mismatch}}),
        ds=SimpleNamespace(micro_batches=MICRO_BATCHES),
        binding=Binding(plan, member),
        epoch=SimpleNamespace(job=job, layout=plan.world, member=member, plan=plan),
        progress=Progress(seed=1),
    )
    return RoleTransfer(context, builder)


# -- roles --------------------------------------------------------------------------------------------------


def test_a_replica_that_differs_is_not_taken_over() -> None:
    before = plan_of(Layout(1, STAGES))
    found = member_of(before, "m0")
    found.binding.runtimes[Role(0, 1)].verification.valid = False
    with pytest.raises(FatalLoss) as error:
        found.follow(takeover(before, ["m1"]))
    assert error.value.stages == ((0, 1),) and error.value.members == ("m1",)


@pytest.mark.parametrize(
    ("sharded", "kept", "stops", "why"),
    [
        (False, [], True, None),
        (True, [], True, "no living member holds stage 0 of pipeline 0"),
        (False, ["3.running_mean"], True, r"what layers keep besides parameters \(3.running_mean\) of stage 0 of pip"),
        (False, ["3.running_mean"], False, None),
    ],
    ids=["equal", "sharded", "statistics", "warn"],
)
def test_a_role_without_a_holder_is_cloned_from_another_pipeline(
    sharded: bool, kept: list[str], stops: bool, why: str | None
) -> None:
    """But for what is not equal there, and where optimizers are partitioned over the pipelines."""
    before = plan_of(Layout(2, 2, sharded=sharded))
    role, twin = Role(0, 0), Role(1, 0)
    found = member_of(before, before.owner(twin), "stop" if stops else "warn")
    for runtime in found.binding.runtimes.values():
        runtime.layers = SimpleNamespace(kept=lambda: kept)  # type: ignore[assignment]
    cloned = []

    def clone(source: StageRuntime, wanted: Role) -> StageRuntime:
        cloned.append((source.role, wanted))
        found.binding.runtimes[wanted] = StageRuntime(wanted, owned=False)
        return found.binding.runtimes[wanted]

    found.builder.clone = clone  # type: ignore[method-assign]
    owners = list(before.owners)
    owners[before.world.rank(role)] = found.epoch.member
    after = replace(before, owners=tuple(owners))
    if why is not None:
        with pytest.raises(FatalLoss, match=why):
            found.follow(after)
        return
    found.follow(after)
    assert cloned == [(twin, role)] and found.progress.operation.taken_over == {role}


# -- progress -----------------------------------------------------------------------------------------------


def test_an_iterator_may_fill_its_tensors_again() -> None:
    """DeepSpeed loads a batch before it draws the next one; here batches are kept until the iteration commits."""
    tensor = torch.zeros(2)
    drawn = ((tensor.fill_(number), {"labels": [tensor]}) for number in itertools.count())
    for process in (None, lambda batch: batch):
        batches = PipelineBatches()
        batches.set_source(Source(drawn, process))
        batches.complete(MICRO_BATCHES)
        found = [batches.batch(m, inputs=True, labels=True) for m in range(MICRO_BATCHES)]
        numbers = [(int(inputs[0]), int(labels["labels"][0][1])) for inputs, labels in found]
        first = numbers[0][0]
        assert numbers == [(first + m, first + m) for m in range(MICRO_BATCHES)]


@pytest.mark.parametrize("at", range(MICRO_BATCHES))
def test_a_draw_that_ends_in_the_middle_goes_on_from_what_was_given(at: int) -> None:
    given = []

    def draw() -> Iterator[Any]:
        for number in itertools.count():
            given.append(number)
            yield torch.full((2,), number), number

    def process(batch: Any) -> Any:
        if batch[1] == at and given.count(at) == 1 and not ended:
            ended.append(at)
            raise EpochChanged("a loss")
        return batch[0] * 2, batch[0]

    ended: list[int] = []
    batches = PipelineBatches()
    batches.set_source(Source(draw(), process))
    with pytest.raises(EpochChanged):
        batches.complete(MICRO_BATCHES)
    batches.complete(MICRO_BATCHES)
    found = [batches.batch(m, inputs=True, labels=True) for m in range(MICRO_BATCHES)]
    assert [(int(inputs[0]), int(labels[0])) for inputs, labels in found] == [(2 * m, m) for m in range(MICRO_BATCHES)]
    assert given == list(range(MICRO_BATCHES)) and ended == [at]


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ((1.0, 2), (1.0, 2), True),
        ((1.0, 2), (1.0, 0), False),
        ((1.0, 2), (9.0, 2), False),
        ((1.0, 2), (1.0, None), False),
        ((1.0, (2, 3)), (1.0, (2, 3)), True),
        ((1.0, (2, 3)), (1.0, (2, 4)), False),
        ((1.0, 2, 5), (1.0, 2, 6), True),  # DeepSpeed looks at the first two parts
    ],
)
def test_what_makes_ends_differ(mine: Any, theirs: Any, same: bool) -> None:
    """What their iterators give, in the whole operation, is compared by one checksum in its commit."""
    made: Any = lambda value: tree_map(lambda each: None if each is None else torch.full((2,), float(each)), value)  # noqa: E731
    layout, found = Layout(2, STAGES), {}
    for end, given in ((0, mine), (STAGES - 1, theirs)):
        batches = PipelineBatches()
        batches.set_source(Source(iter([made((1.0, 1.0)), made(given)])))
        batches.complete(2)
        found[Role(1, end)] = batches.digest
        batches.drop()
        assert batches.digest == 0
    total = sum(encode_drawn(layout, {role: crc}) for role, crc in found.items() if crc is not None)
    assert torch.is_tensor(total) and alike(total.tolist()) is same
    assert alike(encode_drawn(layout, {Role(1, 0): 5}).tolist()) is None


def test_an_end_without_an_iterator() -> None:
    """``batch_fn`` may make its batches of nothing, as in DeepSpeed; else the script is told what it lacks."""
    plan = plan_of(Layout(1, STAGES))
    for process in (None, lambda batch: (torch.ones(1), torch.ones(1))):
        parts: Any = SimpleNamespace(
            ds=SimpleNamespace(batch_fn=process),
            binding=SimpleNamespace(local=SimpleNamespace(role=Role(0, STAGES - 1)), for_script=nullcontext),
            groups=SimpleNamespace(alone=nullcontext),
            layout=plan.world,
            epoch=SimpleNamespace(plan=plan, member=f"m{STAGES - 1}", layout=plan.world),
        )
        nothing: Any = None
        parts.history = History()
        needs = Needs(lambda iterators, apart: None, iterators=True)
        supply = BatchSupply(parts, nothing, nothing, needs)
        supply.use_iterator("train", None)
        if process is not None:
            assert supply[0].batch(0, inputs=False, labels=True)[1] == 1
            continue
        with pytest.raises(UnsupportedError, match=f"gives no iterator at rank {STAGES - 1}: .* at its last stage"):
            supply[0].batch(0, inputs=False, labels=True)


def test_passes_that_a_takeover_repeats() -> None:
    """Those that the neighbours of the lost owner have seen the results of."""
    before = plan_of(Layout(1, STAGES))
    after = takeover(before, ["m1"])
    found = member_of(before, "m0")
    found.follow(after)
    progress = {Role(0, 0): undivided(5, 2), Role(0, 1): undivided(3, 0, state_only=True)}
    progress |= {Role(0, 2): undivided(4, 3), Role(0, 3): undivided(3, 3)}
    assert found.redone(after, Decision(0, "resume", progress=progress)) == (1, 2, 0)
    progress[Role(0, 2)] = undivided(reduced=True)
    assert found.redone(after, Decision(0, "resume", progress=progress)) == (MICRO_BATCHES - 3, 2, 0)
    assert found.progress.operation.redone == {(Role(0, 1), 0): (MICRO_BATCHES, 2)}
    assert found.redone(after, Decision(0, "commit", progress=progress)) == (0, 0, 0)
    assert not found.progress.operation.redone
    # Of a stage in two parts the lost member has computed the first one: the second one has seen of that, too.
    progress |= {Role(0, 1): RoleProgress((PartProgress(), PartProgress(1, 2, 4, 2))), Role(0, 2): undivided(4, 3)}
    assert found.redone(after, Decision(0, "resume", progress=progress)) == (4, 2, 0)
    assert found.progress.operation.redone == {(Role(0, 1), 0): (4, 2), (Role(0, 1), 1): (4, 0)}
    # Its sums of one micro-batch go on being used.
    progress |= {Role(0, 1): undivided(3, 1, since=1)}
    assert found.redone(after, Decision(0, "resume", progress=progress)) == (1, 1, 1)


# -- boundaries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retain", [False, True])
def test_boundaries(retain: bool) -> None:
    """What was sent is kept for a new owner of its receiver; inputs that arrive collect gradients."""
    plan, mail = plan_of(Layout(1, 3)), Mailboxes()
    channels, made = Channels(plan, mail.open, shadow_gradients=True), []
    for stage in range(3):
        binding: Any = SimpleNamespace(current=StageRuntime(Role(0, stage), owned=True))
        ds: Any = SimpleNamespace(pipe_buffers={"inputs": [None] * 2}, grad_layer=None)
        epoch: Any = SimpleNamespace(plan=plan, layout=plan.world, member=f"m{stage}")
        context: Any = SimpleNamespace(ds=ds, binding=binding, epoch=epoch, progress=Progress(seed=1), retains=retain)
        made.append(Boundaries(context, IdleTimes()))
        made[-1].hosts = tuple((owner,) for owner in plan.owners)
    first, second, third = made
    outputs = first.binding.current.share.part.activations
    outputs[0] = (torch.ones(2), torch.ones(2, dtype=torch.int64))
    first.send_activations(channels, 0)
    assert (0 in outputs) == retain
    second.recv_activations(channels, 0)
    floating, whole = second.ds.pipe_buffers["inputs"][0]
    assert floating.requires_grad and floating.is_leaf and not whole.requires_grad
    gradients = third.binding.current.share.part.gradients
    gradients[0] = torch.full((2,), 3.0)
    third.send_grads(channels, 0)
    second.recv_grads(channels, 0)
    assert second.ds.grad_layer.tolist() == [3.0, 3.0] and (0 in gradients) == retain
    assert [name for name, sent in mail.sent.items() if sent] == ["shadow_gradient (0,1) from m2 to m0"]
    if not retain:
        return
    third.progress.operation.resumed = True  # shadows do no backward passes in what is resumed
    third.send_grads(channels, 0)
    third.resend_grad(channels, 0)
    first.resend_activation(channels, 0)
    assert {name: len(sent) for name, sent in mail.sent.items()} == {
        "activation (0,1) from m0 to m1": 1,
        "gradient (0,1) from m2 to m1": 2,
        "shadow_gradient (0,1) from m2 to m0": 1,
    }


# -- replicas under construction -----------------------------------------------------------------------------


def test_how_long_a_pass_takes_is_known_when_the_device_is_through_with_it() -> None:
    """The thread that tells a device what to do is done at once."""
    streams = LateStreams(1)
    streams.hold()
    idle = IdleTimes(streams)
    for _ in range(2):
        with idle.timing("forward"):
            time.sleep(0.01)
    last = idle.busy_until()
    assert isinstance(last, LateMark) and idle.duration("forward") is None
    streams.release()
    last.synchronize()
    assert idle.busy_until() is None
    assert 0.01 <= (idle.duration("forward") or 0.0) < 5


def test_times_that_nobody_asks_for_are_not_kept_for_ever() -> None:
    """As in mode ``none``, where nothing is to fit into idle time."""
    idle = IdleTimes(LateStreams(1))
    for _ in range(20):
        with idle.timing("forward"):
            pass
        idle._running[-1][-1].synchronize()  # type: ignore[attr-defined]  # a LateMark
    assert len(idle._running) == 1


@pytest.mark.parametrize(
    ("variable", "heads"), [(None, 2), ("BAMBOO_RESTART_COUNT", 1), ("BAMBOO_JOINER", 1)], ids=["run", "again", "joins"]
)
def test_a_later_worker_of_rank_0_goes_on_with_its_tables(
    variable: str | None, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another run in the same folder DeepSpeed's monitor begins again, and so does this one."""
    monkeypatch.setattr(csv_monitor.dist, "get_rank", lambda: 0)
    settings = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job")
    attachment = SimpleNamespace(acting_for=lambda rank, call: nullcontext())
    session: Any = SimpleNamespace(attachment=attachment)

    def write(step: int) -> None:
        tables = csv_monitor.csvMonitor(settings)
        master = SimpleNamespace(enabled=True, csv_monitor=tables, write_events=tables.write_events)
        monitors = Monitors(master, 0, session, lambda: True)
        monitors.write_events([("a/loss", 1.5, step)])
        monitors.write_events([("a/loss", 2.5, step + 1), ("a/new one", step, step)])

    write(1)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    write(3)
    lines = (tmp_path / "job" / "a_loss.csv").read_text().splitlines()
    assert lines.count("step,loss") == heads and lines[0] == "step,loss"
    assert [line for line in lines if line != "step,loss"] == ["1,1.5", "2,2.5", "3,1.5", "4,2.5"]


def test_a_stage_gets_its_precision_where_nothing_is_kept_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in DeepSpeed 0.19.2 to 0.19.7, whose engine casts parameters by themselves."""
    monkeypatch.delattr(deepspeed_engine, "keep_in_fp32_pattern", raising=False)
    calls: list[tuple[Any, ...]] = []
    engine = SimpleNamespace(
        fp16_enabled=lambda: False,
        bfloat16_enabled=lambda: True,
        _mixed_precision_dtypes=lambda: (torch.bfloat16, None),
        _cast_module_mixed_precision=lambda parameters, buffers, zero_init: calls.append(
            (parameters, buffers, zero_init)
        ),
    )
    cast_module(engine)
    assert calls == [(torch.bfloat16, None, False)]


@pytest.mark.parametrize("mended", [True, False], ids=["0.19.3", "0.19.2"])
def test_stages_stay_whole_where_deepspeed_would_divide_the_gradients_of_parts(
    mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = "_backward_prologue_per_tensor"
    monkeypatch.setattr(deepspeed_engine.DeepSpeedEngine, hook, lambda self, grad: grad, raising=False)
    monkeypatch.setattr(PipelineEngine, hook, lambda self, grad: grad, raising=False)
    if not mended:
        monkeypatch.delattr(PipelineEngine, hook)
    module = object.__new__(PipelineModule)
    module.__dict__.update(activation_checkpoint_interval=0, parts=[0, 3, 6])
    assert with_blocks(Layout(1, 2), module, 2).blocks == ((2, 2) if mended else Layout(1, 2).blocks)
