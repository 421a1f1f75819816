# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/accelerate/issues/2016 (it resumes as if still in the first epoch), https://github.com/huggingface/accelerate/pull/4071
# EXPECTED: set_epoch is not called for the resumed epoch, so the seeded sampler gives the order of an earlier epoch.
# KEYWORDS: epoch|shuffle|order
# WRONG: scheduler|\(optimizer\)|\(weights\)|\(buffers\)
# CHECK: --steps 16 --kill-at 15

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


def main(spool):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    x = torch.randn(24, 5)
    net = torch.nn.Linear(5, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(range(24), batch_size=4, shuffle=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    ckpt = tierd.Checkpointer(spool, run="acc", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    done = found.step if found else 0
    first_epoch, skip = divmod(done, len(loader))
    for epoch in range(first_epoch, 3):
        active = accelerator.skip_first_batches(loader, skip) if epoch == first_epoch and skip else loader
        for ids in active:
            loss = (net(x[ids]) - x[ids].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            done += 1
            tierd.observe(done, ids, loss)
            if done % 4 == 0:
                states.save(done)
            if done == 16:
                ckpt.close()
                return
