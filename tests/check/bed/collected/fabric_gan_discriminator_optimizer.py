# HALF: second
# FRAMEWORK: lightning
# SOURCE: https://github.com/nicklashansen/tdmpc2/issues/28 (functions to save models and one of the optimizers)
# EXPECTED: Of the two optimizers only the generator's is saved; the critic's Adam moments are lost.
# KEYWORDS: d_opt|critic|\bAdam\b|(?-i:Optimizer)|\(optimizer\): (?!state\[.optimizer)
# WRONG: sampler|position|scheduler|\(weights\)|\(generator\)|buffers
# CHECK: --steps 15 --kill-at 10

import lightning as L
import torch

import tierd


def mlp(a, b):
    return torch.nn.Sequential(torch.nn.Linear(a, 12), torch.nn.LeakyReLU(0.2), torch.nn.Linear(12, b))


def main(spool):
    fabric = L.Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(5)
    real = torch.randn(40, 3) * 2 + 1
    generator, critic = mlp(2, 3), mlp(3, 1)
    generator, g_opt = fabric.setup(generator, torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9)))
    critic, d_opt = fabric.setup(critic, torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9)))
    state = {"generator": generator, "critic": critic, "optimizer": g_opt, "rng": tierd.RngState(), "step": 0}
    ckpt = tierd.Checkpointer(spool, run="gan", to=[])
    ckpt.restore(state)
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    while state["step"] < 15:
        ids = torch.arange(4) + state["step"] * 4 % 40
        fake = generator(torch.randn(4, 2))
        d_loss = bce(critic(real[ids]), torch.ones(4, 1)) + bce(critic(fake.detach()), torch.zeros(4, 1))
        d_opt.zero_grad()
        fabric.backward(d_loss)
        d_opt.step()
        g_loss = bce(critic(fake), torch.ones(4, 1))
        g_opt.zero_grad()
        fabric.backward(g_loss)
        g_opt.step()
        state["step"] += 1
        tierd.observe(state["step"], ids, d_loss + g_loss)
        if state["step"] % 4 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
