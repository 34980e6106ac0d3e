"""One checkpoint of one engine, first by DeepSpeed itself, then through bamboo_ds: save_once.py FOLDER"""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from bamboo_ds.engine.checkpoints.saving import HostCopyEngine
from bamboo_ds.state.checkpoints import SaveRecord
from bamboo_ds.state.saver import CheckpointSaver
from bamboo_ds.state.writer import Save
from bamboo_ds.topology import Layout

out = Path(sys.argv[1])
deepspeed.init_distributed()
net = PipelineModule([LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 4)], num_stages=1, loss_fn=nn.MSELoss())
config = str(out / "ds_config.json")
engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config)
data = iter([(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(3)])
engine.train_batch(data)
client = {"mine": [1, 2]}
engine.save_checkpoint(str(out / "stock"), tag="one", client_state=client)
host = engine.checkpoint_engine = HostCopyEngine(engine.checkpoint_engine)
saver = CheckpointSaver("job", "m0")
record = SaveRecord(job="job", save_id="a", tag="one", step=1, layout=Layout(1, 1))
saver.begin(Save(out / "ours", record, owners=("m0",)))
with host.collecting(out / "ours" / "one") as files:
    engine._save_checkpoint(str(out / "ours"), "one", client)
assert not (out / "ours").exists()
saver.add(0, files)
host.trim()
with torch.no_grad():
    for p in net.parameters():
        p.zero_()
for state in engine.optimizer.state.values():
    state["exp_avg"].zero_()
client["mine"].append(3)
saver.submit()
saver.close()
path, state = engine.load_checkpoint(str(out / "ours"))
assert path is not None and state["mine"] == [1, 2], (path, state)
assert all(p.abs().sum() > 0 for p in net.parameters())
engine.save_checkpoint(str(out / "stock"), tag="two", client_state={"mine": [1, 2]})  # DeepSpeed's own way
