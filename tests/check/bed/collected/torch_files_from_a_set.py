# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/datasets/issues/5454 (shards and their order have to be the same); order of a set of strings or of os.listdir
# EXPECTED: The shards are read in the order of a set of their names, which differs in each process, so the resumed position is in another order.
# KEYWORDS: not deterministic|order|shard|files|hash
# WRONG: scheduler|\(optimizer\)|\(generator\)|\(weights\)|buffers
# CHECK: --steps 14 --kill-at 9
# FRESH: yes

import torch

import tierd

SHARDS = {f"train-{i:03d}.bin": list(range(i * 8, i * 8 + 8)) for i in range(10)}


class Shards:
    def __init__(self, names):
        self.names, self.at = list(set(names)), 0  # no name twice

    def __next__(self):
        name = self.names[self.at // 2 % len(self.names)]
        half = self.at % 2
        self.at += 1
        return SHARDS[name][half * 4 : half * 4 + 4]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main(spool):
    torch.manual_seed(35)
    x = torch.randn(80, 4)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    shards = Shards(SHARDS)
    state = {"model": model, "optimizer": optimizer, "shards": shards, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="shards", to=[])
    ckpt.restore(state)
    while state["step"] < 14:
        ids = next(shards)
        loss = (model(x[ids]) - x[ids].relu()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
