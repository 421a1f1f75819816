"""Who this process is among its launch's ranks, and how they tell each other small things.

Law: ranks talk over a gloo group of tierd's own, or through the store of torchrun's agent; never over an NCCL group,
and never inside `save`. What they say is JSON with a schema. Where they cannot talk, nothing waits for another rank.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
import weakref
import zlib
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import msgspec

from tierd.client.launchers import environ_number, rank_and_world, torchrun_ranks
from tierd.core.errors import ConfigError, StoreUnavailable
from tierd.core.ids import check_rank

S = TypeVar("S", bound=msgspec.Struct)

_SLOWEST = timedelta(hours=6)  # a rank may fetch for so long while the others wait; a dead one breaks the connection
_FIRST = timedelta(minutes=10)  # how much later than the first rank another one may begin, where no group says so
_TAG = "tierd"

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # default group -> tierd's own beside it
_meetings = count()  # at the agent's store: every rank makes the same ones, in the same order


class Ranks:
    """This rank, how many there are, and `gather`, if there is a way to talk.

    Making one is collective where a process group is initialised and is used: its ranks make a gloo group once.

    Args:
        rank, world_size: both or neither. Not given: those of the initialised default process group, else torchrun's
            environment (`RANK`, `WORLD_SIZE`), else that of a SLURM step (`SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`),
            else rank 0 of 1.

    Raises:
        ConfigError: only one of the two is given, they do not fit each other, or the environment's cannot be used.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self.rank, self.world = rank_and_world(rank, world_size, _group_ranks)
        self._talk: Callable[[bytes], list[bytes]] | None = None
        me = self.rank, self.world
        if self.world > 1:
            if _group_ranks() == me:
                self._talk = _through_group(_own_group())
            elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and torchrun_ranks() == me:
                self._talk = _through_store(*me)

    @property
    def talk(self) -> bool:
        """Whether `gather` gives what every rank said."""
        return self.world == 1 or self._talk is not None

    def gather(self, value: S) -> list[S]:
        """What every rank said, in order; a rank that has no way to talk hears only itself.

        Raises:
            StoreUnavailable: another rank is gone, or was waited for in vain.
        """
        if self._talk is None:
            return [value]
        try:
            answers = self._talk(msgspec.json.encode(value))
            return [msgspec.json.decode(answer, type=type(value)) for answer in answers]
        except (RuntimeError, ValueError, msgspec.MsgspecError, zlib.error) as error:  # as torch says it; another tierd
            raise StoreUnavailable(
                f"rank {self.rank} of {self.world}: the other ranks cannot be heard: {error}"
            ) from error


def _group_ranks() -> tuple[int, int] | None:
    group = _process_group()
    return check_rank(group.get_rank(), group.get_world_size()) if group is not None else None


def _process_group() -> Any:
    from torch import distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None


# -- over a process group ---------------------------------------------------------------------------------------------


def _own_group() -> Any:
    """A group that takes CPU tensors and that nobody else's collectives run on; made once beside each default group."""
    distributed = _process_group()
    default = distributed.group.WORLD
    if default not in _groups:
        if distributed.is_gloo_available():
            # Not public, and there since torch 2.2: without it, a rank that makes none is waited for as a slow one is.
            patient = getattr(getattr(distributed, "distributed_c10d", None), "_set_pg_timeout", None)
            first = _FIRST if patient else _SLOWEST
            try:
                group = distributed.new_group(backend="gloo", timeout=first, group_desc=_TAG)
            except RuntimeError as error:
                raise ConfigError(
                    f"the ranks' gloo group cannot be made: {error}. Every rank of the process group makes a "
                    "Checkpointer (for one alone: rank=0, world_size=1); GLOO_SOCKET_IFNAME names the network "
                    "interface that they use"
                ) from error
            if patient:
                patient(_SLOWEST, group)
            _groups[default] = group
        elif "cpu:" in distributed.get_backend_config() and "cpu:nccl" not in distributed.get_backend_config():
            return default
        else:
            raise ConfigError(
                "this torch was built without gloo, and the process group takes no CPU tensors: give rank, world_size "
                "and attempt (tierd.new_attempt() makes one; give every rank the same) outside of it, or install a "
                "torch with gloo"
            )
    return _groups[default]


def _through_group(group: Any) -> Callable[[bytes], list[bytes]]:
    def talk(said: bytes) -> list[bytes]:
        import torch

        distributed = _process_group()
        if distributed is None:
            raise RuntimeError("the process group was destroyed; make a new Checkpointer")
        world = distributed.get_world_size(group)
        # The device is named, since a training may have set another default.
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(world)]
        distributed.all_gather(sizes, torch.tensor([len(said)], dtype=torch.int64, device="cpu"), group=group)
        longest = max(int(size) for size in sizes)
        padded = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        heard = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(world)]
        distributed.all_gather(heard, padded, group=group)
        return [one.numpy().tobytes()[: int(size)] for one, size in zip(heard, sizes, strict=True)]

    return talk


# -- through the store of torchrun's agent ----------------------------------------------------------------------------


@functools.lru_cache
def _agent(address: str, port: int) -> Any:
    from torch import distributed as torch_distributed

    distributed: Any = torch_distributed
    return distributed.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_FIRST)


def _meet(store: Any, rank: int, world: int) -> str:
    """A name that only these processes know, and know all of them: what earlier ones of the same ranks have left is
    not taken for theirs. Raises `RuntimeError` when not all come in time."""
    own, names = secrets.token_hex(8), list[str]()
    store.set(f"hello/{rank}", own)
    end = time.monotonic() + _FIRST.total_seconds()
    while time.monotonic() < end:
        if rank == 0:
            names = [store.get(f"hello/{number}").decode() for number in range(world)]
            store.set("welcome", ",".join(names))
        else:
            names = store.get("welcome").decode().split(",")
        if names[rank] == own and rank:
            store.add(f"here/{names[0]}", 1)
            return names[0]
        if rank == 0 and store.add(f"here/{own}", 0) == world - 1:
            return own
        time.sleep(0.02)
    raise RuntimeError(f"not all of {world} ranks came within {_FIRST}")


def _through_store(rank: int, world: int) -> Callable[[bytes], list[bytes]]:
    """Rank 0 collects and publishes: 3 W + 1 requests for each exchange, and as many to clean up.

    The store outlives processes: what is said lies under a name that these very ranks agreed on (`_meet`).
    """
    from torch import distributed as torch_distributed

    distributed: Any = torch_distributed
    try:
        agent = _agent(os.environ.get("MASTER_ADDR", ""), environ_number("MASTER_PORT", 2**16 - 1))
        meeting = _meet(distributed.PrefixStore(f"{_TAG}/{next(_meetings)}", agent), rank, world)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: the store of torchrun's agent cannot be reached: {error}; initialise "
            "torch.distributed first, or pass attempt= (tierd.new_attempt() makes one; give every rank the same)"
        ) from error
    store: Any = distributed.PrefixStore(f"{_TAG}/{meeting}", agent)
    turns = count()

    def talk(said: bytes) -> list[bytes]:
        turn = next(turns)
        result = f"{turn}/all"
        store.set_timeout(_SLOWEST if turn else _FIRST)
        store.set(f"{turn}/{rank}", said)
        if rank == 0:
            heard = [store.get(f"{turn}/{number}") for number in range(world)]
            # As many sights are much the same, all of them together are hardly longer than one.
            store.set(result, zlib.compress(msgspec.msgpack.encode(heard), 1))
            for number in range(world):
                store.delete_key(f"{turn}/{number}")
            if turn:
                store.delete_key(f"{turn - 1}/all")  # whoever is in this turn has read it
        return msgspec.msgpack.decode(zlib.decompress(store.get(result)), type=list[bytes])

    return talk
