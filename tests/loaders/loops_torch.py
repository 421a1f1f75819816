"""Loops over torch's and torchdata's own loaders.

Each loader has a `generator=` of its own. Without one it draws a seed from torch's global generator whenever it is
iterated, once more in a run that was resumed: dropout would go another way from there on. A sampler or dataset shuffles
by the epoch alone, so that no order hangs on how often a generator was drawn from before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from loaders.parts import loop
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES, BATCH = 48, 4  # twelve steps an epoch, of one rank


class Ids(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class Shard(IterableDataset[int]):
    """Shuffled anew in each epoch, a share for each worker; says itself where it is. Workers begin as copies of what is
    here, so that the epoch is set here. It is not in the state, which would put back the last epoch after its end."""

    def __init__(self) -> None:
        self.epoch, self.at = 0, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = slice(info.id, None, info.num_workers) if info else slice(None)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()[mine]
        while self.at < len(order):
            self.at += 1
            yield order[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def stateful(spool: Path, workers: int, iterable: bool, at_the_end: bool = False) -> None:
    data = Shard() if iterable else Ids()
    sampler = None if iterable else DistributedSampler(Ids(), num_replicas=1, rank=0)
    loader = StatefulDataLoader(data, BATCH, sampler=sampler, generator=torch.Generator(), num_workers=workers)

    def batches(epoch: int) -> StatefulDataLoader[int]:
        if sampler is not None:
            sampler.set_epoch(epoch)
        if isinstance(data, Shard):
            data.epoch = epoch
        return loader

    loop(spool, loader, batches, at_the_end=at_the_end)


def map_0(spool: Path) -> None:
    stateful(spool, 0, iterable=False)


def map_4(spool: Path) -> None:
    stateful(spool, 4, iterable=False)


def map_0_at_the_end(spool: Path) -> None:
    stateful(spool, 0, iterable=False, at_the_end=True)


def map_4_at_the_end(spool: Path) -> None:
    stateful(spool, 4, iterable=False, at_the_end=True)


def iterable_0_at_the_end(spool: Path) -> None:
    stateful(spool, 0, iterable=True, at_the_end=True)


def iterable_0(spool: Path) -> None:
    stateful(spool, 0, iterable=True)


def iterable_4(spool: Path) -> None:
    stateful(spool, 4, iterable=True)


class Order(Sampler[int]):
    """A permutation by the epoch that somebody sets; how far it is, a StatefulDataLoader knows."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed, self.epoch = length, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()


class Seeded(Sampler[int]):
    """A permutation by seed and epoch. Workers draw ahead of training, so training says how far it is."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self.epoch = self.done = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        yield from order[self.done :].tolist()

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.done = epoch, 0

    def advance(self, samples: int) -> None:
        self.done += samples

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.seed, self.epoch, self.done = state_dict["seed"], state_dict["epoch"], state_dict["done"]


def seeded(spool: Path) -> None:
    sampler = Seeded(SAMPLES, 5)
    loader = DataLoader(Ids(), BATCH, sampler=sampler, num_workers=2, generator=torch.Generator())

    def batches(epoch: int) -> DataLoader[int]:
        sampler.set_epoch(epoch)
        return loader

    loop(spool, sampler, batches, lambda ids: sampler.advance(len(ids)))


def distributed(spool: Path) -> None:
    """Each of two ranks has its half of every epoch, and its own state."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    sampler = DistributedSampler(Ids(), shuffle=True, seed=9)
    loader = StatefulDataLoader(Ids(), BATCH, sampler=sampler, generator=torch.Generator())

    def batches(epoch: int) -> StatefulDataLoader[int]:
        sampler.set_epoch(epoch)
        return loader

    loop(spool, loader, batches)
