"""The example for torchft: one of two replica groups dies in its save, the other group continues to save, and after a
new launch of both the group with the older checkpoint recovers from the other one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.ranks import free_port, processes

from tierd.spool.spool import Spool

SCRIPT = """
import os, socket, sys, time
group, port, lighthouse, home, steps, dies_at = sys.argv[1:]
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port, "REPLICA_GROUP_ID": group, "TORCHFT_LIGHTHOUSE": lighthouse}
socket.gethostname = lambda: "127.0.0.1"
import torch
store = torch.distributed.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
import torchft, tierd
from examples import torchft_ddp

class Checkpointer(tierd.Checkpointer):
    def restore(self, state):
        restored = super().restore(state)
        print("restored", restored and restored.step, flush=True)
        ready = [f"{home}/ready-{steps}-{number}" for number in "01"]
        open(ready[int(group)], "w").close()
        while not all(map(os.path.exists, ready)):  # the first quorum waits for both, because both managers live
            time.sleep(0.05)
        return restored
    def save(self, step, state):
        save = super().save(step, state)
        if dies_at == "" or step < int(dies_at):
            save.wait()
            print("saved", step, flush=True)
            return save
        print("dies", flush=True)
        os._exit(0)

end = torchft.Manager.shutdown
def shutdown(self, *arguments, **options):
    print("weights", [value.tolist() for value in self._user_state_dicts["default"]()["model"].values()], flush=True)
    end(self, *arguments, **options)
torchft.Manager.shutdown, tierd.Checkpointer = shutdown, Checkpointer
torch.manual_seed(int(group))
torchft_ddp.train(f"{home}/spool-{group}", int(steps), 10)
"""


def launched(home: Path, steps: int, dies_at: str) -> list[str]:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=3000)
    try:
        address = re.sub(r"//.*:", "//127.0.0.1:", lighthouse.address())
        common = [address, str(home), str(steps)]
        dying = [[str(group), str(free_port()), *common, dies_at if group == 0 else ""] for group in (0, 1)]
        return processes(SCRIPT, dying, timeout=400)
    finally:
        lighthouse.shutdown()


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_replica_group_that_dies_in_its_save_recovers_from_the_newest_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    dead, survivor = launched(tmp_path, 45, "20")
    assert dead.splitlines() == ["restored None", "saved 10", "dies"]
    assert survivor.splitlines()[:3] == ["restored None", "saved 30", "saved 40"]
    steps = {
        group: {part.checkpoint.step for part in Spool(tmp_path / f"spool-{group}").parts(f"llama-{group}")}
        for group in (0, 1)
    }
    assert 10 in steps[0] and 30 not in steps[0] and steps[1] == {30, 40}

    recovered, other = launched(tmp_path, 60, "")
    assert recovered.startswith(("restored 10\n", "restored 20\n")) and other.startswith("restored 40\n")
    assert recovered.splitlines()[-1] == other.splitlines()[-1], "both groups have the same weights"
    assert sorted(line for line in (recovered + other).splitlines() if line.startswith("saved")) == [
        "saved 50",
        "saved 60",
    ]
