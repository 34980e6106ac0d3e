"""Stands in for Slurm's ``srun -n TASKS --kill-on-bad-exit=0 COMMAND``: as many tasks on this host, as one step.

srun.py TASKS COMMAND...: sets the variables that Slurm 22.05 sets for a task and waits for all; the exit code is the
highest one.
"""

from __future__ import annotations

import os
import subprocess
import sys


def main(tasks: int, command: list[str]) -> int:
    """Run the step."""
    job = os.getpid()
    step = {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    started = [
        subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(tasks)
    ]
    return max(process.wait() if process.wait() >= 0 else 128 - process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
