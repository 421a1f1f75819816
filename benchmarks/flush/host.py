"""What stands around an arm: the daemon, the bucket, the page cache, and who looks at memory meanwhile.

Invariant: everything that is started or put here is ended and deleted here. Memory is sampled from /proc/PID/status,
where the kernel tells a process's own pages (RssAnon), mapped files (RssFile) and shared memory (RssShmem) apart: the
arena of a trainer that a daemon has mapped is of the last kind, and is the trainer's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from botocore.client import BaseClient
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import get_session

import tierd
from tierd.bench import process_counters
from tierd.bench.worker_pipe import end_process
from tierd.core.errors import TierdError
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool

RSS = ("RssAnon", "RssFile", "RssShmem")
_PROC = Path("/proc")
_SAMPLE = 0.05  # seconds between two looks at memory
_RESCAN = 1.0  # seconds between two looks at which processes there are
_PATIENCE = 120.0  # seconds in which a daemon must answer, or end


def environment(endpoint: str) -> dict[str, str]:
    """For every child: where tierd is imported from, and the test server's credentials under AWS's names."""
    found = dict(os.environ)
    root = str(Path(tierd.__file__).resolve().parent.parent)
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (root, found.get("PYTHONPATH"))))
    for ours, theirs in (("ACCESS_KEY", "AWS_ACCESS_KEY_ID"), ("SECRET_KEY", "AWS_SECRET_ACCESS_KEY")):
        if f"TIERD_TEST_S3_{ours}" in found:
            found[theirs] = found[f"TIERD_TEST_S3_{ours}"]
    found["AWS_EC2_METADATA_DISABLED"] = "true"
    return found


def until(awaited: str, holds: Callable[[], bool], patience_s: float) -> None:
    """Wait until something holds; raises `ChildProcessError`."""
    end = time.monotonic() + patience_s
    while not holds():
        if time.monotonic() > end:
            raise ChildProcessError(f"{awaited}: not within {patience_s:g} s")
        time.sleep(0.1)


class Daemon:
    """`tierd run`, until it has seen every tier."""

    def __init__(self, spool: Path, urls: list[str], env: Mapping[str, str], log: Path) -> None:
        self._spool, self._log = Spool(spool), log
        command = [sys.executable, "-m", "tierd", "run", "--spool", str(spool)]
        with log.open("wb") as to:
            self._process = subprocess.Popen(
                [*command, *(word for url in urls for word in ("--to", url))],
                stdout=to,
                stderr=subprocess.STDOUT,
                env=dict(env),
            )
        try:
            until("the daemon answers", self._ready, _PATIENCE)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ready(self) -> bool:
        if self._process.poll() is not None:
            raise ChildProcessError(f"the daemon ended: {self._log.read_text(errors='replace')[-500:]}")
        try:
            with DaemonConnection(self._spool) as link:
                return all(tier["reached"] for tier in link.ask(StatusRequest(), 10.0)["status"]["tiers"])
        except (TierdError, TimeoutError):
            return False

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        end_process(self._process, _PATIENCE)


class Bucket:
    """A bucket of this run's own; `close` deletes all that is in it, and it.

    Args:
        reclaim: a command that has the server give deleted objects' space back now, where it does not by itself.
    """

    def __init__(self, endpoint: str, env: Mapping[str, str], reclaim: str | None) -> None:
        self.name, self.endpoint, self._reclaim = f"tierd-flush-{uuid.uuid4().hex[:8]}", endpoint, reclaim
        self._client: BaseClient = get_session().create_client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id=env.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=env.get("AWS_SECRET_ACCESS_KEY"),
        )
        answer = self._client.create_bucket(Bucket=self.name)
        self.server = answer["ResponseMetadata"]["HTTPHeaders"].get("server", "unknown")

    def url(self, prefix: str) -> str:
        return f"s3://{self.name}/{prefix}?endpoint={self.endpoint}&region=us-east-1&addressing=path"

    def _objects(self, prefix: str) -> dict[str, int]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}

    def size(self, prefix: str) -> int:
        """Bytes below a prefix."""
        return sum(self._objects(f"{prefix}/").values())

    def empty(self, prefix: str) -> None:
        """Delete what is below a prefix, and begun uploads."""
        for key in self._objects(prefix):
            self._client.delete_object(Bucket=self.name, Key=key)
        for begun in self._client.list_multipart_uploads(Bucket=self.name).get("Uploads", ()):
            self._client.abort_multipart_upload(Bucket=self.name, Key=begun["Key"], UploadId=begun["UploadId"])
        if self._reclaim:
            subprocess.run(self._reclaim, shell=True, stdout=subprocess.DEVNULL, check=False)

    def close(self) -> None:
        try:
            self.empty("")
            self._client.delete_bucket(Bucket=self.name)
        except (BotoCoreError, ClientError) as error:
            print(f"bucket {self.name} is left behind: {error}", file=sys.stderr)


class Watch:
    """Samples a process tree's memory in a thread until it is left."""

    def __init__(self, pid: int) -> None:
        self._pid, self._pids, self._observed = pid, [pid], 0.0
        self.samples: list[tuple[float, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        for pid in process_counters.process_tree(self._pid):
            (_PROC / str(pid) / "clear_refs").write_text("5")  # VmHWM begins anew
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE):
            now = time.monotonic()
            if now - self._observed > _RESCAN:
                self._pids, self._observed = process_counters.process_tree(self._pid), now
            found = [_status(pid) for pid in self._pids]
            self.samples.append((now, {name: sum(one.get(name, 0) for one in found) for name in RSS}))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.high_water = sum(_status(pid).get("VmHWM", 0) for pid in process_counters.process_tree(self._pid))

    def peaks(self, begun: float, ended: float) -> dict[str, int]:
        """The most of each kind, and of what is the process's own (RssAnon + RssFile), between two moments."""
        held = [sample for at, sample in self.samples if begun <= at <= ended]
        found = {name: max((sample[name] for sample in held), default=0) for name in RSS}
        found["own"] = max((sample["RssAnon"] + sample["RssFile"] for sample in held), default=0)
        return found


def _status(pid: int) -> dict[str, int]:
    """Its figures in bytes; empty when it is gone."""
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def busy_seconds() -> float:
    """CPU seconds that all processes of this machine have had so far, the kernel's own included."""
    fields = [int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # without idle and iowait


def versions(peer: Mapping[str, Any]) -> dict[str, str]:
    """Of what both sides run on; the peer's worker names its own."""
    from importlib import metadata

    names = ("tierd", "torch", "safetensors", "aiobotocore", "botocore", "awscrt", "zstandard")
    installed = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return {name: installed[name] for name in names if name in installed} | {
        f"{name} (peer)": version for name, version in sorted(peer.items()) if installed.get(name) != version
    }
