"""Programs that train and resume by themselves, without a line of tierd: `script OUT LOG` trains up to step 8, saves
every second step below OUT, resumes from what is there, and writes a line for each step's loss to LOG.

`ROWS` says of each program that tierd knows what stands for it in the tests; docs/howto/watch.md shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

_BEGIN = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
import torch
out, log = sys.argv[1], open(sys.argv[2], "a", buffering=1)
torch.set_num_threads(1)
torch.manual_seed(7)
WIDTH, STEPS, EVERY = 150_000, 8, 2
def tell(step, loss):
    print(step, repr(float(loss)), file=log)
def row(index):
    return torch.sin(torch.arange(4.0) * (index + 1))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, WIDTH), torch.nn.Linear(WIDTH, 1)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean()
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return {"x": row(index)}
def batch(step):
    return torch.stack([row(2 * step), row(2 * step + 1)])
def train(net, optimizer, first, save):
    for step in range(first, STEPS):
        loss = net(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tell(step + 1, loss)
        if (step + 1) % EVERY == 0:
            save(step + 1)
"""


@dataclass(frozen=True)
class Script:
    """A training script.

    Attributes:
        package: what it imports.
        text: what follows `_BEGIN`.
        third: a glob below OUT, which matches as soon as the third save has begun to write.
        newest: a glob of the second save, whose largest file gets a flipped bit.
        renamed: whether a save appears whole by a rename, so that a kill leaves nothing torn in its place.
    """

    package: str
    text: str
    third: str
    newest: str
    renamed: bool = False

    @property
    def whole(self) -> str:
        return _BEGIN + self.text


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
    ),
    "DCP": Script(
        "torch",
        """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
net = Net()
optimizer = torch.optim.Adam(net.parameters())
def save(step):
    model, of_optimizer = get_state_dict(net, optimizer)
    dcp.save({"model": model, "optimizer": of_optimizer}, checkpoint_id=f"{out}/{step}", no_dist=True)
done = max((int(name) for name in os.listdir(out) if name.isdigit()), default=0)
if done:
    model, of_optimizer = get_state_dict(net, optimizer)
    state = {"model": model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=f"{out}/{done}", no_dist=True)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
train(net, optimizer, done, save)
""",
        "6/*",
        "4",
    ),
    "torchtitan": Script(
        "torchtitan",
        """
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torchtitan.components.checkpoint import CheckpointManager
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
net, flat = Net(), StateDictOptions(flatten_optimizer_state_dict=True)
optimizer = torch.optim.Adam(net.parameters())
class Optimizers:
    def state_dict(self):
        return get_optimizer_state_dict(net, optimizer, options=flat)
    def load_state_dict(self, state):
        set_optimizer_state_dict(net, optimizer, state, options=flat)
class Progress:
    step = 0
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]
progress = Progress()
schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
manager = CheckpointManager(CheckpointManager.Config(enable=True, interval=EVERY), dataloader=None, model_parts=[net],
    optimizers=Optimizers(), lr_schedulers=schedule, states={"train_state": progress}, sd_adapter=None, base_folder=out)
def save(step):
    progress.step = step
    manager.save(step)
manager.load()
train(net, optimizer, progress.step, save)
manager.close()
torch.distributed.destroy_process_group()
""",
        "checkpoint/step-6/*",
        "checkpoint/step-4",
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
    "Lightning, Fabric, sharded": Script(
        "lightning",
        """
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader
class Lit(L.LightningModule):
    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = Net()
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch):  # its loss is told here, because a callback saves before any later hook
        loss = self.net(batch["x"])
        tell(self.trainer.global_step + 1, loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
keep = ModelCheckpoint(out, every_n_train_steps=EVERY, save_top_k=-1)
names = sorted(name for name in os.listdir(out) if name.endswith(".ckpt"))
L.Trainer(accelerator="cpu", devices=1, strategy=ModelParallelStrategy(1, 1), max_steps=STEPS, callbacks=[keep],
    logger=False, enable_progress_bar=False, enable_model_summary=False).fit(
    Lit(), StatefulDataLoader(Rows(), batch_size=2), ckpt_path=f"{out}/{names[-1]}" if names else None)
""",
        "*step=6.ckpt/*",
        "*step=4.ckpt",
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
    Row("DeepSpeed", ("deepspeed",), "`torch.save`, in the layout of its source"),
    Row("Megatron-LM", ("megatron", "megatron_by_ranks"), f"{_DCP}; `torch.save` for the older one"),
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
