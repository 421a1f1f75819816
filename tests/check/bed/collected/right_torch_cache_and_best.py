# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/cnstark/easytorch/pull/58 (done right), a cache of tokens that is filled anew
# EXPECTED: Nothing: a cache is filled again with the same values, and the best loss and the patience are saved.
# CHECK: --steps 20 --kill-at 13

import functools

import torch

import tierd

TEXTS = ["".join(chr(97 + (i * 7 + k * k) % 26) for k in range(9)) for i in range(30)]


@functools.cache
def encode(i):
    return tuple(ord(c) - 97 for c in TEXTS[i])


class Tokenizer:
    def __init__(self):
        self.cache, self.hits = {}, 0

    def __call__(self, i):
        self.hits += i in self.cache
        return self.cache.setdefault(i, encode(i))


def main(spool):
    torch.manual_seed(6)
    tokenizer = Tokenizer()
    model = torch.nn.Sequential(torch.nn.Embedding(26, 6), torch.nn.Linear(6, 26))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.05)
    state = {
        "model": model,
        "optimizer": optimizer,
        "plateau": plateau,
        "rng": tierd.RngState(),
        "step": 0,
        "best": {"loss": float("inf"), "step": 0},
        "losses": [],
    }
    ckpt = tierd.Checkpointer(spool, run="text", to=[])
    ckpt.restore(state)
    while state["step"] < 20:
        ids = [(state["step"] * 3 + k) % 30 for k in range(3)]
        tokens = torch.tensor([tokenizer(i) for i in ids])
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plateau.step(loss.item())
        state["step"] += 1
        state["losses"].append(loss.item())
        if loss.item() < state["best"]["loss"]:
            state["best"] = {"loss": loss.item(), "step": state["step"]}
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
