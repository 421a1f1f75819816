"""A cold, verified restore beside an unverified download and torch.load: seconds, and CPU seconds of every process.

Invariant: every turn is a process of its own, with an empty spool, and arms take turns round by round, because the
machine may be shared. After each turn the state is compared with what was saved. The daemon was started before and has
listed its tier; CPU seconds are of the trainer and of the daemon, from the call to its return. `restore --to` is the
command, whole.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

import tierd
from tierd.bench import process_counters
from tierd.bench.growth.growth_result import Clock, Figures, Rows, Samples, run_tierd
from tierd.codec.chunk_codec import decode
from tierd.core.config import from_urls
from tierd.core.manifest import Chunk
from tierd.core.manifest_codec import decode as decode_manifest
from tierd.core.urls import StoreUrl, parse_url
from tierd.spool.file_io import digest

RUN, PLAIN, DIGESTS = "bench", "plain/state.pt", "digests.json"
GIGABYTES, ROUNDS, TENSORS = 0.5, 3, 64
ARMS = ("unverified", "tierd", "restore --to", "least")
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_HANDS = 10  # as boto3 downloads by default
_LISTED_S = 2.0  # a daemon has listed its tier by then


def make_state(kind: str) -> dict[str, torch.Tensor]:
    """Normal numbers of a deviation of 0.02, as language models' weights have it."""
    draw = torch.Generator().manual_seed(1)
    return {
        f"layer.{n}": (torch.randn(numbers_per_tensor(kind), generator=draw) * 0.02).to(KINDS[kind])
        for n in range(TENSORS)
    }


def numbers_per_tensor(kind: str) -> int:
    return int(GIGABYTES * 1e9 / TENSORS / KINDS[kind].itemsize)


def tensor_digests(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Each tensor's digest."""
    return {name: digest(tensor.view(torch.uint8).numpy().data) for name, tensor in state.items()}


def s3_client(url: StoreUrl) -> Any:
    """A client for that server, with as many connections as a download uses."""
    from botocore.config import Config
    from botocore.session import get_session

    return get_session().create_client(
        "s3",
        endpoint_url=url.endpoint,
        region_name=url.region,
        config=Config(max_pool_connections=_HANDS, s3={"addressing_style": url.addressing}),
    )


def object_location(url: StoreUrl) -> dict[str, str]:
    """The arguments of a request for the plain file beside a tier."""
    return {"Bucket": url.bucket, "Key": f"{url.prefix}/{PLAIN}".lstrip("/")}


def put_state(kind: str, url: str, work: Path) -> None:
    """Put the checkpoint on the tier, and a file of `torch.save` beside it."""
    state, place = make_state(kind), parse_url(url)
    (work / DIGESTS).write_text(json.dumps(tensor_digests(state)))
    name = from_urls("/", [url]).tier[0].name
    with tierd.Checkpointer(work / "put", run=RUN, to=[url]) as checkpointer:
        checkpointer.save(1, state).wait(name, timeout=600)
    _end_daemon(work / "put")
    path = work / PLAIN
    path.parent.mkdir(parents=True)
    torch.save(state, path)
    if place.scheme == "s3":
        with path.open("rb") as file:
            s3_client(place).put_object(Body=file, **object_location(place))
        path.unlink()


def download(url: StoreUrl, to: Path, piece_bytes: int = 8 << 20) -> None:
    """Download the plain file in ranges, several at a time, without any verification; by default as boto3 does."""
    client, location = s3_client(url), object_location(url)
    size = client.head_object(**location)["ContentLength"]
    fd = os.open(to, os.O_WRONLY | os.O_CREAT)

    def piece(start: int) -> None:
        last = min(start + piece_bytes, size) - 1
        body = client.get_object(**location, Range=f"bytes={start}-{last}")["Body"]
        os.pwrite(fd, body.read(), start)

    with ThreadPoolExecutor(_HANDS) as pool:
        list(pool.map(piece, range(0, size, piece_bytes)))
    os.close(fd)


def restore_unverified(kind: str, url: str, work: Path) -> tuple[dict[str, torch.Tensor], Figures]:
    """Download, load, and copy into the state."""
    state, place, target = _blank(kind), parse_url(url), work / f"down-{os.getpid()}.pt"
    clock = Clock()
    if place.scheme == "s3":
        download(place, target)
    else:
        shutil.copyfile(work / PLAIN, target)
    for name, tensor in torch.load(target, weights_only=True).items():
        state[name].copy_(tensor)
    figures = clock.read()
    target.unlink()
    return state, figures


def restore_verified(kind: str, url: str, work: Path) -> tuple[dict[str, torch.Tensor], Figures]:
    """Restore by a `Checkpointer` with an empty spool, whose daemon has listed the tier."""
    state, spool = _blank(kind), work / f"spool-{os.getpid()}"
    checkpointer = tierd.Checkpointer(spool, run=RUN, to=[url])
    daemon = int((spool / ".tierd" / "lock").read_text())
    time.sleep(_LISTED_S)
    daemon_cpu_s, clock = process_counters.cpu_seconds(daemon), Clock()
    restored = checkpointer.restore(state)
    figures = clock.read()
    figures["daemon_cpu_s"] = process_counters.cpu_seconds(daemon) - daemon_cpu_s
    figures["cpu_s"] += figures["daemon_cpu_s"]
    assert restored is not None and restored.tier != "local"
    checkpointer.close()
    _end_daemon(spool)
    return state, figures


def restore_by_command(_: str, url: str, work: Path) -> tuple[None, Figures]:
    """`tierd restore --to`: the command verifies the files; nothing loads them."""
    target = work / f"to-{os.getpid()}"
    clock = Clock()
    run_tierd("restore", url, "--run", RUN, "--to", str(target))
    figures = clock.read()
    shutil.rmtree(target)
    return None, figures


def read_and_verify(_: str, url: str, work: Path) -> tuple[None, Figures]:
    """Read, verify and decode each object, on every core, as each verified restore must; nothing reaches a disk."""
    place = parse_url(url)
    read = _reader(place)
    chunks = list(decode_manifest(read(_manifest_key(place))).chunks())
    memory = memoryview(torch.full((sum(chunk.size for chunk in chunks),), 255, dtype=torch.uint8).numpy().data)

    def bring(chunk: Chunk, start: int) -> None:
        assert chunk.stored is not None
        decode(chunk, read(f"{RUN}/{chunk.stored.key}"), url, memory[start : start + chunk.size])

    starts = [0, *accumulate(chunk.size for chunk in chunks)]
    clock = Clock()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(bring, chunks, starts))
    return None, clock.read()


def _reader(place: StoreUrl) -> Callable[[str], bytes]:
    if place.scheme != "s3":
        return lambda key: Path(place.path, key).read_bytes()
    client = s3_client(place)
    return lambda key: bytes(client.get_object(Bucket=place.bucket, Key=f"{place.prefix}/{key}")["Body"].read())


def _manifest_key(place: StoreUrl) -> str:
    """The key of the one manifest on the tier."""
    prefix = f"{RUN}/manifests/"
    if place.scheme != "s3":
        (path,) = (path for path in Path(place.path, prefix).rglob("*") if path.is_file())
        return path.relative_to(place.path).as_posix()
    listed = s3_client(place).list_objects_v2(Bucket=place.bucket, Prefix=f"{place.prefix}/{prefix}")
    (key,) = (str(entry["Key"]) for entry in listed["Contents"])
    return key.removeprefix(f"{place.prefix}/")


RESTORE_CALLS: dict[str, Callable[[str, str, Path], tuple[dict[str, torch.Tensor] | None, Figures]]] = {
    "unverified": restore_unverified,
    "tierd": restore_verified,
    "restore --to": restore_by_command,
    "least": read_and_verify,
}


def _blank(kind: str) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.full((numbers_per_tensor(kind),), -1.0, dtype=KINDS[kind]) for n in range(TENSORS)}


def _end_daemon(spool: Path) -> None:
    pid = int((spool / ".tierd" / "lock").read_text())
    os.kill(pid, signal.SIGTERM)
    for _ in range(300):
        if not process_counters.start_ticks(pid):
            break
        time.sleep(0.1)
    shutil.rmtree(spool, ignore_errors=True)


def cold_samples(home: Path, kind: str, url: str) -> Samples:
    """Every arm's turns from one place."""
    command = [sys.executable, "-m", "tierd.bench.growth.cold_restores", kind, url or f"file://{home}/tier", str(home)]
    if not url:
        (home / "tier").mkdir()
    subprocess.run([*command, "put"], check=True)
    samples: Samples = {arm: [] for arm in ARMS}
    for _ in range(ROUNDS):
        for arm in ARMS:
            process_counters.drop_cache(home)
            process = subprocess.run([*command, arm], stdout=subprocess.PIPE, text=True, check=True)
            samples[arm].append(json.loads(process.stdout.splitlines()[-1]))
    return samples


def parts(url: str) -> dict[str, Rows]:
    """This module's part of the page; from S3 where `url` names a place in a bucket, below which nothing lies."""
    rows: Rows = [(f"file {kind}", partial(cold_samples, kind=kind, url="")) for kind in KINDS]
    for kind in KINDS if url else ():
        place = parse_url(url)
        below = str(replace(place, prefix=f"{place.prefix}/{kind}".lstrip("/")))
        rows.append((f"S3 {kind}", partial(cold_samples, kind=kind, url=below)))
    return {"cold": rows}


def main() -> None:
    """Do one turn, and print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("url")
    parser.add_argument("work", type=Path)
    parser.add_argument("do", choices=("put", *ARMS))
    options = parser.parse_args()
    if options.do == "put":
        put_state(options.kind, options.url, options.work)
        return
    state, figures = RESTORE_CALLS[options.do](options.kind, options.url, options.work)
    if state is not None and tensor_digests(state) != json.loads((options.work / DIGESTS).read_text()):
        raise SystemExit("what was restored is not what was saved")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
