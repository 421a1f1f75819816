"""Several ranks: as threads, with a process group that carries what they say, and as processes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.warm import WarmInterpreter, heavy_imports

ROOT = Path(__file__).parents[2]

_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "PALS_", "MPI_LOCAL", "MV2_", "JSM_", "FLUX_")
_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"}
_NAMES |= {"MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX", "LSB_JOBID", "I_MPI_HYDRA_UUID"}


def is_launchers(name: str) -> bool:
    """Whether a launcher sets this variable: tests that run in a job of one must not take it for their own."""
    return name in _NAMES or name.startswith(_PREFIXES)


class Group:
    """What `torch.distributed` gives to ranks that are threads, as far as tierd uses it: who they are, and a store.

    `exchanges` counts what all ranks have told each other; `deaf` makes every further call of the store fail.
    """

    def __init__(self, world: int) -> None:
        self.world, self.me = world, threading.local()
        self.exchanges = 0
        self.deaf = False
        self.together = threading.Barrier(world, timeout=60)
        self.distributed_c10d = self
        self._stores = [_Store(self) for _ in range(world)]  # one each, as in processes, over the same values
        self.values: dict[str, bytes] = {}

    def install(self, monkeypatch: Any) -> Group:
        """Make this the process group of `torch.distributed` until the test ends."""
        from torch import distributed

        for name, value in {
            "is_initialized": lambda: True,
            "get_rank": self.get_rank,
            "get_world_size": self.get_world_size,
            "distributed_c10d": self,  # torch has no public name for the store
        }.items():
            monkeypatch.setattr(distributed, name, value)
        return self

    def get_rank(self) -> int:
        return self.me.rank

    def get_world_size(self) -> int:
        return self.world

    def _get_default_store(self) -> _Store:
        return self._stores[self.me.rank]

    def run(self, work: Callable[[int], object]) -> list:
        """`work(rank)` in a thread for each rank; what each returned or raised."""
        results: list = [None] * self.world

        def one(number: int) -> None:
            self.me.rank = number
            try:
                results[number] = work(number)
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=one, args=(number,)) for number in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results


class _Store:
    """A process group's store, as `torch.distributed.Store`: keys are there until they are deleted."""

    timeout = timedelta(minutes=5)

    def __init__(self, group: Group) -> None:
        self._group = group

    def set(self, key: str, value: bytes) -> None:
        self._hear()
        self._group.exchanges += key.endswith("/all")
        self._group.values[key] = value

    def get(self, key: str) -> bytes:
        self._hear()
        return self._group.values[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._hear()
        return all(key in self._group.values for key in keys)

    def delete_key(self, key: str) -> bool:
        self._hear()
        return self._group.values.pop(key, None) is not None

    def _hear(self) -> None:
        if self._group.deaf:
            raise RuntimeError("the store is not to be used here")


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def environment(**more: str) -> dict[str, str]:
    """This process's, without what a launcher would have set, with tierd and the tests to be found.

    A rank that aborts says where.
    """
    kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "lean")])
    always = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONFAULTHANDLER": "1"}
    return {**kept, "PYTHONPATH": path, **always, **more}


def processes(
    script: str, arguments: Sequence[Sequence[str]], timeout: float = 90, warm: WarmInterpreter | None = None
) -> list[str]:
    """Run `script` once for each list of arguments, all at a time; what each printed. Fails where one fails."""
    with ExitStack() as stack:
        interpreter = warm or stack.enter_context(WarmInterpreter(heavy_imports(script), environment()))
        room = Path(stack.enter_context(TemporaryDirectory(prefix="ranks-")))
        outputs = [room / str(number) for number in range(len(arguments))]
        running = [interpreter.start(script, own, output) for own, output in zip(arguments, outputs, strict=True)]
        end_s = time.monotonic() + timeout
        ended = [interpreter.wait(process, max(0.0, end_s - time.monotonic())) for process in running]
        for status, output in zip(ended, outputs, strict=True):
            assert status == 0, f"{status}: {Path(f'{output}.err').read_text()[-3000:]}"
        return [output.read_text() for output in outputs]


def launched_twice(script: str, home: Path) -> list[list[str]]:
    """What two ranks print in a first launch, and in a second launch that continues from it.

    Each is called with its rank, a free port, `home`, and "first" or "again".
    """
    outputs = []
    with WarmInterpreter(heavy_imports(script), environment(KERAS_BACKEND="torch")) as warm:
        for word in ("first", "again"):
            port = str(free_port())
            own = [[rank, port, str(home), word] for rank in ("0", "1")]
            outputs.append(processes(script, own, timeout=400, warm=warm))
    return outputs
