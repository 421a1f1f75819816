"""The programs of support/script.py, and what stands for each program that tierd knows in the tests; the page
docs/evidence/programs.md shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from support.program_ranks import OF_RANKS
from support.script import Script

SCRIPTS = {
    "HF Trainer": Script(
        "transformers",
        """
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
class Model(Net):
    def forward(self, x):
        return {"loss": super().forward(x)}
class Log(TrainerCallback):
    def on_log(self, args, state, control, logs, **more):
        if "loss" in logs:
            tell(state.global_step, logs["loss"])
args = TrainingArguments(out, max_steps=STEPS, save_steps=EVERY, logging_steps=1, per_device_train_batch_size=2,
    report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False)
trainer = Trainer(model=Model(), args=args, train_dataset=Rows(), callbacks=[Log()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(out) is not None)
""",
        "checkpoint-6/*",
        "checkpoint-4",
    ),
    "Accelerate": Script(
        "accelerate",
        """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
own = ProjectConfiguration(out, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=own)
net = Net()
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
folder = os.path.join(out, "checkpoints")
if os.path.isdir(folder) and os.listdir(folder):
    own.iteration = 1 + max(int(name.split("_")[1]) for name in os.listdir(folder))
    accelerator.load_state()
    own.iteration = 1 + max(int(name.split("_")[1]) for name in os.listdir(folder))
train(net, optimizer, EVERY * own.iteration, lambda step: accelerator.save_state())
""",
        "checkpoints/checkpoint_2/*",
        "checkpoints/checkpoint_1",
    ),
    "Lightning, Fabric": Script(
        "lightning",
        """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch):  # its loss is told here, because a callback saves before any later hook
        loss = self.net(batch["x"])
        tell(self.trainer.global_step + 1, loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
keep = ModelCheckpoint(out, every_n_train_steps=EVERY, save_top_k=-1, save_last="link")
L.Trainer(accelerator="cpu", max_steps=STEPS, callbacks=[keep], logger=False, enable_progress_bar=False,
    enable_model_summary=False).fit(Lit(), StatefulDataLoader(Rows(), batch_size=2), ckpt_path="last")
""",
        "*step=6.ckpt*",
        "*step=4.ckpt",
        renamed=True,
        pointer="last.ckpt",
    ),
    "torch_checkpointing": Script(
        "torch_checkpointing",
        """
from torch_checkpointing import CheckpointManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
config = CheckpointManager.Config.with_sync_save()
config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
manager = config.build()
net = Net()
optimizer = torch.optim.Adam(net.parameters())
def save(step):
    manager.save(f"{out}/step_{step}", {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
done = max((int(name.split("_")[1]) for name in os.listdir(out) if name.startswith("step_")), default=0)
if done:
    found = manager.load(f"{out}/step_{done}", {"model": None, "optimizer": None})
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
train(net, optimizer, done, save)
manager.close()
""",
        "*step_6*",
        "step_4",
        renamed=True,
    ),
    "Orbax": Script(
        "orbax.checkpoint",
        """
import jax, jax.numpy as jnp
import orbax.checkpoint as ocp
options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
manager = ocp.CheckpointManager(out, options=options)
state = {"weight": jnp.linspace(0.0, 1.0, WIDTH), "speed": jnp.zeros(WIDTH)}
done = manager.latest_step() or 0
if done:
    state = manager.restore(done, args=ocp.args.StandardRestore(state))
for step in range(done, STEPS):
    loss, slope = jax.value_and_grad(lambda weight: jnp.sum((weight - jnp.sin(step + 1.0)) ** 2))(state["weight"])
    speed = 0.9 * state["speed"] + slope
    state = {"weight": state["weight"] - 0.01 * speed, "speed": speed}
    tell(step + 1, loss)
    if (step + 1) % EVERY == 0:
        manager.save(step + 1, args=ocp.args.StandardSave(state))
manager.close()
""",
        "6*",
        "4",
        renamed=True,
    ),
    "Keras": Script(
        "keras",
        """
import keras
keras.utils.set_random_seed(7)
class Log(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        tell(epoch + 1, logs["loss"])
x = torch.stack([row(index) for index in range(16)]).numpy()
files = sorted((name for name in os.listdir(out) if name.endswith(".keras")), key=lambda one: int(one[6:-6]))
if files:
    model, done = keras.models.load_model(f"{out}/{files[-1]}"), int(files[-1][6:-6])
else:
    model, done = keras.Sequential([keras.Input((4,)), keras.layers.Dense(WIDTH), keras.layers.Dense(1)]), 0
    model.compile(keras.optimizers.Adam(1e-5), "mse")
class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs):
        if (epoch + 1) % EVERY == 0:
            self.model.save(f"{out}/model-{epoch + 1}.keras")
model.fit(x, x[:, :1], 8, epochs=STEPS, initial_epoch=done, shuffle=False, verbose=0, callbacks=[Log(), Save()])
""",
        "model-6.keras",
        "model-4.keras",
    ),
    "torch.save, safetensors": Script(
        "torch",
        """
net = Net()
optimizer = torch.optim.Adam(net.parameters())
def save(step):
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{out}/model_step{step}.pt")
done = max((int(name[10:-3]) for name in os.listdir(out) if name.endswith(".pt")), default=0)
if done:
    state = torch.load(f"{out}/model_step{done}.pt", weights_only=True)
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
train(net, optimizer, done, save)
""",
        "model_step6.pt",
        "model_step4.pt",
    ),
    **OF_RANKS,
}


@dataclass(frozen=True)
class Row:
    """What stands for a program in the tests.

    Attributes:
        name: of the program, as `WRITERS` of support/layouts.py and `SCRIPTS` have it.
        writers: the fixtures that write its layout, by name.
        by: who writes the bytes of the fixtures, if the program is not installed.
    """

    name: str
    writers: tuple[str, ...]
    by: str = ""


_DCP = "torch's DCP writer, in the layout of its source"
ROWS = (
    Row("HF Trainer", ("trainer", "trainer_on_deepspeed")),
    Row("Accelerate", ("accelerate",)),
    Row("Lightning, Fabric", ("lightning",)),
    Row("Lightning, Fabric, sharded", ("lightning_sharded",)),
    Row("DCP", ("plain_dcp",)),
    Row("torchtitan", ("torchtitan",), "its `CheckpointManager`, without its trainer"),
    Row("torch_checkpointing", ("torch_checkpointing",)),
    Row("DeepSpeed", ("deepspeed",)),
    Row(
        "Megatron-LM", ("megatron", "megatron_by_ranks"), "its `dist_checkpointing`; `torch.save` for the older layout"
    ),
    Row("NeMo", ("nemo",), _DCP),
    Row("Orbax", ("orbax",)),
    Row("Keras", ()),
    Row("Composer", ("composer",), "`torch.save`, in the layout of its source"),
    Row("TensorFlow", ("tensorflow",), "bundles after the format in its source"),
    Row("torch.save, safetensors", ("torch_save", "safetensors")),
)


def table() -> str:
    """The rows, as the page has them."""
    lines = [
        "| program | written in the tests by | killed in its save, damaged, prepared, resumed |",
        "| --- | --- | --- |",
    ]
    for row in ROWS:
        script = SCRIPTS.get(row.name)
        writer = "; ".join(one for one in (f"`{script.package}` itself" if script else "", row.by) if one)
        lines.append(f"| {row.name} | {writer} | {'losses as without it' if script else 'not run'} |")
    return "\n".join(lines) + "\n"
