"""Programs whose ranks each write a part of a checkpoint, here with one rank."""

from __future__ import annotations

from support.script import Script

OF_RANKS = {
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
    "DeepSpeed": Script(
        "deepspeed",
        """
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
import deepspeed
deepspeed.ops.__compatible_ops__ = {}  # it would compile C++ here for ranks that share memory
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
net = Net()
engine, *_ = deepspeed.initialize(model=net, optimizer=torch.optim.Adam(net.parameters()), config={
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True})
engine.load_checkpoint(out)
for step in range(engine.global_steps, STEPS):
    loss = engine(batch(step))
    engine.backward(loss)
    engine.step()
    tell(step + 1, loss)
    if (step + 1) % EVERY == 0:
        engine.save_checkpoint(out)
torch.distributed.destroy_process_group()
""",
        "global_step6/*",
        "global_step4",
        apart=True,
    ),
    "Megatron-LM": Script(
        "megatron.core",
        """
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
# It asks CUDA both, wherever the tensors lie: a CPU has nothing to wait for.
torch.cuda.synchronize, torch.cuda.current_device = lambda: None, lambda: "cpu"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
net = Net()
optimizer = torch.optim.Adam(net.parameters())
pointer = os.path.join(out, "latest_checkpointed_iteration.txt")
def sharded(step):
    named = net.state_dict(keep_vars=True).items()
    model = {name: ShardedTensor.from_rank_offsets(name, value) for name, value in named}
    moments = optimizer.state_dict()
    steps = {number: one["step"] for number, one in moments["state"].items()}
    optim_state_to_sharding_state(moments, get_param_id_to_sharded_param_map(model, net.parameters()), ("step",))
    return {"model": model, "optimizer": moments, "steps": steps, "iteration": step}
def save(step):
    folder = f"{out}/iter_{step:07}"
    os.makedirs(folder, exist_ok=True)
    dist_checkpointing.save(sharded(step), folder)
    with open(pointer, "w") as file:
        file.write(str(step))
done = 0
if os.path.exists(pointer):
    for one in net.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()  # now it has moments, which are loaded in place
    found = dist_checkpointing.load(sharded(0), f"{out}/iter_{int(open(pointer).read()):07}")
    done = found["iteration"]
    for number, one in found["steps"].items():
        found["optimizer"]["state"][number]["step"] = one
    net.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
train(net, optimizer, done, save)
torch.distributed.destroy_process_group()
""",
        "iter_0000006/*",
        "iter_0000004",
        below=(3, 14),
    ),
}
