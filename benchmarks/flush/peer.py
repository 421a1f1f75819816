"""The baseline's worker: what a user would write with torch, zstandard and boto3. It does not import tierd.

    save     DCP's process-based async_save to a local directory, zstd level 1 of each of its files, boto3's
             upload_fileobj with its default TransferConfig; done when the last upload returned. Nothing is verified.
    keep     torch.save to a file, and to S3 as it is: what `fetch` and `copy` start from
    fetch    download_fileobj to a local file, torch.load, copy into the state that is there
    copy     the same from a directory, with a plain copy of the file

Before `save`, `ready` makes the process group, the stager, the client and a first save: DCP starts its process then.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import boto3
import checkpoints
import torch
import torch.distributed as dist
import zstandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from tierd.bench.worker_pipe import serve  # which needs no package of tierd's

_TIMEOUT = 1200.0  # seconds after which a save counts as hung
_LEVEL = 1


class Peer:
    """One process: a state, and a client of the server."""

    def __init__(self) -> None:
        self._state: checkpoints.State = {}
        self._stager: DefaultStager | None = None
        self._s3: Any = None

    def load(self, path: str, endpoint: str) -> dict[str, Any]:
        self._state = checkpoints.load(Path(path))
        return self._client(endpoint)

    def blank(self, path: str, endpoint: str) -> dict[str, Any]:
        self._state = checkpoints.blank(Path(path))
        return self._client(endpoint)

    def _client(self, endpoint: str) -> dict[str, Any]:
        self._s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        return {"packages": {"boto3": boto3.__version__, "zstandard": zstandard.__version__}}

    def ready(self, home: str) -> dict[str, Any]:
        """Everything that is made once, and a first save of the whole state."""
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        first = Path(home) / "first"
        self._dcp(first)[1]()
        shutil.rmtree(first)
        return {}

    def _dcp(self, path: Path) -> tuple[Future[Any], Any]:
        answer: Any = async_save(
            self._state,
            storage_writer=FileSystemWriter(path),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        return answer.staging_completion, lambda: answer.upload_completion.result(_TIMEOUT)

    def save(self, home: str, bucket: str, prefix: str, threads: int) -> dict[str, Any]:
        """Seconds of each stage."""
        place = Path(home) / "checkpoint"
        begun = time.perf_counter()
        staged, wait = self._dcp(place)
        staged.result(_TIMEOUT)  # before the next optimizer step, its documentation says
        blocked = time.perf_counter()
        wait()
        local = time.perf_counter()
        packed = []
        for file in sorted(place.iterdir()):
            target = file.with_name(f"{file.name}.zst")
            with file.open("rb") as source, target.open("wb") as sink:
                zstandard.ZstdCompressor(level=_LEVEL, threads=threads).copy_stream(source, sink)
            packed.append(target)
        compressed = time.perf_counter()
        for file in packed:
            with file.open("rb") as source:
                self._s3.upload_fileobj(source, bucket, f"{prefix}/{file.name}")
        done = time.perf_counter()
        return {
            "blocked_s": blocked - begun,
            "durable_s": local - begun,
            "compress_s": compressed - local,
            "upload_s": done - compressed,
            "total_s": done - begun,
        }

    def keep(self, file: str, bucket: str, key: str) -> dict[str, Any]:
        torch.save(self._state, file)
        with Path(file).open("rb") as source:
            self._s3.upload_fileobj(source, bucket, key)
        return {"bytes": Path(file).stat().st_size}

    def fetch(self, file: str, bucket: str, key: str) -> dict[str, Any]:
        begun = time.perf_counter()
        with Path(file).open("wb") as target:
            self._s3.download_fileobj(bucket, key, target)
        return self._taken(file, begun)

    def copy(self, file: str, source: str) -> dict[str, Any]:
        begun = time.perf_counter()
        shutil.copyfile(source, file)
        return self._taken(file, begun)

    def _taken(self, file: str, begun: float) -> dict[str, Any]:
        here = time.perf_counter()
        found = torch.load(file, weights_only=True)
        loaded = time.perf_counter()
        checkpoints.fill(self._state, found)
        return {
            "brought_s": here - begun,
            "loaded_s": loaded - begun,
            "total_s": time.perf_counter() - begun,
        }

    def check(self, path: str) -> dict[str, Any]:
        return {"same": checkpoints.same(self._state, Path(path))}


def open_verbs() -> dict[str, Callable[..., Any]]:
    """The requests by name: the public methods of the worker."""
    worker = Peer()
    return {name: getattr(worker, name) for name in vars(Peer) if not name.startswith("_")}


if __name__ == "__main__":
    serve(open_verbs)
