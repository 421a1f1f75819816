# HALF: second
# FRAMEWORK: torch
# SOURCE: https://github.com/DLR-RM/stable-baselines3/issues/1016 (done right), epsilon is a function of the step
# EXPECTED: Nothing: replay memory, environment and target network are saved.
# CHECK: --steps 24 --kill-at 17

import copy
import random

import torch

import tierd


class Walk:
    def __init__(self):
        self.at = 0.0

    def step(self, action):
        before, self.at = self.at, max(-3.0, min(3.0, self.at + (0.5 if action else -0.5)))
        return before, self.at, float(self.at == 3.0)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main(spool):
    random.seed(0)
    torch.manual_seed(33)
    q = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    target_q = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    env = Walk()
    state = {
        "q": q,
        "target": target_q,
        "optimizer": optimizer,
        "env": env,
        "memory": [],
        "rng": tierd.RngState(),
        "step": 0,
    }
    ckpt = tierd.Checkpointer(spool, run="dqn", to=[])
    ckpt.restore(state)
    while state["step"] < 24:
        epsilon = 0.5 * 0.95 ** state["step"]
        with torch.no_grad():
            action = random.randrange(2) if random.random() < epsilon else int(q(torch.tensor([[env.at]])).argmax())
        before, after, reward = env.step(action)
        state["memory"].append((state["step"], before, action, after, reward))
        rows = [random.choice(state["memory"]) for _ in range(6)]
        s, a, n, r = (torch.tensor([row[i] for row in rows]) for i in (1, 2, 3, 4))
        with torch.no_grad():
            goal = r + 0.9 * target_q(n[:, None]).amax(1)
        loss = (q(s[:, None]).gather(1, a[:, None]).squeeze(1) - goal).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if state["step"] % 6 == 0:
            target_q.load_state_dict(q.state_dict())
        tierd.observe(state["step"], [row[0] for row in rows], loss)
        if state["step"] % 5 == 0:
            ckpt.save(state["step"], state)
    ckpt.close()
