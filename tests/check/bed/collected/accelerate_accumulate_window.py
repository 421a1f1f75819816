# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/microsoft/onnxruntime/pull/4950, https://github.com/huggingface/accelerate/issues/1130 (resume from an exact batch with accumulation)
# EXPECTED: The checkpoint is taken within a window of gradient accumulation, and the gradients accumulated so far are lost.
# KEYWORDS: gradient|\.grad|accumulat
# WRONG: sampler|position|scheduler|\(generator\)|\(weights\)|buffers
# CHECK: --steps 20 --kill-at 13

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


def main(spool):
    torch.manual_seed(4)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    data = torch.randn(64, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    loader = DataLoader(range(64), batch_size=2, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ckpt = tierd.Checkpointer(spool, run="window", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    batch = found.step if found else 0
    for ids in accelerator.skip_first_batches(loader, batch):
        with accelerator.accumulate(model):
            loss = (model(data[ids]) - data[ids].abs().sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        batch += 1
        tierd.observe(batch, ids, loss)
        if batch % 5 == 0:
            states.save(batch)
        if batch == 20:
            break
    ckpt.close()
