# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/NVIDIA-NeMo/Automodel/issues/3882, https://github.com/NVIDIA/Megatron-LM/pull/7468 (stale weight decay after a resume)
# EXPECTED: After the restore the loop writes the weight decay of its arguments into the optimizer's groups, over the value that the schedule had reached.
# KEYWORDS: weight.?decay|param_?groups?
# WRONG: sampler|position|(?<!lr_)scheduler|\(generator\)|buffers|\(weights\)
# CHECK: --steps 14 --kill-at 10

import argparse

import torch

import tierd


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=14)
    return parser.parse_args([])


def main(spool):
    args = arguments()
    torch.manual_seed(11)
    features = torch.randn(28, 6)
    labels = (features.sum(1) > 0).long()
    model = torch.nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {"model": model, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="wd", to=[])
    ckpt.restore(state)
    for group in optimizer.param_groups:
        group["weight_decay"] = args.weight_decay
    while state["step"] < args.steps:
        ids = torch.tensor([(state["step"] * 4 + k) % 28 for k in range(4)])
        loss = torch.nn.functional.cross_entropy(model(features[ids]), labels[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["weight_decay"] *= 1.5  # grows during training
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 3 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
