# HALF: second
# FRAMEWORK: accelerate
# SOURCE: https://github.com/facebookresearch/metaseq/issues/3 (an object does not fully checkpoint its state)
# EXPECTED: The registered object's state_dict leaves out its running second moment (m2), which starts from zero again.
# KEYWORDS: \bm2\b|scaling|variance|second moment
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)|\(buffers\)
# CHECK: --steps 16 --kill-at 11

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


class RewardScaling:
    """Running mean and variance of targets."""

    def __init__(self):
        self.mean, self.m2, self.count = 0.0, 0.0, 0

    def __call__(self, values):
        for value in values.tolist():
            self.count += 1
            delta = value - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (value - self.mean)
        return (values - self.mean) / (1e-3 + (self.m2 / self.count) ** 0.5)

    def state_dict(self):
        return {"mean": self.mean, "count": self.count}

    def load_state_dict(self, state):
        self.mean, self.count = state["mean"], state["count"]


def main(spool):
    torch.manual_seed(12)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(40, 4)
    reward = 30 * x.sum(1) + 12
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = DataLoader(range(40), batch_size=4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scaling = RewardScaling()
    accelerator.register_for_checkpointing(scaling)
    ckpt = tierd.Checkpointer(spool, run="reward", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    while step < 16:
        for ids in accelerator.skip_first_batches(loader, step % 10):
            loss = (model(x[ids]).squeeze(1) - scaling(reward[ids])).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 3 == 0:
                states.save(step)
            if step == 16:
                break
    ckpt.close()
