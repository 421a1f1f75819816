"""Agents of torchrun, one for each node: one worker each, and a rendezvous over loopback.

    python agents.py N RESTARTS SCRIPT

Ends with 0 once all agents have, and ends all when one has failed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

NODE = "TIERD_TEST_NODE"  # as support.launched has it, which loads torch


def main(nodes: int, restarts: int, script: str) -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1"]
    command += ["--monitor-interval=0.2", f"--max-restarts={restarts}", script]
    agents = [subprocess.Popen(command, env={**os.environ, NODE: str(node)}) for node in range(nodes)]
    try:
        while any(one.poll() is None for one in agents):
            if any(one.returncode for one in agents):
                return 1
            time.sleep(0.05)
        return int(any(one.returncode for one in agents))
    finally:
        for one in agents:
            one.kill()
            one.wait()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
