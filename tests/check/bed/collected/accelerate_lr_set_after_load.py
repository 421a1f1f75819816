# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/transformers/issues/34053 (the learning rate is discontinuous), https://github.com/NVIDIA/Megatron-LM/pull/5212 (arguments override the checkpoint)
# EXPECTED: After the load the loop sets the learning rate back to that of the arguments, although it had decayed.
# KEYWORDS: \blr\b|learning rate|param_groups
# WRONG: sampler|position|\(generator\)|\(weights\)|buffers|(?<!lr_)scheduler
# CHECK: --steps 16 --kill-at 12

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate

LR = 0.05


def main(spool):
    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(32, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.ELU(), torch.nn.Linear(12, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(range(32), batch_size=4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ckpt = tierd.Checkpointer(spool, run="lr", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    for group in optimizer.param_groups:  # the command line wins over the checkpoint
        group["lr"] = LR
    while step < 16:
        for ids in accelerator.skip_first_batches(loader, step % 8):
            loss = (model(x[ids]) - x[ids].norm(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % 4 == 0:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            tierd.observe(step, ids, loss)
            if step % 5 == 0:
                states.save(step)
            if step == 16:
                break
    ckpt.close()
