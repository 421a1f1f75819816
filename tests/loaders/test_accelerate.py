"""Two ranks of Accelerate share one checkpoint of `save_state`, or store one copy by `Checkpointer.save`; each resumes
with its own generators.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import launched_twice

from tierd.spool.spool import Spool

SCRIPT = """
import os, sys
rank, port, home, again = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "again"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
import tierd
from tierd.adapters.accelerate import TierdStates
from tierd.core.errors import ConfigError, SaveFailed

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
torch.manual_seed(int(rank) + 50 * again)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))

def train(first, end):
    for step in range(first, end):
        optimizer.zero_grad()
        loss = net(torch.full((2, 4), float(step + 1))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        if step >= 3:
            print(step, loss.item(), flush=True)

with tierd.Checkpointer(home, "run", rank=0, world_size=1, to=[]) as ckpt:
    states = TierdStates(accelerator, ckpt)
    found = states.load()
    if again:
        assert (found.step, found.metrics) == (3, {"loss": 1.5})
    else:
        assert found is None
        train(0, 2)
        whole = accelerator.save_state
        def fails(path):
            whole(path)
            if rank == "1":
                raise OSError("the disk is full")
        accelerator.save_state = fails
        try:
            states.save(2)
        except SaveFailed as error:
            assert rank == "0" and "rank 1: OSError: the disk is full" in str(error), error
        except OSError:
            assert rank == "1"
        else:
            raise AssertionError("it was saved")
        accelerator.save_state = whole
        train(2, 3)
        states.save(3, metrics={"loss": 1.5})
    train(3, 6)
    accelerator.project_configuration = ProjectConfiguration(home, automatic_checkpoint_naming=True)
    try:
        TierdStates(accelerator, ckpt)
    except ConfigError as error:
        assert "automatic_checkpoint_naming" in str(error)
    else:
        raise AssertionError("it would write elsewhere")
"""

ONE_COPY = """
import os, sys
rank, port, home, again = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "again"
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
import torch
from accelerate import Accelerator
import tierd

accelerator = Accelerator(cpu=True)
torch.manual_seed(int(rank) + 50 * again)
net = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Dropout(0.5), torch.nn.Linear(300, 50))
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2))
alike = ("model", "optimizer", "scheduler") if accelerator.distributed_type in ("MULTI_GPU", "MULTI_CPU") else ()
assert alike
state = {"model": accelerator.unwrap_model(model), "optimizer": optimizer, "scheduler": scheduler,
    "rng": tierd.RngState(), "step": 0}
with tierd.Checkpointer(home, "run", to=[], replicated=alike) as ckpt:
    restored = ckpt.restore(state)
    assert (restored is not None) == again
    for step in range(state["step"], 6):
        optimizer.zero_grad()
        loss = model(torch.full((2, 40), float(step + 1))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        state["step"] = step + 1
        if step >= 3:
            print(step, loss.item(), flush=True)
        if step == 2:
            ckpt.save(3, state).wait()
"""


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_two_ranks_share_a_stage_and_resume_from_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    outputs = launched_twice(SCRIPT, tmp_path)
    assert outputs[0] == outputs[1] and all(one.count("\n") == 3 for one in outputs[0])
    assert outputs[0][0] != outputs[0][1], "each rank has its own generators"
    (part,) = Spool(tmp_path).parts("run")
    names = {path.name for path in Spool(tmp_path).path(part).iterdir()}
    assert {"model.safetensors", "random_states_0.pkl", "random_states_1.pkl"} <= names


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_two_ranks_store_one_copy_of_declared_entries_and_resume_exactly(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    outputs = launched_twice(ONE_COPY, tmp_path)
    assert outputs[0] == outputs[1] and all(one.count("\n") == 3 for one in outputs[0])
    spool = Spool(tmp_path)
    stored = sum(file.size for part in spool.parts("run") for file in spool.manifest(part).files)
    state_bytes = 3 * 4 * (40 * 300 + 300 + 300 * 50 + 50)
    assert state_bytes < stored < 1.25 * state_bytes
