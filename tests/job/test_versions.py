"""What is said of versions of DeepSpeed, tried with the one that is installed."""

from __future__ import annotations

import json
from pathlib import Path

import deepspeed
import pytest

from bamboo_ds.supported import fault_of_deepspeed
from tests.support.jobs import run_stock, write_config

pytestmark = [pytest.mark.claim("reference/versions.md"), pytest.mark.integration]

#: A stage is a layer. The gradient, which is the step of plain SGD, by that of the same layers in one process.
SCRIPT = """
import json, sys
import deepspeed, torch
from deepspeed.pipe import PipelineModule
from torch import nn

out, config = (sys.argv[sys.argv.index(f"--{name}") + 1] for name in ("out", "deepspeed_config"))
deepspeed.init_distributed("gloo")
rank, size, loss_fn = torch.distributed.get_rank(), torch.distributed.get_world_size(), nn.functional.mse_loss

def layers():
    torch.manual_seed(1)
    return [nn.Linear(4, 4, bias=False) for _ in range(size)]

whole, data = layers(), [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(4)]
for x, y in data:
    (loss_fn(nn.Sequential(*whole)(x), y) / len(data)).backward()
net = PipelineModule(layers(), num_stages=size, loss_fn=loss_fn, partition_method="uniform")
(weight,) = net.parameters()
before = weight.detach().clone()
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.SGD([weight], lr=1.0), config=config)
engine.train_batch(iter(data))
with open(f"{out}/scale-{rank}.json", "w") as file:
    json.dump(((before - weight.detach()) / whole[rank].weight.grad).mean().item(), file)
"""


def test_gradients_of_the_stock_engine_are_as_the_table_says(tmp_path: Path) -> None:
    script = tmp_path / "scale.py"
    script.write_text(SCRIPT)
    config = write_config(
        tmp_path,
        None,
        micro_batches=4,
        optimizer=None,
        scheduler=None,
        gradient_clipping=0.0,
        zero_optimization={"stage": 1},
        zero_allow_untested_optimizer=True,
    )
    result = run_stock(tmp_path, 3, [], config, script)
    assert result.exit_code == 0, result.output[-4000:]
    scales = [json.loads((tmp_path / f"scale-{rank}.json").read_text()) for rank in range(3)]
    fault = fault_of_deepspeed(deepspeed.__version__)
    wrong = [4.0, 4.0, 4.0] if fault is not None and "too large" in fault else [1 / 16, 1 / 4, 1.0]
    assert scales == pytest.approx([1.0, 1.0, 1.0] if fault is None else wrong, rel=1e-3)
