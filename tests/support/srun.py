"""`sbatch --requeue` of a script whose one line is `srun --kill-on-bad-exit -n N COMMAND`, as Slurm's sources have it.

    python srun.py N REQUEUES COMMAND...

Every task gets the variables of `env_array_for_step` and `setup_env` (src/common/env.c). When one task fails the others
are killed, the job is requeued under the same id, `SLURM_RESTART_COUNT` counts that, and the job's start is a later
second. Like srun it forwards SIGUSR1 to its tasks. Ends with 0 once all tasks of a start have. `TIERD_TEST_NODES` says
over how many nodes the tasks are spread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

NODE = "TIERD_TEST_NODE"  # the variable that tells a rank on which node it is


def step(tasks: int, restarts: int, started: int, command: list[str]) -> bool:
    """Run the step; whether all tasks ended with 0."""
    nodes = int(os.environ.get("TIERD_TEST_NODES", "1"))
    common = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_START_TIME": str(started),
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks // nodes}(x{nodes})" if nodes > 1 else str(tasks),
    }
    if restarts:
        common["SLURM_RESTART_COUNT"] = str(restarts)
    running = []
    for one in range(tasks):
        node, local = divmod(one, tasks // nodes)
        own = {"SLURM_PROCID": str(one), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), NODE: str(node)}
        running.append(subprocess.Popen(command, env={**os.environ, **common, **own}))
    signal.signal(signal.SIGUSR1, lambda number, _: [one.send_signal(number) for one in running])
    return end_well(running)


def end_well(running: list[subprocess.Popen[bytes]]) -> bool:
    """Whether all of these end with 0; when one does not, the others are killed."""
    try:
        while any(one.poll() is None for one in running):
            if any(one.returncode for one in running):
                return False
            time.sleep(0.02)
        return not any(one.returncode for one in running)
    finally:
        for one in running:
            one.kill()
            one.wait()


def main(tasks: int, requeues: int, command: list[str]) -> int:
    started = int(time.time()) - 1
    for restarts in range(requeues + 1):
        while int(time.time()) <= started:
            time.sleep(0.05)
        started = int(time.time())
        if step(tasks, restarts, started, command):
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
