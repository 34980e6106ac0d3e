"""The "bamboo" block: defaults, refusals that name the setting and the cure."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

from bamboo_ds import hooks
from bamboo_ds.cli.options import block_of
from bamboo_ds.config import (
    BambooConfig,
    RedundancyMode,
    bamboo_config,
    config_path_from_argv,
    has_block,
    load_config,
    parse_block,
)
from bamboo_ds.errors import ConfigError, UnsupportedError
from bamboo_ds.hooks import patch_engine
from bamboo_ds.launch import before_init_distributed
from bamboo_ds.supported import check_config, check_schedule
from bamboo_ds.variables import ENV_FD, ENV_LAUNCH
from tests.support.jobs import write_config

pytestmark = pytest.mark.claim(
    "README.md", "guides/launchers.md", "quickstart.md", "reference/limits.md", "reference/settings.md"
)


def test_an_empty_block_switches_everything_on() -> None:
    config = bamboo_config({"bamboo": {}})
    assert config == BambooConfig()
    assert config is not None and config.redundancy.mode is RedundancyMode.AUTO


@pytest.mark.parametrize("config", [{}, {"bamboo": {"enabled": False}}])
def test_no_block_and_a_disabled_block_are_the_same(config: dict[str, object]) -> None:
    assert bamboo_config(config) is None


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"redundency": {}}, ['"bamboo.redundency"', 'did you mean "redundancy"?']),
        ({"redundancy": {"modes": "none"}}, ['"bamboo.redundancy.modes"', 'did you mean "mode"?']),
        ({"membership": {"zzz": 1}}, ['"bamboo.membership.zzz"', "known keys: lease_ttl_s, heartbeat_timeout_s"]),
        ({"redundancy": {"mode": "eager"}}, ['"bamboo.redundancy.mode"', "eager-frc-lazy-brc"]),
        ({"membership": {"lease_ttl_s": 0}}, ['"bamboo.membership.lease_ttl_s" is 0', "greater than or equal to 1"]),
        (True, ['"bamboo" is True', "must be an object"]),
    ],
)
def test_mistakes_are_named_with_their_cure(block: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_block(block)
    for word in words:
        assert word in str(caught.value)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_block({"a": 1, "recovery": {"plan_timeout_s": -1}})
    assert '"bamboo.a"' in str(caught.value) and '"bamboo.recovery.plan_timeout_s"' in str(caught.value)


#: What DeepSpeed reads, and JSON does not have.
COMMENTED = """{
  // per worker
  "train_micro_batch_size_per_gpu": 4,
  # of the optimizer
  "optimizer": {"type": "Adam", "params": {"lr": 1e-2,},},  /* as ever */
  "bamboo": {"redundancy": {"mode": "none"}},
}
"""
READ = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "bamboo": {"redundancy": {"mode": "none"}},
}


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize("text", [COMMENTED, json.dumps(READ), json.dumps(READ | {"x": "è" * 2000})])
@pytest.mark.parametrize("form", [str, Path, encoded])
def test_configurations_are_read_as_deepspeed_reads_them(tmp_path: Path, text: str, form: type) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    source = encoded(text) if form is encoded else form(path)
    loaded = load_config(source)
    assert loaded == DeepSpeedConfig(source)._param_dict
    assert {name: loaded[name] for name in READ} == READ
    assert has_block(source)
    config = bamboo_config(source)
    assert config is not None and config.redundancy.mode is RedundancyMode.NONE


#: Contents of a file, and the error. Without quotes text is a string for Hjson, without braces it may be an object.
UNREADABLE = [
    ("{", "not valid JSON"),
    ('{"a": "b', "not valid JSON"),
    ("{{", "not valid JSON"),
    (b"\xff\xfe{}", "not valid JSON"),
    ("[]", "must hold a JSON object, not list"),
    ("garbage", "must hold a JSON object, not str"),
    ('{"a": 1, "bamboo": {}, "bamboo": {}}', "the keys bamboo more than once"),
]


@pytest.mark.parametrize(("contents", "words"), UNREADABLE)
def test_unreadable_files_are_named(tmp_path: Path, contents: str | bytes, words: str) -> None:
    broken = tmp_path / "broken.json"
    broken.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(ConfigError, match=rf"broken\.json.*{words}"):
        load_config(broken)
    assert not has_block(broken)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("absent.json", r"absent\.json does not exist"),
        (Path("absent.json"), r"absent\.json does not exist"),
        ("config/absent12", "absent12 does not exist"),  # base64, but of nothing
        ("c" * 5000, r"c{200}\.\.\. does not exist"),
        (encoded("{"), "nor is it a JSON object in base64"),
        (encoded("[]"), "nor is it a JSON object in base64"),
        (os.curdir, "cannot be read"),
        (17, "17 is neither"),
    ],
)
def test_what_is_no_configuration_is_named(source: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(source)
    assert not has_block(source)


@pytest.mark.parametrize("contents", [text for text, _ in UNREADABLE] + [None])
def test_what_cannot_be_read_is_left_to_deepspeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: str | bytes | None
) -> None:
    """Unless the command line or the script says that the job is a bamboo job."""
    path = tmp_path / "ds_config.json"
    if contents is not None:
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    monkeypatch.setattr(sys, "argv", ["train.py", "--deepspeed_config", str(path)])
    for name in (ENV_FD, ENV_LAUNCH):
        monkeypatch.delenv(name, raising=False)
    before_init_distributed()
    with pytest.raises(ConfigError, match="ds_config"):
        before_init_distributed(config=path)
    with pytest.raises(ConfigError, match="ds_config"):
        block_of(None, sys.argv)
    for name in (ENV_FD, ENV_LAUNCH):
        with monkeypatch.context() as started:
            started.setenv(name, "x")
            with pytest.raises(ConfigError, match="ds_config"):
                before_init_distributed()


@pytest.mark.parametrize("argv", [["x", "--deepspeed_config", "f.json"], ["x", "--deepspeed_config=f.json", "-y"]])
def test_the_configuration_is_found_on_the_command_line(argv: list[str]) -> None:
    assert config_path_from_argv(argv) == "f.json"


def test_there_may_be_none_on_the_command_line() -> None:
    assert config_path_from_argv(["x", "--deepspeed", "f.json"]) is None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optim",
        ),
        ({"zero_optimization": {"stage": 1, "reduce_scatter": False}}, "zero_optimization.reduce_scatter"),
        ({"zero_optimization": {"stage": 1, "parameter_alignment": True}}, "zero_optimization.parameter_alignment"),
        ({"zero_optimization": {"stage": 1, "zenflow": {"overlap_step": True}}}, "zero_optimization.zenflow"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
    ],
)
def test_unsupported_settings_are_refused(config: dict[str, object], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        check_config(config)


def test_supported_settings_pass() -> None:
    check_config({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0})
    check_config({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}})


def test_replaced_schedules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_schedule()

    class ZeroBubbleH1Pipeline(schedule.PipeSchedule):
        pass

    monkeypatch.setattr(schedule, "TrainSchedule", ZeroBubbleH1Pipeline)
    with pytest.raises(UnsupportedError, match=r"ZeroBubbleH1Pipeline.*--enable-zbh1-pipeline"):
        check_schedule()


@pytest.mark.parametrize(
    ("ranks", "given", "words"),
    [
        (4, {"num_stages": 2}, None),
        (4, {"topology": PipeDataParallelTopology(2, 2)}, None),
        (4, {"num_stages": 3}, r"has 3 stages \(num_stages\), .* job has 4 ranks, .* start it with 3 or 6 \(`-n` of"),
        (2, {"num_stages": 3}, r"start it with 3 \("),
        (
            4,
            {"num_stages": 3, "topology": PipeDataParallelTopology(3, 2)},
            r"pipe 3, data 2\) needs 6 ranks, .* has 4: ",
        ),
    ],
)
def test_a_wrong_number_of_ranks_is_told_with_the_right_ones(
    ranks: int, given: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PipelineModule:
        def __init__(self, layers: Any, num_stages: Any = None, topology: Any = None) -> None:
            built.append(num_stages)

    built: list[Any] = []
    module: Any = SimpleNamespace(PipelineModule=PipelineModule, dist=SimpleNamespace(get_world_size=lambda: ranks))
    hooks.patch_pipe(module)
    PipelineModule([], **given)
    assert built.pop() == given.get("num_stages"), "in other jobs DeepSpeed says what it makes of it"
    monkeypatch.setattr(hooks, "_job", object)
    with nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        PipelineModule([], **given)
    assert len(built) == (words is None)


@pytest.mark.parametrize("as_path", [False, True], ids=["mapping", "path"])
def test_the_engine_is_replaced_however_the_configuration_is_given(tmp_path: Path, as_path: bool) -> None:
    module = ModuleType("engine")
    module.DeepSpeedEngine = type("DeepSpeedEngine", (), {"__init__": lambda self, config: None})  # type: ignore[attr-defined]
    patch_engine(module)
    without = write_config(tmp_path, None)
    assert type(module.DeepSpeedEngine(config=str(without))) is module.DeepSpeedEngine
    path = write_config(tmp_path, {})
    with pytest.raises(ConfigError, match="the model is not a PipelineModule"):
        module.DeepSpeedEngine(config=str(path) if as_path else json.loads(path.read_text()))


def test_an_engine_of_the_script_s_own_class_is_told_with_its_place() -> None:
    class Mine(PipelineEngine):  # type: ignore[misc]  # DeepSpeed is untyped
        pass

    with pytest.raises(UnsupportedError) as caught:
        hooks._engine_class(Mine)
    place = rf"makes the engine, .* makes a Mine \({re.escape(__file__)}:\d+\) instead: leave that out"
    assert re.search(place, str(caught.value))
    with pytest.raises(UnsupportedError, match=r"makes a Bare \(nowhere\) instead"):
        hooks._engine_class(type("Bare", (PipelineEngine,), {"__module__": "nowhere"}))


@pytest.mark.parametrize(
    ("version", "accumulation", "words"),
    [
        ("0.16.9", 4, r"does not divide .* too large by a factor of A\."),
        ("0.18.2", 4, "too large"),
        ("0.18.3", 2, r"once per stage .* too small by a factor of A\^\(S-1\)"),
        ("0.19.2+local", 2, "once per stage"),
        ("0.19.2", 1, None),
        ("0.19.3", 4, None),
        ("0.19.8", 4, None),
    ],
)
def test_a_version_of_deepspeed_that_computes_wrongly_is_told_once(
    version: str, accumulation: int, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(gradient_accumulation_steps=accumulation)
    for rank, environ in ((0, {}), (1, {}), (0, {"BAMBOO_JOINER": "1"}), (0, {"BAMBOO_RESTART_COUNT": "1"})):
        hooks.warn_of_fault(version, SimpleNamespace(global_rank=rank), config, environ)
    assert len(caplog.messages) == (words is not None)
    if words is not None:
        assert re.search(rf"^DeepSpeed {re.escape(version)} .*{words}", caplog.messages[0])
        assert caplog.messages[0].endswith("; it is mended in DeepSpeed 0.19.3: pip install 'deepspeed>=0.19.3'")


def test_the_default_of_an_option_for_local_ranks_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    def aligned(found: object, environ: dict[str, str], *argv: str) -> object:
        arguments = SimpleNamespace(local_rank=found)
        hooks.align_local_rank(arguments, environ, argv)
        return arguments.local_rank

    one = {"LOCAL_RANK": "1"}
    assert aligned(0, one) == 1
    assert len(caplog.messages) == 1 and "it should read LOCAL_RANK" in caplog.messages[0]
    assert [aligned(found, one) for found in (1, -1, None, "0")] == [1, -1, None, "0"]
    assert aligned(0, {}) == 0 and hooks.align_local_rank(None, one, ()) is None
    assert [aligned(0, one, option) for option in ("--local_rank=0", "--local-rank")] == [0, 0], "DeepSpeed refuses it"
    assert len(caplog.messages) == 1
