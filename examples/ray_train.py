"""Ray Train over tierd: workers save and resume through a `Checkpointer`, and Ray gets a text for each checkpoint.

    python examples/ray_train.py /nvme/tierd /shared/ray

Ray learns of a checkpoint only when it is durable in every worker's spool, and without waiting in the training loop.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import tierd


def report(ckpt: tierd.Checkpointer, save: tierd.Save, metrics: dict[str, Any]) -> None:
    """Report a checkpoint to Ray Train once it is durable. A save that fails ends the run, as Ray's own upload does."""
    storage = ray.train.get_context().get_storage()
    directory = Path(tempfile.mkdtemp())
    (directory / "tierd.json").write_text(json.dumps({"run": ckpt.run, "step": save.step, "attempt": ckpt.attempt}))

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:  # Ray calls it in a thread of its own
        save.wait()
        return storage.persist_current_checkpoint(checkpoint, name)

    mode = CheckpointUploadMode.ASYNC
    checkpoint = Checkpoint.from_directory(directory)
    ray.train.report(metrics, checkpoint, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload)


def train(config: dict[str, Any]) -> None:
    """The function of each worker."""
    model = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    with tierd.Checkpointer(config["spool"], run="ray", to=config.get("to")) as ckpt:
        ckpt.restore(state)
        for step in range(state["step"] + 1, config["steps"] + 1):
            optimizer.zero_grad()
            loss = model(torch.full((4, 8), float(step)).sin()).square().mean()
            loss.backward()
            optimizer.step()
            state["step"] = step
            if step % config["every"] == 0:
                report(ckpt, ckpt.save(step, state), {"step": step, "loss": loss.item()})


if __name__ == "__main__":
    spool, shared = sys.argv[1:]
    result = TorchTrainer(
        train,
        train_loop_config={"spool": spool, "to": [], "steps": 100, "every": 10},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=shared, name="ray"),
    ).fit()
    assert result.checkpoint is not None
    print((Path(result.checkpoint.path) / "tierd.json").read_text())
