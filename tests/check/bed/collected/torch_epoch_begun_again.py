# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/Lightning-AI/pytorch-lightning/issues/18780 (resume in the middle of an epoch), https://github.com/paiml/entrenar/issues/102
# EXPECTED: Only the epoch is saved, not the position in it: a resume in the middle of an epoch reads that epoch's batches from its beginning again.
# KEYWORDS: position|from the (very )?(first|beginning)|begins? again|read again
# WRONG: scheduler|\(optimizer\)|weights|\(generator\)|\(shuffle\)
# CHECK: --steps 18 --kill-at 11

import torch
from torch.utils.data import DataLoader

import tierd

data = torch.randn(36, 4, generator=torch.Generator().manual_seed(0))


def main(spool):
    torch.manual_seed(5)
    autoencoder = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Tanh(), torch.nn.Linear(2, 4))
    optimizer = torch.optim.RMSprop(autoencoder.parameters(), lr=1e-2)
    state = {"autoencoder": autoencoder, "optimizer": optimizer, "rng": tierd.RngState(), "epoch": 0, "step": 0}
    ckpt = tierd.Checkpointer(spool, run="ae", to=[])
    ckpt.restore(state)
    for epoch in range(state["epoch"], 10):
        state["epoch"] = epoch
        shuffle = torch.Generator().manual_seed(100 + epoch)
        for ids in DataLoader(range(36), batch_size=4, shuffle=True, generator=shuffle):
            loss = (autoencoder(data[ids]) - data[ids]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state["step"] += 1
            tierd.observe(state["step"], ids, loss)
            if state["step"] % 5 == 0:
                ckpt.save(state["step"], state)
            if state["step"] == 18:
                ckpt.close()
                return
