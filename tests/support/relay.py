"""An agent's share of a worker's output, alone: ``relay.py FOLDER PREFIX MOST HURRIED COMMAND`` runs COMMAND."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from bamboo_ds.control.agent.output import WorkerOutput
from bamboo_ds.control.settings import AgentSettings
from bamboo_ds.observe import logs, outlet

folder, prefix, most, hurried, *command = sys.argv[1:]
outlet.MOST_WAITING = int(most)
logger = logs.configure()
common = {"job": "j", "command": (), "slot": 1, "world_size": 2, "store": "", "parent_pid": os.getppid()}
output = WorkerOutput(AgentSettings(**common, logs=folder, prefix=bool(prefix)))
worker = subprocess.Popen(command, stdout=output.stdout, stderr=output.stderr)
output.start("m1-a", worker.pid)
output.say("of the agent\n")
worker.wait()
output.close(time.sleep, lambda: bool(hurried))
logger.error("the end")
logs.end()
os._exit(0)
