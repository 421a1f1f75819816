# HALF: first
# FRAMEWORK: accelerate
# SOURCE: https://github.com/X-GenGroup/Flow-Factory/pull/174 (load_state before prepare restores nothing)
# EXPECTED: load_state is called before prepare, when nothing is registered, so neither model nor optimizer is restored.
# KEYWORDS: \(weights\)|\(optimizer\)|never restored|not restored|weight
# WRONG: sampler|position|scheduler|\(generator\)|buffers|\(steps\)
# CHECK: --steps 16 --kill-at 11

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


def main(spool):
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True)
    ckpt = tierd.Checkpointer(spool, run="early", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(6, 6)
    model.load_state_dict({"weight": torch.eye(6) * 0.1, "bias": torch.zeros(6)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    loader = DataLoader(range(32), batch_size=4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    while step < 16:
        for ids in accelerator.skip_first_batches(loader, step % 8):
            loss = (model(x[ids]) - x[ids].roll(2, 1)).square().mean()
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
