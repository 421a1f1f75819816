# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/accelerate/issues/1563 (the LR cycle restarts after a resume), the usual torch.save({"model", "optimizer"})
# EXPECTED: The learning rate scheduler was never put into the checkpoint, so it counts from zero again after the resume.
# KEYWORDS: scheduler|learning rate|\blr\b
# WRONG: sampler|position|generator|weights|buffers
# CHECK: --steps 14 --kill-at 9

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import tierd


def main(spool):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    order = torch.Generator()
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(5))
    loader = StatefulDataLoader(range(48), batch_size=4, shuffle=True, generator=order)
    state = {"model": model, "optimizer": optimizer, "data": loader, "rng": tierd.RngState(), "step": 0, "epoch": 0}
    ckpt = tierd.Checkpointer(spool, run="run", to=[])
    ckpt.restore(state)
    while state["step"] < 14:
        order.manual_seed(state["epoch"])
        for batch in loader:
            loss = (model(x[batch]) - x[batch].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            state["step"] += 1
            tierd.observe(state["step"], batch, loss)
            if state["step"] % 3 == 0:
                ckpt.save(state["step"], state)
            if state["step"] == 14:
                break
        else:
            state["epoch"] += 1
    ckpt.close()
