# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/accelerate/issues/1563 (registered objects), https://github.com/harubaru/waifu-diffusion/pull/31 (EMA of a U-Net)
# EXPECTED: The EMA object is not registered for checkpointing, so save_state leaves it out and its shadow weights start from the first weights.
# KEYWORDS: \bema\b|shadow|average
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)
# CHECK: --steps 16 --kill-at 11

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


class EMA:
    def __init__(self, parameters, decay=0.8):
        self.parameters, self.decay = list(parameters), decay
        self.shadow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def step(self):
        for s, p in zip(self.shadow, self.parameters):
            s.mul_(self.decay).add_(p, alpha=1 - self.decay)

    def distance(self):
        return sum((s - p).square().sum() for s, p in zip(self.shadow, self.parameters))

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


def main(spool):
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(40, 4)
    unet = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.SiLU(), torch.nn.Linear(10, 4))
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2)
    loader = DataLoader(range(40), batch_size=4, generator=torch.Generator())
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    ema = EMA(unet.parameters())
    ckpt = tierd.Checkpointer(spool, run="unet", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    while step < 16:
        for ids in accelerator.skip_first_batches(loader, step % 10):
            noise = torch.randn(4, 4)
            loss = (unet(x[ids] + noise) - noise).square().mean() + 0.1 * ema.distance()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            ema.step()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 3 == 0:
                states.save(step)
            if step == 16:
                break
    ckpt.close()
