"""Agents of torchrun, one for each node: one worker each, and a rendezvous over loopback.

    python agents.py N RESTARTS SCRIPT

Ends with 0 once all agents have, and ends all when one has failed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from support.srun import NODE, end_well


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def command(nodes: str, port: int, *more: str) -> list[str]:
    """What starts one agent, before its script."""
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job"]
    own = [f"--nnodes={nodes}", "--nproc-per-node=1", "--local-addr=127.0.0.1", "--monitor-interval=0.2", *more]
    return [sys.executable, "-m", "torch.distributed.run", *rendezvous, *own]


def main(nodes: int, restarts: int, script: str) -> int:
    start = [*command(str(nodes), free_port(), f"--max-restarts={restarts}"), script]
    agents = [subprocess.Popen(start, env={**os.environ, NODE: str(node)}) for node in range(nodes)]
    return int(not end_well(agents))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
