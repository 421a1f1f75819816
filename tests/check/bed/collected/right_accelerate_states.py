# HALF: first
# FRAMEWORK: accelerate
# SOURCE: docs/howto/accelerate.md
# EXPECTED: Nothing: everything was prepared, save_state saves it, and the position is skipped to.
# CHECK: --steps 16 --kill-at 11

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


def main(spool):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(40, 5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    loader = DataLoader(range(40), batch_size=4, generator=torch.Generator().manual_seed(1))
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    ckpt = tierd.Checkpointer(spool, run="acc", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    while step < 16:
        rest = accelerator.skip_first_batches(loader, step % 10) if step % 10 else loader
        for ids in rest:
            loss = (net(x[ids]) - x[ids].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 3 == 0:
                states.save(step, metrics={"loss": loss.item()})
            if step == 16:
                break
    ckpt.close()
