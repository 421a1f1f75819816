"""Ranks of Hugging Face's Trainer save one copy of the model through the callback; each resumes its own generators."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.ranks import free_port, processes

from tierd.spool.spool import Spool

SCRIPT = """
import os, sys
rank, port, home, again, world, width, form = *sys.argv[1:4], sys.argv[4] == "again", *sys.argv[5:8]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
import torch
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
import tierd
from tierd.adapters.transformers import TierdCallback

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return {"x": torch.full((4,), index / 48)}
class Net(PreTrainedModel if form == "pretrained" else torch.nn.Module):
    def __init__(self):
        super().__init__(*([PreTrainedConfig()] if form == "pretrained" else []))
        wide = int(width)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, wide), torch.nn.Dropout(0.5), torch.nn.Linear(wide, 1))
    def forward(self, x):
        loss = self.net(x).square().mean()
        self.seen = loss.item()
        return {"loss": loss}
class Tell(TrainerCallback):
    def on_step_end(self, args, state, control, **parts):
        if state.global_step > 4:
            print(state.global_step, net.seen, flush=True)

torch.manual_seed(1)
net = Net()
args = TrainingArguments(home + "/out", max_steps=6, per_device_train_batch_size=2, save_strategy="no", report_to=[],
    use_cpu=True, ddp_backend="gloo", disable_tqdm=True, logging_strategy="no", remove_unused_columns=False, seed=3)
assert args.world_size == int(world)
with tierd.Checkpointer(home + "/spool", "run", to=[]) as ckpt:
    saving = TierdCallback(ckpt, every_steps=4)
    trainer = Trainer(model=net, args=args, train_dataset=Rows(), callbacks=[Tell(), saving])
    path = saving.resume(trainer)
    assert (path is not None) == again
    trainer.train(resume_from_checkpoint=path)
torch.distributed.destroy_process_group()
"""


@pytest.mark.loaders
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["module", "pretrained"])
def test_two_ranks_of_trainer_resume_as_if_nothing_had_happened(tmp_path: Path, form: str) -> None:
    pytest.importorskip("transformers")
    outputs = []
    for word in ("first", "again"):
        here = str(free_port())
        arguments = [[rank, here, str(tmp_path), word, "2", "32", form] for rank in ("0", "1")]
        said = processes(SCRIPT, arguments, timeout=400)
        outputs.append([[line for line in one.splitlines() if line[0].isdigit()] for one in said])
        spool = Spool(tmp_path / "spool")
        parts = list(spool.parts("run"))
        assert {(part.rank, part.world) for part in parts} == {(0, 2), (1, 2)}
        for part in parts:
            if part.checkpoint.step == 6:  # the end of training, which a killed launch does not save
                shutil.rmtree(spool.path(part).parent, ignore_errors=True)
    assert outputs[0] == outputs[1] and all(len(one) == 2 for one in outputs[0])
    assert outputs[0][0] != outputs[0][1], "each rank has its own samples and generators"


@pytest.mark.loaders
@pytest.mark.timeout(900)
def test_four_ranks_of_trainer_store_one_copy_that_two_resume_from(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for word, world in (("first", 4), ("again", 2)):
        launch = [str(free_port()), str(tmp_path), word, str(world), "100000", "pretrained"]
        arguments = [[str(rank), *launch] for rank in range(world)]
        processes(SCRIPT, arguments, timeout=400)
        sizes = [path.stat().st_size for path in tmp_path.glob(f"spool/run/*/*-of-{world:05}/tensors.safetensors")]
        steps = {part.checkpoint for part in Spool(tmp_path / "spool").parts("run") if part.world == world}
        whole = 3 * 4 * (4 + 1 + 1) * 100000  # the parameters and AdamW's two moments
        assert len(sizes) == world * len(steps) and sum(sizes) <= 1.1 * whole * len(steps)
        for part in Spool(tmp_path / "spool").parts("run"):
            if part.checkpoint.step == 6:
                shutil.rmtree(Spool(tmp_path / "spool").path(part).parent, ignore_errors=True)
