"""Which device a worker gets, and what carries its tensors. None is needed, and none is used."""

from __future__ import annotations

import random
import re
import socket
import threading
from collections import defaultdict, deque
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bamboo_ds.comm import inner, wire
from bamboo_ds.comm.channel import Channel
from bamboo_ds.comm.inner import GLOO, NCCL, kind_for, own_kind, use_for_cuda
from bamboo_ds.comm.wire import payloads
from bamboo_ds.config import BambooConfig, RedundancyMode
from bamboo_ds.control.agent.command import as_local_rank, local_rank
from bamboo_ds.control.registry.records import DeviceRecord
from bamboo_ds.devices import nccl, staging
from bamboo_ds.devices.accelerators import HOST, name_on_host, numbered, room
from bamboo_ds.engine.context.records import CurrentEpoch
from bamboo_ds.engine.iteration.measures import Measures, device_of
from bamboo_ds.engine.iteration.recomputing import default_budget, release_cache
from bamboo_ds.engine.iteration.redundant import RedundantPasses
from bamboo_ds.engine.replicas.building import StageBuilder
from bamboo_ds.engine.stage.rng import keyed_generators, left_alone
from bamboo_ds.engine.stage.work import Part
from bamboo_ds.job_settings import JobSettings
from bamboo_ds.topology import Layout, Role, StageMemory, initial_plan, with_redundancy
from bamboo_ds.worker.channel import WorkerChannel
from bamboo_ds.worker.job import Job
from tests.support.accelerators import FakeAccelerator
from tests.support.far import FakeDriver, far
from tests.support.settings import agent

pytestmark = pytest.mark.claim("reference/limits.md", "reference/settings.md")

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("told", "visible", "driver", "expected"),
    [
        ({"slot": 3}, None, 0, 3),
        ({"slot": 3}, None, 4, 3),
        ({"slot": 3}, None, 1, 0),
        ({"slot": 3}, "0,2", 4, 1),
        ({"slot": 3}, "", 4, 3),
        ({"slot": 3}, "-1", 4, 3),
        ({"slot": 6, "script_rank": 3}, None, 4, 3),
        ({"slot": 7, "script_rank": 3}, None, 4, 3),
        ({"slot": 7, "script_rank": 3}, None, 0, 3),
        ({"slot": 7, "script_rank": 3, "device": 1}, None, 4, 1),
        ({"slot": 7, "script_rank": 3, "device": 1}, None, 0, 1),
    ],
)
def test_local_ranks(tmp_path: Path, told: dict[str, int], visible: str | None, driver: int, expected: int) -> None:
    for gpu in range(driver):
        (tmp_path / "gpus" / str(gpu)).mkdir(parents=True)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_rank(agent(**told), environ, tmp_path / "gpus") == expected


@pytest.mark.parametrize(
    ("told", "environ", "expected"),
    [
        ({"slot": 5}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 1),
        ({"slot": 5, "script_rank": 5}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 1),
        ({"slot": 8, "script_rank": 2}, {"LOCAL_RANK": "1", "LOCAL_SIZE": "4"}, 2),
        ({"slot": 5, "script_rank": 6}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 2),
        ({"slot": 5, "script_rank": 6}, {"LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 0),
        ({"slot": 5, "script_rank": 6}, {"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
        ({"slot": 5, "script_rank": 6}, {}, 6),
    ],
)
def test_local_ranks_under_another_launcher(told: dict[str, int], environ: dict[str, str], expected: int) -> None:
    assert local_rank(agent(**told, launched=True), environ, Path("/nowhere")) == expected


def test_a_command_has_the_local_rank_of_its_rank() -> None:
    for given, expected in [
        ("train.py --local_rank=3 --x", "train.py --local_rank=2 --x"),
        ("train.py --local-rank 0", "train.py --local-rank 2"),
        ("train.py --local_rank_x=3 --local_rank", "train.py --local_rank_x=3 --local_rank"),
        ("train.py", "train.py"),
    ]:
        assert as_local_rank(given.split(), 2) == tuple(expected.split())


@pytest.mark.parametrize(
    ("kind", "backend", "nccl", "chosen", "expected"),
    [
        ("cuda", "nccl", True, NCCL, NCCL),
        ("cuda", "nccl", True, GLOO, GLOO),
        ("cuda", "nccl", False, NCCL, GLOO),
        ("cpu", "gloo", True, NCCL, GLOO),
        ("xpu", "xccl", True, NCCL, GLOO),
        ("hpu", "hccl", True, NCCL, GLOO),
    ],
)
def test_kinds(
    monkeypatch: pytest.MonkeyPatch, kind: str, backend: str, nccl: bool, chosen: str, expected: str
) -> None:
    FakeAccelerator(kind, backend=backend).install(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(inner, "_cuda_kind", NCCL)  # put back afterwards
    use_for_cuda(chosen)
    assert own_kind() == expected == kind_for(torch.device(kind))
    for other in {"cuda", "cpu", "xpu", "hpu"} - {kind}:
        assert kind_for(torch.device(other)) == GLOO


def test_tensors_are_received_on_the_device_of_their_receiver() -> None:
    """Whatever the number of the sender's, and whatever thread receives them."""
    structure, (there, here) = (
        payloads.TUPLE,
        [payloads.in_host_memory(t) for t in (far(1.0, 2.0, device="xpu:3"), torch.ones(1))],
    )
    assert there.data.device == here.data.device == torch.device("cpu")
    with FakeDriver():
        got = payloads.assemble(structure, [there, here], torch.device("xpu:1"))
    assert isinstance(got, tuple) and isinstance(got[0], torch.Tensor)
    assert [each.device for each in got] == [torch.device("xpu:1"), torch.device("cpu")]
    head = wire.describe((far(1.0, device="cuda:7"), torch.ones(2)))
    assert [each.on_device for each in wire.described(head)] == [True, False]
    plain = payloads.assemble(structure, [there, here])
    assert isinstance(plain, tuple) and [each.device.type for each in plain] == ["cpu", "cpu"], "copies of state"
    assert plain[0].tolist() == [1.0, 2.0]


def test_what_roles_of_one_member_hand_on_stays_on_its_device() -> None:
    inboxes = defaultdict[bytes, deque[Any]](deque)

    def keep(key: bytes, sequence: int, payload: Any) -> None:
        inboxes[key].append(payloads.PeerMessage("m0", sequence, *payloads.copied(payload), arrival=0.0))

    links: Any = SimpleNamespace(
        member="m0",
        life=SimpleNamespace(check=lambda operation: None),
        changed=threading.Condition(),
        inbox=lambda key, newest: inboxes[key],
        keep=keep,
        wait=lambda operation, ready, members, timeout: ready(),
    )
    channel = Channel(links, torch.device("xpu:2"), "activation (0,1) from m0 to m0", "m0", "m0")
    for sequence in range(2):
        channel.send(sequence, far(1.0, device="xpu:2"))
    with FakeDriver():
        got = channel.recv(0), *(payload for _, payload in channel.take())
    assert [each.device for each in got if isinstance(each, torch.Tensor)] == [torch.device("xpu:2")] * 2


def test_random_numbers_of_any_device_are_keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FakeAccelerator("xpu", number=2).install(monkeypatch)
    before = own.generators[2].get_state()
    for device in ("xpu:2", "xpu"):  # the current one
        found = []
        for _ in range(2):
            with keyed_generators(5, torch.device(device)):
                found.append(torch.rand(3, generator=own.generators[2]))
        assert torch.equal(*found)
        assert torch.equal(own.generators[2].get_state(), before)
    with left_alone(torch.device("xpu:2")):
        torch.rand(1, generator=own.generators[2])
        torch.rand(1)
        random.random()
    assert torch.equal(own.generators[2].get_state(), before)
    assert {each for each in own.asked if each[0] == "generator"} == {("generator", 2)}


# -- memory -----------------------------------------------------------------------------------------------

GIB = 2**30


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:1", None, "cuda 1"),
        ("cuda:1", "", "cuda 1"),
        ("cuda", "6,7", "cuda 7"),
        ("cuda:0", "GPU-8932f937, 3", "cuda GPU-8932f937"),
        ("cuda:2", "6,7", "cuda 2"),
    ],
)
def test_devices_have_one_name_in_all_processes(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, expected: str
) -> None:
    FakeAccelerator("cuda", number=1).install(monkeypatch)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert name_on_host(torch.device(device), environ) == expected


def test_members_of_one_device_divide_what_is_free_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FakeAccelerator("xpu", total=80 * GIB, allocated=10 * GIB, cached=2 * GIB).install(monkeypatch)
    device = torch.device("xpu:0")
    assert room(device, 1) == 70 * GIB
    own.others = 28 * GIB
    assert room(device, 1) == 42 * GIB and default_budget(device, 1) == 21 * GIB
    assert room(device, 2) == 22 * GIB, "one that is first must not take what all others lack then"
    assert room(device, 4) == 10 * GIB, "its part is a fourth, and it has 10 of that"
    assert room(device, 8) == 0, "more than its part"
    release_cache(device)
    assert own.asked[-1] == "empty_cache" and own.cached == 0


def test_who_shares_a_device_is_known_in_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerator("cuda").install(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    job: Any = SimpleNamespace(channel=SimpleNamespace(host="h1"), session=SimpleNamespace(member="m0"))
    epoch = CurrentEpoch(job, Layout(1, 4), False, torch.device("cuda:0"))
    assert epoch.device_name == "h1 cuda 3" and epoch.sharing == 1
    epoch.note_devices(["h1 cuda 3", "h2 cuda 3", "h1 cuda 3", "h1 cuda 0", None])
    assert epoch.sharing == 2
    epoch.note_devices(["h1 cuda 3", "h2 cuda 3"])
    assert epoch.sharing == 1
    processors = CurrentEpoch(job, Layout(1, 4), False, torch.device("cpu"))
    processors.note_devices([None, None])
    assert processors.device_name is None and processors.sharing == 1


def test_what_a_device_has_no_room_for_is_taken_into_host_memory() -> None:
    """Sums of gradients that have arrived, of which nothing may be lost."""
    asked: list[bool] = []

    def payload(device: torch.device, parked: bool = False) -> torch.Tensor:
        asked.append(parked)
        if not parked:
            raise torch.OutOfMemoryError("no memory is left\nfor 2 GiB")
        return torch.ones(2)

    message = SimpleNamespace(sequence=3, payload=payload)
    this: Any = SimpleNamespace(
        _arrived=lambda: messages, _links=SimpleNamespace(changed=threading.Lock()), _device=torch.device("cpu")
    )
    this._brought = partial(Channel._brought, this)
    messages = deque([message])
    ((sequence, found),) = Channel.take(this)
    assert sequence == 3 and isinstance(found, torch.Tensor) and not messages and asked == [False, True]


def test_replicas_without_room_on_the_device_wait_until_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``auto``, where a plan says that there is room: it is tried once, and told once."""
    monkeypatch.setattr(staging, "current", lambda: SimpleNamespace())
    share, told, tried = SimpleNamespace(begun=False), list[tuple[bool, str]](), list[bool]()
    replica: Any = SimpleNamespace(role=Role(0, 1), share=share, parked=True, tensors=list)
    optimizer = SimpleNamespace(inner=None, masters=list)
    binding = SimpleNamespace(replicas=lambda: [replica], local=SimpleNamespace(optimizer=optimizer), runtimes={})
    channel = SimpleNamespace(event=lambda name, **values: told.append((values["parked"], values["reason"])))
    context: Any = SimpleNamespace(
        binding=binding,
        ds=SimpleNamespace(device=HOST),
        job=SimpleNamespace(channel=channel),
        epoch=SimpleNamespace(member="m0"),
        progress=SimpleNamespace(steps=4),
        settings=BambooConfig(),
        mode=RedundancyMode.AUTO,
    )
    full = True

    def move(runtime: Any, parked: bool) -> None:
        if runtime.parked is not parked:
            tried.append(parked)
            if full and not parked:
                raise torch.OutOfMemoryError("no memory is left\nfor 2 GiB")
            runtime.parked = parked

    builder = StageBuilder(context)
    monkeypatch.setattr(builder, "move", move)
    unknown = StageMemory(1, 1, 1, parked=True)
    first = with_redundancy(initial_plan(["m0", "m1"]), Layout(1, 2), True, memory=(unknown,) * 2)
    builder.place(first)
    assert replica.parked and not tried and told == [(True, "what redundant passes keep is not known yet")]
    plan = replace(first, parked=(), memory=(replace(unknown, redundant=1),) * 2)
    for _ in range(2):
        builder.place(plan)
        assert replica.parked and tried == [False] and told[1:] == [(True, "no memory is left")]
    full = False
    builder.place(replace(plan, epoch=3))
    assert not replica.parked and told[2:] == [(False, "there is room for what redundant passes keep")]
    less = replace(plan, epoch=4, parked=("m0",))
    share.begun = True
    builder.place(less)
    assert not replica.parked, "it has begun passes of the iteration"
    share.begun = False
    builder.park(less)
    builder.place(less)
    assert replica.parked and tried == [False, False, True]
    assert told[3:] == [(True, "there is no room for what redundant passes keep")]


def test_sums_without_room_on_the_device_stay_where_they_are() -> None:
    """What brings them there in idle time is no part of the job's own work, and must not end it."""
    begun: list[str] = []
    share = SimpleNamespace(part=Part(0, 1, {}), helps=False, divided=False)
    replica: Any = SimpleNamespace(
        role=Role(0, 1),
        pending=None,
        parked=False,
        results=SimpleNamespace(reduced=None),
        share=share,
        begin_again=lambda: begun.append("again"),
    )
    share.part.forwards = 3
    told: list[dict[str, Any]] = []
    binding = SimpleNamespace(
        replicas=lambda: [replica], refresh=lambda: begun.append("refresh"), reload=lambda: begun.append("reload")
    )
    layout = Layout(1, 2)
    plan = with_redundancy(initial_plan(["m0", "m1"]), layout, True)
    epoch = SimpleNamespace(
        plan=plan,
        member="m0",
        shadows=lambda role: True,
    )
    context: Any = SimpleNamespace(
        binding=binding,
        ds=SimpleNamespace(device=torch.device("cpu"), num_stages=2),
        job=SimpleNamespace(
            channel=SimpleNamespace(event=lambda name, **values: told.append({"event": name, **values}))
        ),
        epoch=epoch,
        progress=SimpleNamespace(steps=7),
        settings=BambooConfig(),
        mode=RedundancyMode.EAGER,
    )
    checks: Any = SimpleNamespace(rests=False, on=False)

    def follow(replica: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left\nfor 2 GiB")

    sums: Any = SimpleNamespace(follow=follow)
    nothing: Any = None
    passes = RedundantPasses(context, nothing, nothing, nothing, checks, nothing, sums)
    for _ in range(2):
        assert passes._next() is None
    assert begun == ["refresh", "again", "reload"]
    assert [(each["event"], each["dropped"], each["role"]) for each in told] == [("redundancy_exhausted", 3, [0, 1])]
    passes.end_iteration()
    epoch.plan = replace(plan, parked=("m0",))
    assert passes._next() is None and len(told) == 1, "where the plan has no room for them none begins"
    epoch.plan = plan
    assert passes._next() is None and len(told) == 2


def test_redundant_passes_rest_where_nothing_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each iteration begins with what is free then; that nothing is, is told once until there is something again."""
    own = FakeAccelerator("xpu", total=8 * GIB, allocated=8 * GIB).install(monkeypatch)
    part: Any = Part(0, 1, {})
    replica: Any = SimpleNamespace(role=Role(0, 1), share=SimpleNamespace(part=part))
    told: list[dict[str, Any]] = []
    channel = SimpleNamespace(event=lambda name, **values: told.append({"event": name, **values}))
    context: Any = SimpleNamespace(
        binding=SimpleNamespace(replicas=lambda: [replica]),
        ds=SimpleNamespace(device=torch.device("xpu:0")),
        job=SimpleNamespace(channel=channel),
        epoch=SimpleNamespace(sharing=1, plan=SimpleNamespace(epoch=4)),
        progress=SimpleNamespace(steps=7),
        settings=BambooConfig(),
    )
    passes = RedundantPasses(context, *[None] * 6)  # type: ignore[arg-type]
    assert passes._over_budget(replica) and passes._over_budget(replica)
    assert [(each["event"], each["dropped"], each["role"]) for each in told] == [("redundancy_exhausted", 0, [0, 1])]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    own.allocated = 6 * GIB
    assert not passes._over_budget(replica)
    part.forwards, part.saved[0] = 1, GIB - 1
    assert not passes._over_budget(replica), "half of 2 GiB"
    part.saved[0] += 1
    own.allocated = 0
    assert passes._over_budget(replica), "what is free counts before the first pass of an iteration"
    part.forwards, own.allocated = 0, 8 * GIB
    part.saved.clear()
    assert passes._over_budget(replica) and len(told) == 2


def test_counting_what_a_pass_keeps_changes_nothing_of_it() -> None:
    """On devices it is done by default, in host memory where a budget is set."""
    module: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    module.activation_checkpoint_func = None
    inputs, part, gradients = torch.randn(4, 8), Part(0, 1, {}), []

    def forward(micro_batch: int) -> None:
        module.zero_grad()
        module(inputs).sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])

    runtime: Any = SimpleNamespace(role=Role(0, 0), module=module, share=SimpleNamespace(part=part))
    passes = SimpleNamespace(use_role=lambda role: None, load=lambda micro_batch: None, forward=forward)
    context: Any = SimpleNamespace(ds=SimpleNamespace(num_stages=2))
    redundant = RedundantPasses(context, None, passes, *[None] * 4)  # type: ignore[arg-type]
    for redundant._budget in (None, 2.0**20):
        assert not part.saved
        redundant._run(runtime, "forward")
    assert all(map(torch.equal, *gradients))
    assert part.saved == {0: 2 * inputs.nbytes}, "the input and what the Tanh gives; weights are there anyway"


def test_a_device_is_reported_with_what_the_script_holds_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAccelerator("xpu", number=2, total=80 * GIB, allocated=GIB + 12).install(monkeypatch)
    tensors = [far(1.0, 2.0, device="xpu:2"), far(3.0, device="xpu:2"), torch.zeros(1000)]
    context: Any = SimpleNamespace(
        binding=SimpleNamespace(local=SimpleNamespace(tensors=lambda: iter(tensors))),
        ds=SimpleNamespace(device=torch.device("xpu:2")),
        epoch=SimpleNamespace(device_name="h1 xpu 2"),
        layout=SimpleNamespace(blocks=()),
        settings=BambooConfig(),
    )
    assert device_of(context) == DeviceRecord(name="h1 xpu 2", total=80 * GIB, besides=GIB)
    assert Measures.of(context).kept.on, "what passes keep counts, too"
    context.ds.device, context.epoch.device_name = torch.device("cpu"), None
    assert device_of(context) is None and not Measures.of(context).kept.on


def test_a_communicator_is_there_when_its_device_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    own = FakeAccelerator("cuda", number=1).install(monkeypatch)

    class Group:
        def allreduce(self, tensors: list[torch.Tensor]) -> Any:
            own.asked.append(("allreduce", tensors))
            return SimpleNamespace(wait=lambda: own.asked.append("wait"))

        def alltoall_base(self, *arguments: Any) -> Any:
            own.asked.append(("alltoall", arguments))
            return SimpleNamespace(wait=lambda: own.asked.append("wait"))

    monkeypatch.setattr(torch, "ones", lambda size, device: str(device))
    monkeypatch.setattr(torch, "empty_like", lambda like: like)
    inner.connect(Group(), 2, numbered(torch.device("cuda")))
    exchanged = "alltoall", ("cuda:1", "cuda:1", [], [])
    assert own.asked == [("allreduce", ["cuda:1"]), "wait", exchanged, "wait", ("synchronize", 1)]


def test_the_setting_holds_from_the_first_group_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job knows it before its script can have a group of its own."""
    FakeAccelerator("cuda", backend="nccl").install(monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(inner, "_cuda_kind", NCCL)
    block = BambooConfig.model_validate({"comm": {"cuda_backend": "gloo"}})
    here, there = socket.socketpair()
    with here, there:
        channel = WorkerChannel(
            there, member="a", job="j", rank=0, world_size=1, address="127.0.0.1", settings=JobSettings(open=True)
        )
        job = Job(channel, block, timedelta(seconds=1))
        try:
            assert kind_for(CUDA) == GLOO
            job.settings = BambooConfig()
            assert kind_for(CUDA) == NCCL, "a block that initialize gets first"
        finally:
            job.session.close()


def test_torch_leaves_losses_to_the_epoch() -> None:
    environ = {"TORCH_NCCL_ENABLE_MONITORING": "false", "PATH": "/bin"}
    assert nccl.prepare(environ) == []
    assert environ.pop("TORCH_NCCL_ENABLE_MONITORING") == "false" and environ.pop("PATH") == "/bin"
    assert environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "120",
        "NCCL_RUNTIME_CONNECT": "0",
    }


def test_communicators_that_hang_at_random_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_USE_COMM_NONBLOCKING"
    for version, value in (("2.6.0", None), ("2.9.1+cu128", None), ("2.10.0", "1"), ("2.13.0+cpu", "1")):
        monkeypatch.setattr(torch, "__version__", version)
        environ: dict[str, str] = {}
        assert nccl.prepare(environ) == [] and environ.get(name) == value, version
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    (told,) = nccl.prepare({name: "1"})
    assert told.startswith(f"{name}=1: with 0 ") and "jobs hang at random" in told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
        ("NCCL_ASYNC_ERROR_HANDLING", "1"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "true"),
        ("TORCH_NCCL_USE_COMM_NONBLOCKING", "0"),
        ("TORCH_NCCL_DESYNC_DEBUG", "1"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("NCCL_BLOCKING_WAIT", "true"),
        ("TORCH_NCCL_PROPAGATE_ERROR", "1"),
        ("TORCH_NCCL_EXTRA_DUMP_ON_EXEC", "1"),
        ("TORCH_NCCL_TEARDOWN_ON_TIMEOUT", "1"),
    ],
)
def test_what_the_user_has_set_stays_and_is_told(name: str, value: str) -> None:
    environ = {name: value}
    (told,) = nccl.prepare(environ)
    assert told.startswith(f"{name}={value}: ") and environ[name] == value
    assert nccl.prepare({"TORCH_DISTRIBUTED_DEBUG": "INFO", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "600"}) == []


def test_torch_knows_the_names() -> None:
    """Those of its header; the two about communicators that are not there yet are in its sources alone."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    known = header.read_text()
    for setting in nccl.SETTINGS:
        if not setting.name.startswith(("TORCH_NCCL_USE_COMM", "TORCH_NCCL_NONBLOCKING", "NCCL_")):
            for name in (setting.name, *setting.old):
                assert f'"{name}"' in known


def test_the_manual_has_what_workers_set() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/settings.md").read_text()
    _, _, section = page.partition("## Torch's own, on GPUs\n")
    items = section.partition("\n## ")[0].split("\n- ")[1:]
    listed = {name: item.split(" ")[0].rstrip(":") for item in items for name in re.findall(r"`(\w+)`", item)}
    assert listed == {setting.name: setting.value for setting in nccl.SETTINGS}
