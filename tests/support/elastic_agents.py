"""torchrun with 1 to 4 agents, each a node with a spool of its own: nodes die and come while it trains."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

from support import agents, elastic
from support.launched import ORDERS
from support.launchers import end_all, judge, judge_waits
from support.ranks import environment
from support.srun import NODE
from support.waiting import wait_until

STEPS = 60


class Agents:
    """Agents of one elastic launch, by the number of their node. Node 0 hosts the rendezvous, and stays."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.port = agents.free_port()
        self.running: dict[int, subprocess.Popen] = {}
        (home / "tier").mkdir()

    def start(self, node: int) -> None:
        # Else the first that listens hosts it, because all are of one machine: under load that can be any of them.
        hosts = f"is_host={int(node == 0)}"
        timing = f"--rdzv-conf={hosts},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=15"
        command = agents.command("1:4", self.port, timing, "--max-restarts=20")
        command += [elastic.__file__, str(self.home), str(STEPS)]
        orders = json.dumps({"home": str(self.home)}).replace(" ", "")
        reported = {ORDERS: orders, NODE: str(node), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.home / "output").open("ab") as output:
            self.running[node] = subprocess.Popen(
                command, env=environment(**reported), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def lose(self, node: int) -> None:
        """SIGKILL the agent and its rank; the node's disk and daemon stay."""
        agent = self.running.pop(node)
        children = (Path(f"/proc/{agent.pid}/task/{agent.pid}/children")).read_text().split()
        agent.kill()
        for child in map(int, children):
            try:
                os.kill(child, 9)
            except ProcessLookupError:
                pass
        agent.wait()

    def log(self) -> list[str]:
        log = self.home / "log"
        return log.read_text().splitlines() if log.exists() else []

    def worlds(self) -> list[int]:
        """The number of ranks of each launch of which all have resumed, in order."""
        counts = Counter((words[3], int(words[4])) for line in self.log() if (words := line.split())[1] == "resumed")
        return [world for (_, world), count in counts.items() if count == world]

    def saves(self) -> int:
        return sum(line.startswith("0 acked") for line in self.log())


def cycle(seed: int, home: Path) -> tuple[list[str], float]:
    """Start four nodes, lose one to three of them, and let one come back.

    Returns:
        What was done, and the longest wait in seconds.

    Raises:
        AssertionError: ranks resumed from different checkpoints, or passed over what was durable; or the end is not
            that of an uninterrupted run.
    """
    chance, made = random.Random(seed), Agents(home)
    reported = f"seed {seed}"
    try:
        for node in range(4):
            made.start(node)
        wait_until(lambda: made.saves() >= 1, 240)
        lost = chance.sample((1, 2, 3), 1 + seed % 3)
        for node in lost:
            before, saves = len(made.worlds()), made.saves()
            made.lose(node)
            wait_until(lambda before=before, saves=saves: len(made.worlds()) > before and made.saves() > saves, 240)
        before = len(made.worlds())
        made.start(lost[0])
        wait_until(lambda: len(made.worlds()) > before or (home / "final").exists(), 240)
        for agent in made.running.values():
            assert agent.wait(300) == 0, reported
    except AssertionError as error:
        error.add_note(f"{reported}: {made.log()[-20:]}\n{(home / 'output').read_text(errors='replace')[-4000:]}")
        raise
    finally:
        output = (home / "output").read_text(errors="replace")[-4000:]
        for agent in made.running.values():
            agent.kill()
            agent.wait()
        end_all(home)
    judge(made.log(), f"{reported}, lost {lost}\n{output}", None)
    assert min(made.worlds()) == 4 - len(lost), f"{reported}: {made.worlds()}"
    expected = elastic.fresh()
    for _ in range(STEPS):
        elastic.advance(expected)
    assert (home / "final").read_text() == elastic.digest(expected), f"{reported}: not as in an uninterrupted run"
    return [f"{len(lost)} of 4 nodes lost"], judge_waits((home / "waits").read_text().splitlines(), reported)
