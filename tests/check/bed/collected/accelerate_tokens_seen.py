# HALF: second
# FRAMEWORK: accelerate
# SOURCE: https://github.com/huggingface/accelerate/issues/1563 (an object that was not registered), https://github.com/paiml/entrenar/issues/102
# EXPECTED: The counter of tokens seen, which sets the learning rate, is not saved and counts from zero again.
# KEYWORDS: token|progress|learning rate|\blr\b
# WRONG: sampler|position|\(generator\)|\(weights\)|buffers
# CHECK: --steps 16 --kill-at 11

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import tierd
import tierd.adapters.accelerate


class Progress:
    def __init__(self):
        self.tokens_seen = 0

    def rate(self):
        return 0.1 / (1 + self.tokens_seen / 200)


def main(spool):
    torch.manual_seed(9)
    accelerator = Accelerator(cpu=True)
    texts = torch.randint(0, 11, (40, 7))
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Linear(6, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(range(40), batch_size=4, generator=torch.Generator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    ckpt = tierd.Checkpointer(spool, run="tokens", rank=0, world_size=1, to=[])
    states = tierd.adapters.accelerate.TierdStates(accelerator, ckpt)
    found = states.load()
    step = found.step if found else 0
    while step < 16:
        for ids in accelerator.skip_first_batches(loader, step % 10):
            tokens = texts[ids]
            for group in optimizer.param_groups:
                group["lr"] = progress.rate()
            loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            progress.tokens_seen += tokens.numel()
            step += 1
            tierd.observe(step, ids, loss)
            if step % 4 == 0:
                states.save(step)
            if step == 16:
                break
    ckpt.close()
