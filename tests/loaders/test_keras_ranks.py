"""Two ranks of a loop that wraps a Keras model with `DistributedDataParallel` store one copy, and resume exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ranks import launched_twice

from tierd.spool.spool import Spool

SCRIPT = """
import os, sys
rank, port, home, again = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4] == "again"
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
    "KERAS_BACKEND": "torch", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
import torch
import keras
import tierd

torch.distributed.init_process_group("gloo")
keras.utils.set_random_seed(7 + 50 * again)
net = keras.Sequential([keras.layers.Input((40,)), keras.layers.Dense(300, "relu"), keras.layers.Dense(50)])
model = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer, "step": 0}
with tierd.Checkpointer(home, "run", to=[]) as ckpt:
    assert (ckpt.restore(state) is not None) == again
    for step in range(state["step"], 6):
        optimizer.zero_grad()
        loss = model(torch.full((2, 40), float(step + 1 + int(rank)))).square().mean()
        loss.backward()
        optimizer.step()
        state["step"] = step + 1
        if step >= 3:
            print(step, loss.item(), flush=True)
        if step == 2:
            ckpt.save(3, state).wait()
torch.distributed.destroy_process_group()
"""


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_two_ranks_of_a_wrapped_keras_model_store_one_copy_and_resume_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    pytest.importorskip("keras")
    outputs = launched_twice(SCRIPT, tmp_path)
    assert outputs[0] == outputs[1] and all(one.count("\n") == 3 for one in outputs[0])
    spool = Spool(tmp_path)
    stored = sum(file.size for part in spool.parts("run") for file in spool.manifest(part).files)
    state_bytes = 3 * 4 * (40 * 300 + 300 + 300 * 50 + 50)
    assert state_bytes < stored < 1.25 * state_bytes
