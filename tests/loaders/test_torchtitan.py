"""torchtitan's parts train under tierd's checkpoint manager: two ranks resume exactly, and one loads what two saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import free_port, processes

from tierd.spool.spool import Spool

SCRIPT = """
import os, sys
rank, world, port, home, launch = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from tierd.adapters.torchtitan import TierdCheckpointManager

torch.distributed.init_process_group("gloo")
torch.manual_seed(len(launch))

class Rows(torch.utils.data.IterableDataset):
    drawn = 0
    def __iter__(self):
        while True:
            self.drawn += 1
            yield torch.full((8,), float(self.drawn + 100 * int(rank))).sin()
    def state_dict(self):
        return {"drawn": self.drawn}
    def load_state_dict(self, state):
        self.drawn = state["drawn"]

class Progress:
    step = 0
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]

net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
fully_shard(net, mesh=init_device_mesh("cpu", (int(world),), mesh_dim_names=("fsdp",)))
optimizers = default_adamw(lr=0.01)
optimizers.implementation = "for-loop"
optimizers = optimizers.build(model_parts=[net])
schedules = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=8)
loader = ParallelAwareDataloader(Rows(), int(rank), int(world), batch_size=2)
progress = Progress()
options = {"exclude_from_loading": ["dataloader"]} if world == "1" else {}
manager = TierdCheckpointManager.Config(
    enable=True, interval=3, spool=home + "/spool", run="titan", to=[], **options
).build(dataloader=loader, model_parts=[net], optimizers=optimizers, lr_schedulers=schedules,
    states={"train_state": progress}, sd_adapter=None, base_folder=home)
assert manager.load() == (launch != "first")
batches = iter(loader)
while progress.step < {"first": 5, "again": 8, "resharded": 0}[launch]:
    progress.step += 1
    optimizers.zero_grad()
    loss = net(next(batches)).square().mean()
    loss.backward()
    manager.maybe_wait_for_staging()
    optimizers.step()
    schedules.step()
    if progress.step in (4, 5):
        print(progress.step, loss.item(), flush=True)
    manager.save(progress.step, last_step=progress.step == 8)
if launch != "first":
    whole = [parameter.full_tensor().sum().item() for parameter in net.parameters()]
    moments = optimizers.state_dict()["state.0.weight.exp_avg"].full_tensor().sum().item()
    print(progress.step, schedules.state_dict()["last_epoch"], whole, moments, flush=True)
manager.close()
torch.distributed.destroy_process_group()
"""


def launched(world: int, home: Path, launch: str) -> list[str]:
    port = str(free_port())
    return processes(SCRIPT, [[str(rank), str(world), port, str(home), launch] for rank in range(world)], timeout=400)


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_ranks_of_torchtitan_resume_exactly_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    first, again = launched(2, tmp_path, "first"), launched(2, tmp_path, "again")
    assert [[line for line in output.splitlines() if line[0] in "45"] for output in again] == [
        output.splitlines() for output in first
    ]
    assert first[0] != first[1], "each rank has its own samples"
    assert {part.checkpoint.step for part in Spool(tmp_path / "spool").parts("titan")} == {3, 6, 8}
    (resharded,) = launched(1, tmp_path, "resharded")
    assert resharded.splitlines() == again[0].splitlines()[-1:]
