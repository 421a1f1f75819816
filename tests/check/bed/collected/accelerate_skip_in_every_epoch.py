# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/accelerate/issues/2016 (the skipping loader is only for the current epoch)
# EXPECTED: The loader of skip_first_batches is used for all later epochs as well, so each of them leaves out its first batches.
# KEYWORDS: position|skip|epoch
# WRONG: scheduler|\(optimizer\)|\(weights\)|\(generator\)|\(shuffle\)|buffers
# CHECK: --steps 18 --kill-at 10

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


def main(spool):
    torch.manual_seed(6)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(24, 4)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=5e-3)
    loader = DataLoader(range(24), batch_size=4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ckpt = tierd.Checkpointer(spool, run="skip", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    if found:
        loader = accelerator.skip_first_batches(loader, step % 6)
    while step < 18:
        for ids in loader:
            loss = torch.nn.functional.cross_entropy(model(x[ids]), (x[ids].sum(1) > 0).long())
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 4 == 0:
                states.save(step)
            if step == 18:
                break
    ckpt.close()
