"""The "bamboo" block: defaults, refusals that name the setting and the cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from deepspeed.runtime.pipe import schedule

from bamboo_ds.config import (
    BambooConfig,
    RedundancyMode,
    bamboo_config,
    config_path_from_argv,
    load_config,
    parse_block,
    settings_markdown,
)
from bamboo_ds.errors import ConfigError, UnsupportedError
from bamboo_ds.hooks import patch_engine
from bamboo_ds.supported import check_config, check_schedule

from .support.jobs import bamboo_command, environment, write_config


def test_an_empty_block_switches_everything_on() -> None:
    config = bamboo_config({"bamboo": {}})
    assert config == BambooConfig()
    assert config is not None and config.redundancy.mode is RedundancyMode.EAGER_FORWARD


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
        ({"membership": {"lease_ttl_s": 1}}, ['"bamboo.membership.lease_ttl_s" is 1', "greater than or equal to 2"]),
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


def test_unreadable_configurations_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "absent.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_config(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        load_config(broken)


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


def test_every_setting_is_in_the_table() -> None:
    table = settings_markdown()
    for name in ("redundancy.mode", "membership.settle_ms", "recovery.plan_timeout_s", "enabled"):
        assert f"`{name}`" in table


SCRIPT = """
import sys, deepspeed
from deepspeed.pipe import PipelineModule, LayerSpec
from torch import nn
kind = sys.argv[1]
deepspeed.init_distributed()
layers = [LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
net = nn.Linear(4, 4) if kind == "plain" else PipelineModule(
    layers, num_stages=1 if kind == "one-stage" else 2, loss_fn=nn.MSELoss(), partition_method="uniform")
deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[3])
print("INITIALISED")
"""


def run_script(folder: Path, kind: str, config: Path, launcher: list[str]) -> tuple[int, str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [*launcher, str(script), kind, "--deepspeed_config", str(config)]
    done = subprocess.run(command, env=environment(), capture_output=True, timeout=120, check=False)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one-stage", "needs at least 2 pipeline stages"),
        ("plain", "the model is not a PipelineModule"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    config = write_config(tmp_path, {}, 2)
    code, output = run_script(tmp_path, kind, config, [bamboo_command(), "run", "-n", "2"])
    assert code == 1, output[-3000:]
    assert words in output and "INITIALISED" not in output


@pytest.mark.integration
def test_a_block_without_an_agent_says_how_to_start(tmp_path: Path) -> None:
    config = write_config(tmp_path, {}, 2)
    code, output = run_script(tmp_path, "pipe", config, [sys.executable])
    assert code == 1
    assert "this process has no agent: start the job with `bamboo run" in output


@pytest.mark.integration
def test_a_wrong_block_stops_the_run_before_anything_exists(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"redundancy": {"mod": "none"}}, 2)
    code, output = run_script(tmp_path, "pipe", config, [bamboo_command(), "run", "-n", "2"])
    assert code != 0
    assert 'did you mean "mode"?' in output
    assert "INITIALISED" not in output


STOCK = """
import sys, threading, os
import deepspeed, deepspeed.comm, torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
from deepspeed.pipe import PipelineModule, LayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn
deepspeed.init_distributed()
net = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=nn.MSELoss())
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[2])
assert type(engine) is PipelineEngine, type(engine)
assert type(torch.distributed.group.WORLD) is torch.distributed.ProcessGroup
loaded = sorted(name for name in sys.modules if name.startswith("bamboo_ds"))
assert set(loaded) <= {"bamboo_ds", "bamboo_ds.autoload", "bamboo_ds.config", "bamboo_ds.errors", "bamboo_ds.hooks",
                       "bamboo_ds.launch", "bamboo_ds.observe", "bamboo_ds.observe.logs", "bamboo_ds.plan_change",
                       "bamboo_ds.version"}, loaded
assert not [t.name for t in threading.enumerate() if "bamboo" in t.name]
print("STOCK")
"""


@pytest.mark.integration
def test_a_job_without_a_block_runs_stock_deepspeed(tmp_path: Path) -> None:
    config = write_config(tmp_path, None, 1)
    script = tmp_path / "stock.py"
    script.write_text(STOCK)
    env = environment() | {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    command = [sys.executable, str(script), "--deepspeed_config", str(config)]
    done = subprocess.run(command, env=env, capture_output=True, timeout=120, check=False)
    assert b"STOCK" in done.stdout, done.stderr.decode()[-3000:]


def test_importing_the_package_imports_neither_torch_nor_deepspeed() -> None:
    code = "import sys, bamboo_ds, bamboo_ds.config; print(json.dumps([m for m in sys.modules if '.' not in m]))"
    done = subprocess.run(
        [sys.executable, "-c", "import json; " + code], capture_output=True, check=True, env=dict(os.environ)
    )
    assert not {"torch", "deepspeed", "grpc", "etcd3"} & set(json.loads(done.stdout))


def test_replaced_schedules_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_schedule()

    class ZeroBubbleH1Pipeline(schedule.PipeSchedule):
        pass

    monkeypatch.setattr(schedule, "TrainSchedule", ZeroBubbleH1Pipeline)
    with pytest.raises(UnsupportedError, match=r"ZeroBubbleH1Pipeline.*--enable-zbh1-pipeline"):
        check_schedule()


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
