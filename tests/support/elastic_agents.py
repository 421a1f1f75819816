"""torchrun with 1 to 4 agents, each a node with a spool of its own: nodes die and come while it trains."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

from support import elastic
from support.launched import NODE, ORDERS
from support.launchers import await_that, end_all, judge_waits
from support.ranks import environment

STEPS = 60


class Agents:
    """Agents of one elastic launch, by the number of their node. Node 0 hosts the rendezvous, and stays."""

    def __init__(self, home: Path) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.running: dict[int, subprocess.Popen] = {}
        (home / "tier").mkdir()

    def start(self, node: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job"]
        # Else the first that listens hosts it, because all are of one machine: under load that can be any of them.
        hosts = f"is_host={int(node == 0)}"
        command += [f"--rdzv-conf={hosts},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=15"]
        command += ["--local-addr=127.0.0.1", "--monitor-interval=0.2", "--max-restarts=20"]
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

    def said(self) -> list[list[str]]:
        log = self.home / "log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def worlds(self) -> list[int]:
        """The number of ranks of each launch of which all have resumed, in order."""
        counts: dict[str, set[str]] = {}
        found = []
        for what, rank, world, *words in self.said():
            if what == "resumed":
                ranks = counts.setdefault(words[1], set())
                ranks.add(rank)
                if len(ranks) == int(world):
                    found.append(int(world))
        return found

    def saves(self) -> int:
        return sum(what == "acked" and rank == "0" for what, rank, *_ in self.said())


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
        await_that(lambda: made.saves() >= 1, 240)
        lost = chance.sample((1, 2, 3), 1 + seed % 3)
        for node in lost:
            before, saves = len(made.worlds()), made.saves()
            made.lose(node)
            await_that(lambda before=before, saves=saves: len(made.worlds()) > before and made.saves() > saves, 240)
        before = len(made.worlds())
        made.start(lost[0])
        await_that(lambda: len(made.worlds()) > before or (home / "final").exists(), 240)
        for agent in made.running.values():
            assert agent.wait(300) == 0, reported
    except AssertionError as error:
        error.add_note(f"{reported}: {made.said()[-20:]}\n{(home / 'output').read_text(errors='replace')[-4000:]}")
        raise
    finally:
        output = (home / "output").read_text(errors="replace")[-4000:]
        for agent in made.running.values():
            agent.kill()
            agent.wait()
        end_all(home)
    judge(made.said(), f"{reported}, lost {lost}\n{output}")
    assert min(made.worlds()) == 4 - len(lost), f"{reported}: {made.worlds()}"
    expected = elastic.fresh()
    for _ in range(STEPS):
        elastic.advance(expected)
    assert (home / "final").read_text() == elastic.digest(expected), f"{reported}: not as in an uninterrupted run"
    return [f"{len(lost)} of 4 nodes lost"], judge_waits((home / "waits").read_text().splitlines(), reported)


def judge(said: list[list[str]], reported: str) -> None:
    """All ranks of a launch resume from one step, and nothing that all were told is durable is passed over."""
    acked: dict[tuple[str, int], set[str]] = {}
    worlds: dict[str, int] = {}
    resumed: dict[str, dict[str, int]] = {}
    whole = [("", 0)]
    for what, rank, *words in said:
        if what == "acked":
            point = words[1], int(words[0])
            acked.setdefault(point, set()).add(rank)
            if len(acked[point]) == worlds[words[1]]:
                whole.append(point)
        else:
            world, step, attempt = int(words[0]), int(words[1]), words[2]
            assert worlds.setdefault(attempt, world) == world, f"{reported}: one attempt of two launches: {attempt}"
            ranks = resumed.setdefault(attempt, {})
            assert rank not in ranks, f"{reported}: rank {rank} twice in {attempt}"
            ranks[rank] = step
            assert len(set(ranks.values())) == 1, f"{reported}: ranks do not go together: {ranks}"
            before = max(point for point in whole if point[0] < attempt)
            assert step >= before[1], f"{reported}: resumed from {step}, and {before} was durable on all ranks"
    assert list(resumed) == sorted(resumed), f"{reported}: {list(resumed)}"
