# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/huggingface/transformers/issues/34053, https://github.com/allenai/tango/issues/154, https://github.com/ultralytics/ultralytics/pull/22189
# EXPECTED: The GradScaler is not saved; after the resume its scale starts high again, gradients overflow, and optimizer steps are skipped.
# KEYWORDS: scaler|loss scale|\bscale\b
# WRONG: sampler|position|scheduler|\(generator\)|buffers
# CHECK: --steps 16 --kill-at 13

import torch

import tierd


def main(spool):
    torch.manual_seed(3)
    x = torch.randn(64, 5)
    y = 30 * x @ torch.randn(5, 2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 12), torch.nn.ReLU(), torch.nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=100)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "iteration": 0}
    ckpt = tierd.Checkpointer(spool, run="amp", to=[])
    if found := ckpt.restore(state):
        print("resumed from", found.step)
    while state["iteration"] < 16:
        i = state["iteration"]
        order = torch.randperm(64, generator=torch.Generator().manual_seed(i // 8))
        ids = order[(i % 8) * 8 : (i % 8 + 1) * 8]
        loss = torch.nn.functional.mse_loss(model(x[ids]), y[ids])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state["iteration"] += 1
        tierd.observe(state["iteration"], ids, loss)
        if state["iteration"] % 6 == 0:
            ckpt.save(state["iteration"], state)
    ckpt.close()
