# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/cwx-worst-one/EAT/issues/13 (a schedule's value is not updated when restarting from a checkpoint)
# EXPECTED: The curriculum's sequence length is a module-level variable that grows during training and is not saved; it starts short again.
# KEYWORDS: curriculum|length|difficulty
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)|buffers
# CHECK: --steps 16 --kill-at 11

import torch

import tierd

CURRICULUM = {"length": 3, "longest": 12}
corpus = torch.randint(0, 9, (32, 13), generator=torch.Generator().manual_seed(0))


def grow():
    CURRICULUM["length"] = min(CURRICULUM["longest"], CURRICULUM["length"] + 1)


def main(spool):
    torch.manual_seed(32)
    embed, rnn, out = torch.nn.Embedding(9, 6), torch.nn.GRU(6, 8, batch_first=True), torch.nn.Linear(8, 9)
    modules = torch.nn.ModuleDict({"embed": embed, "rnn": rnn, "out": out})
    optimizer = torch.optim.AdamW(modules.parameters(), lr=1e-2)
    state = {"modules": modules, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="curriculum", to=[])
    ckpt.restore(state)
    while state["step"] < 16:
        ids = torch.arange(4) + state["step"] * 4 % 32
        tokens = corpus[ids, : CURRICULUM["length"] + 1]
        hidden, _ = rnn(embed(tokens[:, :-1]))
        loss = torch.nn.functional.cross_entropy(out(hidden).transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if state["step"] % 2 == 0:
            grow()
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 5 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
