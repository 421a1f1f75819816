"""Layouts beside those of the table, written by the packages themselves: watched, lost, put back, and loaded again.

Each program saves three times with its own saving, unchanged, and loads with its own loader after its directory was
lost. `prepare` moves nothing of it while it is whole, whether a tier has it or not.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.warm import WarmInterpreter, heavy_imports
from support.watched_run import RUN, Home, files, flush

from tierd.cli import run


@dataclass(frozen=True)
class Program:
    """A program that knows nothing of tierd.

    Attributes:
        packages: what it imports.
        saves: its code that saves to `out` at three steps.
        loads: its code that finds its newest checkpoint in `out`, and loads it.
        newest: patterns of the files that come back: those of the newest save, and all that have no step.
        links: links that come back.
    """

    packages: tuple[str, ...]
    saves: str
    loads: str
    newest: tuple[str, ...]
    links: tuple[str, ...] = ()


_HEAD = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import torch
out = sys.argv[1]
torch.manual_seed(0)
def latest(prefix="checkpoint-"):  # as the training scripts of diffusers
    return max((name for name in os.listdir(out) if name.startswith(prefix)), key=lambda one: int(one[len(prefix):]))
"""
_ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(4, 64)
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
"""
_STEP = """
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
_PEFT = """
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel
base = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=100, n_positions=32))
"""
_LIGHTNING = """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 64)
    def training_step(self, batch): return self.net(batch).square().mean()
    def configure_optimizers(self): return torch.optim.Adam(self.parameters())
def fit(steps):
    keep = ModelCheckpoint(out, filename="{step}", every_n_train_steps=10, save_top_k=-1, save_last=LAST)
    trainer = L.Trainer(accelerator="cpu", max_steps=steps, max_epochs=-1, callbacks=[keep], logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    begun = []
    class Begin(L.Callback):
        def on_train_start(self, trainer, module): begun.append(trainer.global_step)
    trainer.callbacks.append(Begin())
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.ones(80, 4), batch_size=2), ckpt_path="last")
    return begun[0]
"""
_KERAS = """
import keras
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(1)])
model.compile("adam", "mse")
"""
_DCP = """
import torch.distributed.checkpoint as dcp
net = torch.nn.Linear(4, 64)
"""
PROGRAMS = {
    "save_state with a scaler, one checkpoint at a time": Program(
        ("accelerate",),
        _ACCELERATE
        + "import shutil\nfor step in (10, 20, 30):"
        + _STEP
        + """
    accelerator.save_state(f'{out}/checkpoint-{step}')
    torch.save(torch.amp.GradScaler('cpu').state_dict(), f'{out}/checkpoint-{step}/scaler.pt')
""",
        _ACCELERATE + "accelerator.load_state(os.path.join(out, latest()))",
        ("checkpoint-30/**/*",),
    ),
    "a LoRA loop with save_pretrained and optimizer.pt": Program(
        ("peft", "transformers"),
        _PEFT
        + """
model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"]))
optimizer = torch.optim.Adam(model.parameters())
for step in (10, 20, 30):
    model.save_pretrained(f"{out}/checkpoint-{step}")
    torch.save(optimizer.state_dict(), f"{out}/checkpoint-{step}/optimizer.pt")
    torch.save(torch.amp.GradScaler("cpu").state_dict(), f"{out}/checkpoint-{step}/scaler.pt")
""",
        _PEFT + "PeftModel.from_pretrained(base, os.path.join(out, latest()))",
        ("checkpoint-30/**/*",),
    ),
    "a model that huggingface_hub downloaded": Program(
        ("transformers", "huggingface_hub"),
        """
from huggingface_hub._local_folder import write_download_metadata
from pathlib import Path
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=100, n_positions=32))
for step in (10, 20, 30):
    model.save_pretrained(f"{out}/checkpoint-{step}")
    for name in os.listdir(f"{out}/checkpoint-{step}"):
        write_download_metadata(Path(f"{out}/checkpoint-{step}"), name, "0" * 40, "etag")
""",
        "from transformers import GPT2LMHeadModel\nGPT2LMHeadModel.from_pretrained(os.path.join(out, latest()))",
        ("checkpoint-30/**/*", "checkpoint-30/.cache/**/*"),
    ),
    "weights and the state of sd-scripts": Program(
        ("accelerate",),
        _ACCELERATE
        + "from safetensors.torch import save_file\nfor step in (10, 20, 30):"
        + _STEP
        + """
    save_file(net.state_dict(), f"{out}/lora-{step:06}.safetensors")
    accelerator.save_state(f"{out}/lora-{step:06}-state")
""",
        _ACCELERATE
        + "accelerator.load_state(f'{out}/lora-000030-state')\nassert os.path.exists(f'{out}/lora-000030.safetensors')",
        ("lora-000030*", "lora-000030-state/**/*"),
    ),
    "Lightning with a copy as last.ckpt": Program(
        ("lightning",),
        "LAST = True" + _LIGHTNING + "fit(30)",
        "LAST = True" + _LIGHTNING + "begun = fit(40)\nassert begun == 30, begun",
        ("step=30.ckpt", "last.ckpt"),
    ),
    "Lightning with a link as last.ckpt": Program(
        ("lightning",),
        "LAST = 'link'" + _LIGHTNING + "fit(30)",
        "LAST = 'link'" + _LIGHTNING + "begun = fit(40)\nassert begun == 30, begun",
        ("step=30.ckpt",),
        ("last.ckpt",),
    ),
    "Keras with a loss in the name": Program(
        ("keras",),
        _KERAS
        + """
import numpy
keep = keras.callbacks.ModelCheckpoint(out + "/ckpt-{epoch:02d}-{loss:.4f}.weights.h5", save_weights_only=True)
model.fit(numpy.random.rand(32, 4), numpy.random.rand(32, 1), epochs=3, verbose=0, callbacks=[keep])
""",
        _KERAS
        + "[name] = [name for name in os.listdir(out) if name.endswith('.h5')]\nmodel.load_weights(f'{out}/{name}')",
        ("ckpt-03-*.weights.h5",),
    ),
    "torch.save, as the CheckpointSaver of timm": Program(  # timm itself imports torchvision
        ("torch",),
        """
for epoch in (1, 2, 3):
    torch.save({"epoch": epoch}, f"{out}/tmp.pth.tar")
    os.replace(f"{out}/tmp.pth.tar", f"{out}/last.pth.tar")
    os.link(f"{out}/last.pth.tar", f"{out}/checkpoint-{epoch}.pth.tar")
    if os.path.exists(f"{out}/model_best.pth.tar"): os.unlink(f"{out}/model_best.pth.tar")
    os.link(f"{out}/last.pth.tar", f"{out}/model_best.pth.tar")
""",
        """
for name in ("checkpoint-3", "last", "model_best"):
    assert torch.load(f"{out}/{name}.pth.tar")["epoch"] == 3
""",
        ("checkpoint-3.pth.tar", "last.pth.tar", "model_best.pth.tar"),
    ),
    "DCP in directories of steps": Program(
        ("torch",),
        _DCP
        + """
for step in (10, 20, 30):
    dcp.save({"net": net.state_dict()}, checkpoint_id=f"{out}/step_{step}", no_dist=True)
""",
        _DCP + "dcp.load({'net': net.state_dict()}, checkpoint_id=os.path.join(out, latest('step_')), no_dist=True)",
        ("step_30/**/*",),
    ),
    "a pointer and a link": Program(
        ("torch",),
        """
for step in (10, 20, 30):
    os.makedirs(f"{out}/checkpoints/{step:06}/training_state")
    torch.save({"w": torch.ones(9) * step}, f"{out}/checkpoints/{step:06}/model.pt")
    torch.save({"lr": step}, f"{out}/checkpoints/{step:06}/training_state/optimizer.pt")
    if os.path.islink(f"{out}/checkpoints/last"): os.unlink(f"{out}/checkpoints/last")
    os.symlink(f"{step:06}", f"{out}/checkpoints/last")
    open(f"{out}/checkpoints/last_checkpoint", "w").write(f"{step:06}")
""",
        """
assert torch.load(f"{out}/checkpoints/last/model.pt")["w"][0] == 30
assert os.path.isdir(os.path.join(out, "checkpoints", open(f"{out}/checkpoints/last_checkpoint").read()))
""",
        ("checkpoints/000030/**/*", "checkpoints/last_checkpoint"),
        ("checkpoints/last",),
    ),
}


def play(warm: WarmInterpreter, code: str, out: Path, output: Path) -> None:
    """Run code of a program in a process of its own."""
    assert warm.wait(warm.start(_HEAD + code, [str(out)], output), 400) == 0, Path(f"{output}.err").read_text()[-3000:]


@pytest.mark.loaders
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_loads_its_newest_checkpoint_after_its_directory_was_lost(
    name: str, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, root, output = PROGRAMS[name], home.root, tmp_path / "output"
    if absent := [package for package in program.packages if importlib.util.find_spec(package) is None]:
        pytest.skip(f"{absent[0]} is not installed")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    environment["KERAS_BACKEND"] = "torch"
    with WarmInterpreter(heavy_imports(_HEAD + program.saves), environment) as warm:
        play(warm, program.saves, root, output)
        puts_back_what_was_lost(program, home, capsys)
        play(warm, program.loads, root, output)


def puts_back_what_was_lost(program: Program, home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    root = home.root
    right = files(root)
    flush(home.spool, home.tier)
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} <= {"sound", "unknown"} and files(root) == right
    home.taken()
    assert {unit["verdict"] for unit in home.prepare(capsys).values()} <= {"verified"} and files(root) == right
    newest = {str(path.relative_to(root)) for pattern in program.newest for path in root.glob(pattern)}
    links = {link: (root / link).readlink() for link in program.links}
    for command in (["prepare", str(root), "--to", str(home.tier)], ["restore", str(home.tier), "--into", str(root)]):
        shutil.rmtree(root)
        assert run([*command, "--run", RUN]) == 0
        assert files(root) == {path: right[path] for path in newest & right.keys()}
        assert {link: (root / link).readlink() for link in links} == links
