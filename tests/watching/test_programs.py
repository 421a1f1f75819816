"""The programs themselves write, where they are installed, and `tierd inspect` recognises what they wrote and finds it
sound.

Each runs in a process of its own with its own saving, unchanged. One flipped bit in the middle of a file that holds
digests, and a cut of every file with a structure, are then found.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.timed import timed_cli

from tierd.cli import run

NET = """
import sys, os
os.environ["KERAS_BACKEND"] = "torch"
import torch
out = sys.argv[1]
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 16
    def __getitem__(self, index): return {"x": torch.full((4,), float(index))}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 64)
    def forward(self, x): return {"loss": self.layer(x).square().mean()}
"""
# A program's package -> its script, and (where, program, steps) of what has to be found.
PROGRAMS = {
    "transformers": (
        """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
args = TrainingArguments(output_dir=out + "/trainer", max_steps=4, save_steps=2, per_device_train_batch_size=2,
    report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False)
Trainer(model=Net(), args=args, train_dataset=Rows()).train()
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=500, n_positions=32))
model.save_pretrained(out + "/model", max_shard_size="40KB")
""",
        [("trainer", "HF Trainer", [2, 4]), ("model", "HF model", [None])],
    ),
    "accelerate": (
        """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(out, automatic_checkpoint_naming=True))
net = Net()
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
for _ in range(2):
    net(torch.ones(2, 4))["loss"].backward()
    optimizer.step()
    accelerator.save_state()
""",
        [("checkpoints", "Accelerate", [0, 1])],
    ),
    "lightning": (
        """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch): return self.net(**batch)["loss"]
    def configure_optimizers(self): return torch.optim.Adam(self.parameters())
keep = ModelCheckpoint(out, every_n_train_steps=2, save_top_k=-1, save_last="link")
L.Trainer(accelerator="cpu", max_steps=4, callbacks=[keep], logger=False, enable_progress_bar=False).fit(
    Lit(), torch.utils.data.DataLoader(Rows(), batch_size=2))
L.Fabric(accelerator="cpu").save(out + "/fabric_step9.ckpt", {"net": Net()})
""",
        [("", "Lightning, Fabric", [2, 4, 9])],
    ),
    "keras": (
        """
import keras
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.save(out + "/model-3.keras")
model.save_weights(out + "/model-3.weights.h5")
""",
        [("", "Keras", [3])],
    ),
    "torch_checkpointing": (
        """
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
config = CheckpointManager.Config.with_async_save()
config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
manager = config.build()
manager.save(out + "/step_5", {"model": Net().state_dict(), "step": 5}).result(100)
manager.close()
""",
        [("", "torch_checkpointing", [5])],
    ),
    "torch": (
        """
import torch.distributed.checkpoint as dcp
state = {"model": Net().state_dict(), "step": 7}
dcp.save(state, checkpoint_id=out + "/dcp/7", no_dist=True)
dcp.save(state, storage_writer=dcp.FileSystemWriter(out + "/titan/step-7", thread_count=2), no_dist=True)
torch.save(state, out + "/dcp/model_step7.pt")
""",
        [("titan", "torchtitan", [7]), ("dcp/7", "DCP", [7]), ("dcp/model_step7.pt", "torch.save, safetensors", [7])],
    ),
}
NO_DIGEST = (".safetensors", ".json", ".metadata", ".h5", ".pkl", ".md", ".txt")


Ask = Callable[[Path], tuple[int, list[dict]]]


def written(package: str, directory: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", NET + PROGRAMS[package][0], str(directory)]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.loaders
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", PROGRAMS)
def test_checkpoint_that_a_program_wrote_is_sound(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    timed_cli(monkeypatch, recheck_delay_s=0.0)
    written(package, tmp_path)

    def ask(path: Path) -> tuple[int, list[dict]]:
        code = run(["inspect", "--json", str(path)])
        return code, json.loads(capsys.readouterr().out)["units"]

    for where, program, steps in PROGRAMS[package][1]:
        place = tmp_path / where
        code, found = ask(place)
        assert (code, {one["status"] for one in found}) == (0, {"sound"}), found
        assert {one["program"] for one in found} == {program} and sorted(one["step"] for one in found) == steps
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.is_file() and not path.is_symlink() and path.suffix not in (".txt", ".md"):
                damage(path, place, ask)
        assert ask(place)[0] == 0


def damage(path: Path, place: Path, ask: Ask) -> None:
    """Cut a file, and flip bits in it where its format has digests, and make it whole again."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert ask(place)[0] in (4, 5), path
    for at in () if path.name.endswith(NO_DIGEST) else (len(whole) // 2, len(whole) // 3):
        changed = bytearray(whole)
        changed[at] ^= 16
        path.write_bytes(changed)
        assert ask(place)[0] in (4, 5) or whole[at] == ord("Z"), (path, at)  # torch pads with Z
    path.write_bytes(whole)
