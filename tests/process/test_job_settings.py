"""The settings of a job: resolved once, kept in etcd, and compared with what scripts and joining members have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import TemporaryFolder, bamboo_command, environment, write_config
from tests.support.processes import start

SCRIPT = """
import json, sys
import deepspeed, torch
from deepspeed.pipe import PipelineModule, LayerSpec
from torch import nn
from bamboo_ds.worker.job import current_job
config = json.loads(sys.argv[1])
deepspeed.init_distributed()
torch.manual_seed(3)
net = PipelineModule([LayerSpec(nn.Linear, 4, 4)] * 4, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
data = [(torch.full((4,), 0.01 * i), torch.ones(4)) for i in range(64)]
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), training_data=data, config=config)
engine.train_batch()
print("FENCE", current_job().channel.newest_plan.fence_s)
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("own", "options", "code", "words"),
    [
        ({"recovery": {"max_restarts": 0}}, [], 0, ["FENCE None"]),
        ({"membership": {"lease_ttl_s": 9}}, ["--lease-ttl-s", "8"], 0, ["FENCE 120.0"]),
        pytest.param(
            {"membership": {"lease_ttl_s": 9}},
            [],
            1,
            ["bamboo.membership.lease_ttl_s is 9.0 here and 5 in the job"],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["leader's", "given", "agents'"],
)
def test_the_block_of_a_dict_holds_for_the_leader(
    tmp_path: Path, own: dict[str, Any], options: list[str], code: int, words: list[str]
) -> None:
    """Or the job says what does not hold."""
    config = json.dumps({**json.loads(write_config(tmp_path, None, 4).read_text()), "bamboo": own})
    script, log = tmp_path / "train.py", tmp_path / "log.txt"
    script.write_text(SCRIPT)
    command = [sys.executable, bamboo_command(), "run", "-n", "2", *options, str(script), config]
    temporary = TemporaryFolder(tmp_path)
    with open(log, "wb") as file:
        ended = start(command, environment() | temporary.variables, file.fileno()).wait(120)
    temporary.close()
    assert ended == code, log.read_text()[-4000:]
    assert all(word in log.read_text() for word in words), log.read_text()[-4000:]
