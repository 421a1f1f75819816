# HALF: second
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/accelerate/pull/4071 (done right: set_epoch and skip_first_batches), register_for_checkpointing
# EXPECTED: Nothing: the EMA is registered, the skipping loader serves one epoch only, and the shuffle depends on the epoch.
# CHECK: --steps 16 --kill-at 11

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


class EpochSampler(torch.utils.data.Sampler):
    def __init__(self, size):
        self.size, self.epoch = size, 0

    def __len__(self):
        return self.size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class EMA:
    def __init__(self, parameters):
        self.live = list(parameters)
        self.shadow = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def step(self):
        for s, p in zip(self.shadow, self.live):
            s.lerp_(p, 0.2)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = [s.clone() for s in state["shadow"]]


def main(spool):
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(24, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.SiLU(), torch.nn.Linear(10, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = EpochSampler(24)
    loader = DataLoader(range(24), batch_size=4, sampler=sampler, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ema = EMA(model.parameters())
    accelerator.register_for_checkpointing(ema)
    ckpt = tierd.Checkpointer(spool, run="ema", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    while step < 16:
        epoch, done = divmod(step, 6)
        sampler.set_epoch(epoch)
        loader.iteration = epoch
        for ids in accelerator.skip_first_batches(loader, done) if done else loader:
            noise = torch.randn(4, 4)
            loss = (model(x[ids] + noise) - noise).square().mean()
            loss = loss + 0.1 * sum((s - p).square().sum() for s, p in zip(ema.shadow, model.parameters()))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            ema.step()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 4 == 0:
                states.save(step)
            if step == 16:
                break
    ckpt.close()
