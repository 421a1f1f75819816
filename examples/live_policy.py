"""A policy that learns from samples of another process: `python -m examples.live_policy DIR`.

The trainer saves its policy after each step. The sampler follows these weights: it takes over newer ones between two
batches, and sends batches that name the step of the weights with which they were drawn. The trainer discards batches of
weights that are more than `MAX_LAG` steps old.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from contextlib import suppress
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierd

BATCH, STATES, ACTIONS = 64, 4, 8
MAX_LAG = 8  # steps


def make_policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(STATES, 32), nn.Tanh(), nn.Linear(32, ACTIONS))


def reward_of(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Return 1 for the action of each state that counts, else 0."""
    return (actions == states.argmax(dim=1) * 2).float()


def sample(tier: str, batches: Queue[Any], ended: Any) -> None:
    """Draw batches with the newest weights, until the trainer has ended."""
    torch.set_num_threads(1)
    policy = make_policy()
    with tierd.open(tier, run="policy") as reader, reader.live(policy, only="policy", period_s=0.1) as live:
        while not ended.is_set():
            live.update(wait_s=0.0 if live.checkpoint else 1.0)  # between two batches
            if live.checkpoint is None:
                continue
            states = torch.eye(STATES)[torch.randint(STATES, (BATCH,))]
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=policy(states)).sample()
            batches.put((live.checkpoint.step, states.tolist(), actions.tolist()))


def train(home: Path, steps: int = 100) -> list[float]:
    """Train for a number of steps; return the mean reward of each step's batch."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    batches, ended = context.Queue(maxsize=1), context.Event()  # at most one batch waits, so samples are fresh
    (home / "tier").mkdir(parents=True)
    tier = f"file://{home / 'tier'}"
    sampler = context.Process(target=sample, args=(tier, batches, ended), daemon=True)
    policy, rewards = make_policy(), list[float]()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    keep = tierd.Retention(keep_last=3)
    with tierd.Checkpointer(home / "spool", run="policy", to=[tier], retention=keep) as ckpt:
        publish(ckpt.save(0, {"policy": policy}))
        sampler.start()
        for step in range(1, steps + 1):
            drawn_at, states, actions = batches.get(timeout=120)
            while step - drawn_at > MAX_LAG:
                drawn_at, states, actions = batches.get(timeout=120)
            states, actions = torch.tensor(states), torch.tensor(actions)
            reward = reward_of(states, actions)
            chosen = torch.distributions.Categorical(logits=policy(states)).log_prob(actions)
            optimizer.zero_grad()
            (-(reward - reward.mean()) * chosen).mean().backward()
            optimizer.step()
            publish(ckpt.save(step, {"policy": policy}))
            rewards.append(reward.mean().item())
            if step % 10 == 0:
                print(f"step {step}: reward {rewards[-1]:.2f} with weights of step {drawn_at}", flush=True)
        ended.set()
        while sampler.is_alive():  # a sampler that waits for the queue
            if not batches.empty():
                batches.get()
            sampler.join(0.1)
    return rewards


def publish(save: tierd.Save) -> None:
    """Have the daemon send a checkpoint at once, not spread over the time until the next one: somebody waits for it."""

    def wait() -> None:
        with suppress(tierd.CheckpointNotFound):  # a newer step came before it was sent
            save.wait("file")

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
