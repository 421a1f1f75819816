# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/nicklashansen/tdmpc2/issues/28, https://github.com/ray-project/ray/issues/8151, https://github.com/DLR-RM/stable-baselines3/issues/1016
# EXPECTED: The replay buffer is not saved, so after the resume the agent learns from the few newest transitions only.
# KEYWORDS: replay|memory|transition|\(buffer\)
# WRONG: sampler|position|scheduler|\(optimizer\)|\(generator\)|\(weights\)|\(buffers\)
# CHECK: --steps 24 --kill-at 17

import random

import torch

import tierd


class ReplayMemory:
    def __init__(self, capacity):
        self.capacity, self.rows = capacity, []

    def push(self, row):
        self.rows.append(row)
        del self.rows[: -self.capacity]

    def sample(self, k):
        return [random.choice(self.rows) for _ in range(k)]


class Walk:
    """A walk on a line; the goal is at 3."""

    def __init__(self):
        self.at = 0.0

    def step(self, action):
        before, self.at = self.at, max(-3.0, min(3.0, self.at + (0.5 if action else -0.5)))
        return before, self.at, float(self.at == 3.0)


def main(spool):
    random.seed(0)
    torch.manual_seed(33)
    q = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    memory, env = ReplayMemory(64), Walk()
    state = {"q": q, "optimizer": optimizer, "rng": tierd.RngState(), "step": 0, "at": 0.0}
    ckpt = tierd.Checkpointer(spool, run="dqn", to=[])
    ckpt.restore(state)
    env.at = state["at"]
    while state["step"] < 24:
        with torch.no_grad():
            action = random.randrange(2) if random.random() < 0.3 else int(q(torch.tensor([[env.at]])).argmax())
        before, after, reward = env.step(action)
        memory.push((state["step"], before, action, after, reward))
        rows = memory.sample(6)
        s, a, n, r = (torch.tensor([row[i] for row in rows]) for i in (1, 2, 3, 4))
        with torch.no_grad():
            target = r + 0.9 * q(n[:, None]).amax(1)
        loss = (q(s[:, None]).gather(1, a[:, None]).squeeze(1) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        state["at"] = env.at
        tierd.observe(state["step"], [row[0] for row in rows], loss)
        if state["step"] % 5 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
