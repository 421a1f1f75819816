# HALF: first
# FRAMEWORK: torch
# SOURCE: https://github.com/mosaicml/composer/issues/1002 (layer freezing does not support resuming)
# EXPECTED: The backbone is unfrozen at one step of the loop; a launch that resumes after it leaves the backbone frozen.
# KEYWORDS: fr[eo]ez|frozen|requires_grad|trainable|\bmode\b
# WRONG: sampler|position|scheduler|\(generator\)|buffers
# CHECK: --steps 16 --kill-at 12

import torch

import tierd

UNFREEZE_AT = 6


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.backbone(x)))


def main(spool):
    torch.manual_seed(8)
    x = torch.randn(32, 4)
    net = Net()
    net.backbone.requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    state = {"net": net, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="finetune", to=[])
    ckpt.restore(state)
    while state["step"] < 16:
        if state["step"] == UNFREEZE_AT:
            net.backbone.requires_grad_(True)
        i = state["step"] * 4 % 32
        ids = torch.arange(i, i + 4)
        loss = (net(x[ids]).squeeze(1) - x[ids].prod(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
