"""What a script replaces of DeepSpeed takes effect, or is refused."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule

from bamboo_ds.engine import BambooPipelineEngine
from bamboo_ds.engine.script import replaced
from bamboo_ds.engine.script.replaced import CALLED, CLIPPING, ENGINE, HANDLERS, MODULE, P2P, SCHEDULES, Replacements
from bamboo_ds.engine.stage import deepspeed_adapter
from bamboo_ds.errors import UnsupportedError

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
    *((PipelineEngine, name, f"PipelineEngine.{name}") for name in (*ENGINE, *CALLED, "clip_fp32_gradients")),
    (DeepSpeedEngine, "save_checkpoint", "DeepSpeedEngine.save_checkpoint"),
    (DeepSpeedEngine, "allreduce_gradients", "DeepSpeedEngine.allreduce_gradients"),
    (engine_module, "clip_grad_norm_", "deepspeed.runtime.engine.clip_grad_norm_"),
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
    for replacement in (
        mine,
        around(MAP[kind]),
        MAP[schedule.SendGrad if kind is schedule.RecvGrad else schedule.RecvGrad],
    ):
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


def test_clipping_that_is_not_used_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeepSpeedEngine, "clip_fp32_gradients", mine)
    monkeypatch.setattr(engine_module, "clip_grad_norm_", mine)
    monkeypatch.setattr(Engine, "clips", 0.0)
    Replacements(BambooPipelineEngine).check(Engine())


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
