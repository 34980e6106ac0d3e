"""What a script replaces of DeepSpeed takes effect, or is refused."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import distributed as dist

from bamboo_ds.engine import BambooPipelineEngine
from bamboo_ds.engine.script import replaced
from bamboo_ds.engine.script.replaced import (
    CALLED,
    CLIPPING,
    ENGINE,
    HANDLERS,
    MODULE,
    P2P,
    SCHEDULES,
    WRAPPED,
    Replacements,
)
from bamboo_ds.engine.stage import deepspeed_adapter
from bamboo_ds.engine.stage.answers import ClipAnswers
from bamboo_ds.engine.stage.commit import global_norm
from bamboo_ds.errors import UnsupportedError
from bamboo_ds.topology import Layout

pytestmark = pytest.mark.claim("reference/limits.md")

STEPS = schedule.TrainSchedule.steps
MAP: dict[type, Any] = PipelineEngine._INSTRUCTION_MAP


class Engine:
    """What is asked of an engine."""

    _INSTRUCTION_MAP = MAP
    _train_schedule, _inference_schedule = PipelineEngine._train_schedule, PipelineEngine._inference_schedule
    clips = 1.0

    def __init__(self, stage_id: int = 0) -> None:
        self.micro_batches, self.num_stages, self.stage_id = 4, 3, stage_id

    def gradient_clipping(self) -> float:
        return self.clips

    def fp16_enabled(self) -> bool:
        return False

    bfloat16_enabled = zero_optimization = fp16_enabled


def mine(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in the place of something of DeepSpeed's."""


def around(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return wrapper


def without_step(self: Any) -> Iterator[list[Any]]:
    for commands in STEPS(self):
        yield [each for each in commands if not isinstance(each, schedule.OptimizerStep)]


def loading_first(self: Any) -> Iterator[list[Any]]:
    for commands in STEPS(self):
        yield sorted(commands, key=lambda each: not isinstance(each, schedule.LoadMicroBatch))


def loading_everywhere(self: Any) -> Iterator[list[Any]]:
    for commands in STEPS(self):
        yield [*commands, *(schedule.LoadMicroBatch(0) for each in commands if isinstance(each, schedule.ForwardPass))]


def other_buffers(self: Any, micro_batch_id: int) -> int:
    return micro_batch_id % 2


LINE = mine.__code__.co_firstlineno
WHERE = rf"{Path(__file__).name}:{LINE}\)"

#: Where something is put, its name there, and how it is called.
PLACES: list[tuple[Any, str, str]] = [
    *((PipelineEngine, name, f"PipelineEngine.{name}") for name in (*ENGINE, *CALLED)),
    (DeepSpeedEngine, "save_checkpoint", "DeepSpeedEngine.save_checkpoint"),
    (DeepSpeedEngine, "allreduce_gradients", "DeepSpeedEngine.allreduce_gradients"),
    *((PipelineModule, name, f"PipelineModule.{name}") for name in MODULE),
    *((p2p, name, f"deepspeed.runtime.pipe.p2p.{name}") for name in P2P),
]


@pytest.mark.parametrize(("place", "name", "called"), PLACES, ids=[called for *_, called in PLACES])
def test_what_would_have_no_effect_is_refused(
    place: Any, name: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before ``deepspeed.initialize`` and after it."""
    before = Replacements(BambooPipelineEngine)
    before.check(Engine())
    for replacement in (mine, functools.partial(mine, None)):
        monkeypatch.setattr(place, name, replacement)
        for check in (lambda: before.check(Engine()), lambda: Replacements(BambooPipelineEngine).check(Engine())):
            with pytest.raises(UnsupportedError, match=rf"replaced {called} of DeepSpeed by mine .*{WHERE}"):
                check()
        monkeypatch.undo()


@pytest.mark.parametrize("kind", HANDLERS, ids=lambda kind: kind.__name__)
def test_handlers_of_instructions_are_refused(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Replacements(BambooPipelineEngine)
    wrappers = [] if kind in WRAPPED else [around(MAP[kind])]
    for replacement in (mine, *wrappers, MAP[schedule.SendGrad if kind is schedule.RecvGrad else schedule.RecvGrad]):
        monkeypatch.setitem(MAP, kind, replacement)
        for check in (lambda: before.check(Engine()), lambda: Replacements(BambooPipelineEngine)):
            with pytest.raises(UnsupportedError, match=rf"_INSTRUCTION_MAP\[{kind.__name__}\] of DeepSpeed by"):
                check()
    monkeypatch.undo()
    monkeypatch.setitem(MAP, SimpleNamespace, mine)  # no schedule has such an instruction
    before.check(Engine())
    engine: Any = Engine()
    engine._INSTRUCTION_MAP = dict(MAP)
    with pytest.raises(UnsupportedError, match="_INSTRUCTION_MAP of the engine"):
        before.check(engine)


@pytest.mark.parametrize("name", ENGINE)
def test_what_is_put_into_the_engine_itself_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replacements, engine = Replacements(BambooPipelineEngine), Engine()
    setattr(engine, name, mine)
    with pytest.raises(UnsupportedError, match=rf"replaced {name} of the engine of DeepSpeed by mine .*{WHERE}"):
        replacements.check(engine)
    monkeypatch.setattr(BambooPipelineEngine, name, mine)
    with pytest.raises(UnsupportedError, match=rf"BambooPipelineEngine.{name} of DeepSpeed by mine"):
        replacements.check(Engine())


def test_what_scripts_call_they_may_wrap() -> None:
    replacements, engine = Replacements(BambooPipelineEngine), Engine()
    for name in CALLED:
        setattr(engine, name, mine)
    replacements.check(engine)


@pytest.mark.parametrize("name", CALLED)
def test_each_call_of_the_engine_looks(name: str) -> None:
    class Found(Exception): ...

    def check(engine: Any) -> None:
        raise Found

    engine: Any = object.__new__(BambooPipelineEngine)
    engine.__dict__["_replacements"] = SimpleNamespace(check=check)
    with pytest.raises(Found):
        getattr(engine, name)(None)


def test_what_is_to_be_done_instead_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gradient release, and of steps."""
    before = Replacements(BambooPipelineEngine)
    for kind, cure in ((schedule.ReduceGrads, "gradient release"), (schedule.OptimizerStep, "the `step` of an opt")):
        monkeypatch.setitem(MAP, kind, mine)
        for check in (lambda: before.check(Engine()), lambda: Replacements(BambooPipelineEngine)):
            with pytest.raises(UnsupportedError, match=f"for all copies of a stage. .*{cure}"):
                check()
        monkeypatch.undo()


# -- what is honoured -----------------------------------------------------------------------------------------


class Held:
    """Has a handler that the script has kept elsewhere than in a closure."""


@pytest.mark.parametrize("kind", WRAPPED, ids=lambda kind: kind.__name__)
def test_a_wrapper_of_a_handler_that_computes_is_called(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ``initialize`` and after it, however it holds DeepSpeed's handler."""
    before, stock, held = Replacements(BambooPipelineEngine), MAP[kind], Held()
    held.handler = stock  # type: ignore[attr-defined]
    called = []

    def noting(engine: Any, original: Any = stock, **arguments: Any) -> None:
        called.append((engine, arguments))

    for wrapper in (around(stock), around(around(stock)), functools.partial(mine, stock), noting, lambda *a: held):
        monkeypatch.setitem(MAP, kind, wrapper)
        before.check(Engine())
        Replacements(BambooPipelineEngine).check(Engine())
    monkeypatch.setitem(MAP, kind, noting)
    method = {"LoadMicroBatch": "load_micro_batch", "ForwardPass": "forward_pass", "BackwardPass": "backward_pass"}
    engine: Any = Engine()
    getattr(deepspeed_adapter.DeepSpeedAdapter(engine), method[kind.__name__])(3)
    assert called == [(engine, {"buffer_id": 3})]


@pytest.mark.parametrize(("place", "name"), [(DeepSpeedEngine, "clip_fp32_gradients"), (engine_module, CLIPPING[1])])
def test_clipping_may_be_replaced(place: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before ``initialize`` and after it; but not on the engine itself."""
    before = Replacements(BambooPipelineEngine)
    before.check(Engine())
    assert not before.clipping
    monkeypatch.setattr(place, name, lambda *a, **k: None)
    for replacements in (before, Replacements(BambooPipelineEngine)):
        replacements.check(Engine())
        assert replacements.clipping
        engine: Any = Engine()
        engine.clip_fp32_gradients = mine
        with pytest.raises(UnsupportedError, match="clip_fp32_gradients of the engine"):
            replacements.check(engine)


#: Two copies of three stages; squares by rank, as the commit has them.
LAYOUT = Layout(2, 3)
SQUARES = (1.0, 8.0, 4.0, 7.0, 4.0, 1.0)


def clip_as_diffusion_pipe(own: float, answers: ClipAnswers, options: Any, op: Any = dist.ReduceOp.SUM) -> float:
    """What ``utils/patches.py`` there sums up: over the stages, then over the copies."""
    options.reduceOp = op
    total = torch.tensor(own)
    answers((0, 1, 2), "allreduce", ([total], options))
    norm = total.pow(0.5) * 1.0 / 2.0
    answers((0, 3), "allreduce", ([norm], options))
    return float(norm)


def test_the_sums_of_a_script_s_clipping_are_the_commit_s() -> None:
    for role, own in zip(LAYOUT.roles, SQUARES, strict=True):
        for near in (1.0, 1.0 + 1e-6):  # a parked replica computes in another memory
            found = clip_as_diffusion_pipe(own * near, ClipAnswers(LAYOUT, role, SQUARES), options())
            assert found == float(global_norm(LAYOUT, SQUARES)) == 3.5


def options() -> Any:
    return dist.AllreduceOptions()


def test_other_collectives_of_a_script_s_clipping_are_refused() -> None:
    role = LAYOUT.roles[2]
    with pytest.raises(UnsupportedError, match=r"calls a collective, allreduce over ranks \[0, 1, 2\]"):
        clip_as_diffusion_pipe(5.0, ClipAnswers(LAYOUT, role, SQUARES), options())  # another norm
    with pytest.raises(UnsupportedError, match="clip by the norm that DeepSpeed clips by"):
        clip_as_diffusion_pipe(4.0, ClipAnswers(LAYOUT, role, SQUARES), options(), dist.ReduceOp.MAX)
    for ranks, operation in (((0, 1), "allreduce"), ((0, 1, 2), "broadcast")):
        with pytest.raises(UnsupportedError, match=f"{operation} over ranks"):
            ClipAnswers(LAYOUT, role, SQUARES)(ranks, operation, ([torch.tensor(4.0)], options()))
    answers = ClipAnswers(LAYOUT, role, SQUARES)
    clip_as_diffusion_pipe(4.0, answers, options())
    with pytest.raises(UnsupportedError):  # a third sum
        answers((0, 1, 2), "allreduce", ([torch.tensor(4.0)], options()))


def test_a_norm_that_overflows_is_the_commit_s() -> None:
    squares = (math.inf, *SQUARES[1:])
    found = clip_as_diffusion_pipe(math.inf, ClipAnswers(LAYOUT, LAYOUT.roles[0], squares), options())
    assert found == math.inf


@pytest.mark.parametrize(
    ("name", "replacement", "refused"),
    [
        ("steps", without_step, [0, 1, 2]),
        ("steps", loading_everywhere, [0, 1, 2]),
        ("_buffer_idx", other_buffers, [0]),
        ("steps", loading_first, []),
        ("steps", around(STEPS), []),
    ],
    ids=["without-step", "loading-everywhere", "other-buffers", "loading-first", "wrapped"],
)
def test_schedules_are_compared(
    name: str, replacement: Callable[..., Any], refused: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the class before ``initialize`` and after it, and on the engine."""
    before = Replacements(BambooPipelineEngine)
    other = type("Other", (schedule.TrainSchedule,), {name: replacement})
    for stage in range(3):
        own: Any = Engine(stage)
        own._train_schedule = lambda stage=stage: other(4, 3, stage)
        monkeypatch.setattr(schedule.TrainSchedule, name, replacement)
        on_class = [
            lambda s=stage: before.check(Engine(s)),
            lambda s=stage: Replacements(BambooPipelineEngine).check(Engine(s)),
        ]
        for check in (*on_class, lambda own=own: before.check(own)):
            if stage not in refused:
                check()
                continue
            with pytest.raises(UnsupportedError, match=rf"replaced .*\(.*: stage {stage} has other instructions"):
                check()
        monkeypatch.undo()


def test_deepspeed_is_as_it_was_installed() -> None:
    places = [*replaced.engine_places(), *replaced.schedule_places()]
    assert [place.what for place in places if replaced.is_foreign(place.value, place.own)] == []


# -- nothing is forgotten -------------------------------------------------------------------------------------

#: Overridden methods that go on to call DeepSpeed's.
_GO_ON = {"compile", "_report_progress", "load_universal_checkpoint", "load_module_state_dict", "_copy_recovery_script"}
_GO_ON |= {"curriculum_enabled_legacy"}
#: What replaced methods call, and does nothing here, or the engine does it as well.
_LEFT = {
    "zero_optimization_partition_gradients",  # ZeRO stage 2, which pipelines have not
    "is_deepcompile_active",
    "uses_parallelization_pass_only",
    "_reduce_autoep_folding_tp_replicated_gradients",
    "barrier",
    "log_for_device",
    "get_additional_losses",  # what the last training step has told
    "wall_clock_breakdown",
    "eval",  # of the module
}


def overridden() -> set[str]:
    own = {name for name, value in vars(BambooPipelineEngine).items() if inspect.isfunction(value)}
    return {name for name in own if hasattr(PipelineEngine, name) and not name.startswith("__")}


def test_every_method_in_whose_place_there_is_another() -> None:
    assert overridden() <= {*CALLED, *ENGINE, *CLIPPING, *_GO_ON}
    for name in _GO_ON & overridden():
        assert f"super().{name}(" in inspect.getsource(vars(BambooPipelineEngine)[name])


def test_every_handler_of_deepspeed_s_map() -> None:
    assert {
        kind: handler.__name__ for kind, handler in MAP.items() if kind in BambooPipelineEngine.HANDLERS
    } == HANDLERS
    assert set(HANDLERS.values()) == {handler.__name__ for handler in MAP.values()}


def test_every_method_that_only_replaced_ones_call() -> None:
    """Found in the code of what the engine does in its own way; what it uses of that itself is in the adapter."""
    used = set(inspect.getsource(deepspeed_adapter).replace('"', " ").replace("(", " ").replace(".", " ").split())
    gone = ["_exec_send_activations", "_exec_send_grads", "_exec_recv_activations", "_exec_recv_grads"]
    gone += ["_exec_reduce_grads", "_exec_reduce_tied_grads", "_exec_schedule", "_aggregate_total_loss"]
    gone += ["_bf16_reduce_grads", "clip_fp32_gradients", "eval_batch"]
    called: set[str] = set()
    for name in gone:
        called.update(vars(next(kind for kind in PipelineEngine.__mro__ if name in vars(kind)))[name].__code__.co_names)
    known = {**vars(DeepSpeedEngine), **vars(PipelineEngine)}
    methods = {name for name in called if inspect.isfunction(known.get(name))}
    assert methods - used - _LEFT - {*ENGINE, *SCHEDULES, *overridden()} == set()
    sent = {name for name in called if inspect.isfunction(getattr(p2p, name, None))}
    assert sent <= set(P2P)


def test_code_of_deepspeed_s_whose_variables_have_no_values_yet() -> None:
    own = compile(
        "def make():\n def steps():\n  return later\n return steps\n later = 1\nsteps = make()", p2p.__file__, "exec"
    )
    found: dict[str, Any] = {}
    exec(own, found)
    assert not replaced.is_foreign(found["steps"], "steps")
