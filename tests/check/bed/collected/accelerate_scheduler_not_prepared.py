# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/accelerate/issues/1563 (the LR state was not loaded and the cycle restarted)
# EXPECTED: The scheduler was neither prepared nor registered, so save_state does not save it and its cosine begins again.
# KEYWORDS: schedul|last_epoch|learning rate|\blr\b
# WRONG: sampler|position|\(generator\)|\(weights\)|buffers
# CHECK: --steps 16 --kill-at 12

import math

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate

TOTAL = 20


def main(spool):
    torch.manual_seed(2)
    accelerator = Accelerator(cpu=True)
    points = torch.rand(32, 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(range(32), batch_size=4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer.optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / TOTAL))
    )
    ckpt = tierd.Checkpointer(spool, run="sched", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    while step < 16:
        for ids in accelerator.skip_first_batches(loader, step % 8):
            loss = (model(points[ids]).squeeze(1) - torch.sin(6 * points[ids]).sum(1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 5 == 0:
                states.save(step, metrics={"loss": loss.item()})
            if step == 16:
                break
    ckpt.close()
