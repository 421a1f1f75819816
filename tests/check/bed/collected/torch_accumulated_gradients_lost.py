# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/microsoft/onnxruntime/pull/4950 (checkpoints and gradient accumulation), https://github.com/huggingface/accelerate/issues/2016
# EXPECTED: Checkpoints are taken in the middle of a gradient accumulation window, and the gradients that were accumulated so far are not in them.
# KEYWORDS: gradient|\.grad|accumulat
# WRONG: sampler|position|scheduler|\(generator\)|\(weights\)|buffers
# CHECK: --steps 18 --kill-at 12

import torch

import tierd

ACCUMULATE = 4


def main(spool):
    torch.manual_seed(21)
    inputs = torch.randn(72, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Sigmoid(), torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "micro": 0}
    ckpt = tierd.Checkpointer(spool, run="accumulate", to=[])
    ckpt.restore(state)
    while state["micro"] < 18:
        ids = torch.arange(4) + 4 * state["micro"]
        loss = (model(inputs[ids]) - inputs[ids].amax(1, keepdim=True)).square().mean()
        (loss / ACCUMULATE).backward()
        state["micro"] += 1
        if state["micro"] % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
        tierd.observe(state["micro"], ids, loss)
        if state["micro"] % 5 == 0:
            ckpt.save(state["micro"], state)
    ckpt.close()
