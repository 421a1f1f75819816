# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/modelscope/ms-swift/issues/10050 (the sampler replays the order of epoch 0), https://github.com/Spijkervet/SimCLR/pull/26
# EXPECTED: set_epoch is called with an epoch that counts from zero in each launch, so the sampler repeats the order of the first epochs.
# KEYWORDS: epoch|set_epoch
# WRONG: scheduler|\(optimizer\)|weights|\(generator\)
# CHECK: --steps 20 --kill-at 14

import torch
from torch.utils.data import DataLoader, DistributedSampler

import tierd

EPOCHS, SIZE, BATCH = 4, 20, 4


class Points(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return i, self.x[i]


def main(spool):
    torch.manual_seed(2)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    sampler = DistributedSampler(Points(), num_replicas=1, rank=0, shuffle=True, seed=7)
    loader = DataLoader(Points(), batch_size=BATCH, sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "epochs_done": 0, "step": 0}
    ckpt = tierd.Checkpointer(spool, run="ddp", to=[])
    ckpt.restore(state)
    todo = EPOCHS - state["epochs_done"]
    for epoch in range(todo):
        sampler.set_epoch(epoch)
        for ids, x in loader:
            loss = (model(x) - x.roll(1, dims=1)).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            tierd.observe(state["step"], ids, loss)
        state["epochs_done"] += 1
        ckpt.save(state["step"], state)
    ckpt.close()
