"""What moving a checkpoint's bytes costs: tierd's S3 store beside other clients, in MB/s and CPU-seconds per GB.

    python benchmarks/clients.py --rgw http://127.0.0.1:7480      # S3, from tests/system/s3server.sh
    python benchmarks/clients.py --nginx                          # WebDAV PUT on tmpfs: the server costs little

Invariant: every client moves the same incompressible bytes, as objects of one size, `--at-once` of them at a time, from
memory to memory, in a process of its own whose CPU time is the kernel's account of it, after one object that connects;
clients take turns, round by round. A client that is not installed, or that the server does not suit, is named with the
reason.

Run it with a Python that has the clients; tierd is found beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BUCKET, NGINX_PORT = "tierd-clients", 7491
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testkey", "AWS_SECRET_ACCESS_KEY": "testsecret"}


class Job:
    """What one client process does: `count` objects of `size` bytes, `at_once` at a time."""

    def __init__(self, server: str, endpoint: str, size: int, count: int, at_once: int) -> None:
        self.server, self.endpoint, self.size, self.count, self.at_once = server, endpoint, size, count, at_once
        self.source = [random.Random(number).randbytes(size) for number in range(at_once)]  # BytesIO shares `bytes`
        self.target = [memoryview(bytearray(b"x" * size)) for _ in range(at_once)]

    def key(self, number: int) -> str:
        return f"checkpoint/{number:04}"

    async def measure(self, move: Callable[[int, int], Awaitable[Any]]) -> dict:
        """Move every object; `move(number, slot)` one of them. The first goes before, to connect."""
        await move(0, 0)
        left = iter(range(self.count))

        async def lane(slot: int) -> None:
            for number in left:
                await move(number, slot)

        used, begun = cpu(), time.perf_counter()
        await asyncio.gather(*(lane(slot) for slot in range(self.at_once)))
        return {"seconds": time.perf_counter() - begun, "cpu": cpu() - used}


def cpu() -> float:
    """CPU-seconds of this process, and of the children that it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


async def tierd(job: Job, operation: str) -> dict:
    """S3Store: one request an object, a verified CRC-64/NVME where the server has it."""
    sys.path.insert(0, str(HERE.parent))
    from tierd.core.urls import parse_url
    from tierd.stores.s3.s3_store import S3Store

    store = S3Store(parse_url(f"s3://{BUCKET}/t?endpoint={job.endpoint}&addressing=path&region=us-east-1"))
    if operation == "put":
        result = await job.measure(lambda number, slot: store.put(job.key(number), job.source[slot]))
        result["verified"] = await store.put("last", b"x")
    else:
        result = await job.measure(lambda number, slot: store.get(job.key(number), job.target[slot]))
    await store.aclose()
    return result


def boto_client(job: Job) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, max_pool_connections=64, retries={"total_max_attempts": 1})
    return boto3.client("s3", endpoint_url=job.endpoint, region_name="us-east-1", config=config)


class Into(io.RawIOBase):
    """A file over a buffer, for clients that write to files; each tier worker writes its own."""

    def __init__(self, view: memoryview) -> None:
        self.view, self.at = view, 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset
        return offset

    def write(self, data: Any) -> int:
        self.view[self.at : self.at + len(data)] = data
        self.at += len(data)
        return len(data)


async def boto3_transfer(job: Job, operation: str) -> dict:
    """The transfer manager's defaults: parts of 8 MiB, 10 threads an object. Against nginx one part an object."""
    from boto3.s3.transfer import TransferConfig

    client, threads = boto_client(job), ThreadPoolExecutor(job.at_once)
    config = TransferConfig() if job.server == "rgw" else TransferConfig(multipart_threshold=1 << 40)
    loop = asyncio.get_running_loop()

    def put(number: int, slot: int) -> None:
        client.upload_fileobj(io.BytesIO(job.source[slot]), BUCKET, "b/" + job.key(number), Config=config)

    def get(number: int, slot: int) -> None:
        client.download_fileobj(BUCKET, "b/" + job.key(number), Into(job.target[slot]), Config=config)

    one = put if operation == "put" else get
    return await job.measure(lambda number, slot: loop.run_in_executor(threads, one, number, slot))


async def boto3_plain(job: Job, operation: str) -> dict:
    """put_object and get_object().read(), in threads; botocore's default checksums."""
    client, threads, loop = boto_client(job), ThreadPoolExecutor(job.at_once), asyncio.get_running_loop()

    def put(number: int, slot: int) -> None:
        client.put_object(Bucket=BUCKET, Key="p/" + job.key(number), Body=io.BytesIO(job.source[slot]))

    def get(number: int, slot: int) -> None:
        data = client.get_object(Bucket=BUCKET, Key="p/" + job.key(number))["Body"].read()
        assert len(data) == job.size

    one = put if operation == "put" else get
    return await job.measure(lambda number, slot: loop.run_in_executor(threads, one, number, slot))


async def s3fs(job: Job, operation: str) -> dict:
    """_pipe_file in one request, and _cat_file."""
    from s3fs import S3FileSystem

    fs = S3FileSystem(
        asynchronous=True,
        endpoint_url=job.endpoint,
        client_kwargs={"region_name": "us-east-1"},
        config_kwargs={"s3": {"addressing_style": "path"}, "max_pool_connections": 64},
    )
    session = await fs.set_session()

    async def put(number: int, slot: int) -> None:
        await fs._pipe_file(f"{BUCKET}/f/{job.key(number)}", job.source[slot], chunksize=job.size + 1)

    async def get(number: int, slot: int) -> None:
        assert len(await fs._cat_file(f"{BUCKET}/f/{job.key(number)}")) == job.size

    result = await job.measure(put if operation == "put" else get)
    await session.close()
    return result


async def obstore(job: Job, operation: str) -> dict:
    """put_async in one request, and get_async."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, endpoint=job.endpoint, region="us-east-1", client_options={"allow_http": True, "timeout": "300s"}
    )

    async def put(number: int, slot: int) -> None:
        await obstore.put_async(store, "o/" + job.key(number), job.source[slot], use_multipart=False)

    async def get(number: int, slot: int) -> None:
        data = await (await obstore.get_async(store, "o/" + job.key(number))).bytes_async()
        assert len(data) == job.size

    return await job.measure(put if operation == "put" else get)


async def s3torchconnector(job: Job, operation: str) -> dict:
    """S3Client's writer and reader, as its checkpoints use them."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(force_path_style=True)
    client = S3Client("us-east-1", endpoint=job.endpoint, s3client_config=config)
    threads, loop = ThreadPoolExecutor(job.at_once), asyncio.get_running_loop()

    def put(number: int, slot: int) -> None:
        with client.put_object(BUCKET, "c/" + job.key(number)) as writer:
            writer.write(job.source[slot])

    def get(number: int, slot: int) -> None:
        reader = client.get_object(BUCKET, "c/" + job.key(number))
        assert reader.readinto(job.target[slot]) == job.size

    one = put if operation == "put" else get
    return await job.measure(lambda number, slot: loop.run_in_executor(threads, one, number, slot))


async def rclone(job: Job, operation: str) -> dict:
    """`rclone copy`, files on tmpfs; one request an object. Its start, and the files' copy, are counted."""
    env = os.environ | {
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_S3_PROVIDER": "Ceph" if job.server == "rgw" else "Other",
        "RCLONE_S3_ENDPOINT": job.endpoint,
        "RCLONE_S3_ENV_AUTH": "true",
        "RCLONE_S3_NO_CHECK_BUCKET": "true",
        "RCLONE_S3_UPLOAD_CUTOFF": "4G",
        "RCLONE_RETRIES": "1",
        "RCLONE_LOW_LEVEL_RETRIES": "1",
        "RCLONE_TRANSFERS": str(job.at_once),
    }
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        if operation == "put":
            for number in range(job.count):
                Path(directory, f"{number:04}").write_bytes(job.source[number % job.at_once])
        remote = f":s3:{BUCKET}/r"
        way = [directory, remote] if operation == "put" else [remote, directory]
        used, begun = cpu(), time.perf_counter()
        command = ["rclone", "copy", "--ignore-times", *way]
        done = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        result = {"seconds": time.perf_counter() - begun, "cpu": cpu() - used}
        if operation == "get":
            assert len(list(Path(directory).iterdir())) == job.count
    return result


CLIENTS = {
    "tierd": tierd,
    "boto3 transfer manager": boto3_transfer,
    "boto3 put/get_object": boto3_plain,
    "s3fs": s3fs,
    "obstore": obstore,
    "s3torchconnector": s3torchconnector,
    "rclone": rclone,
}


def child(arguments: list[str]) -> None:
    name, operation, server, endpoint, *sizes = arguments
    job = Job(server, endpoint, *map(int, sizes))
    print(json.dumps(asyncio.run(CLIENTS[name](job, operation))))


def measured(name: str, operation: str, server: str, endpoint: str, *sizes: int) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, operation, server, endpoint]
    env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | CREDENTIALS
    env |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}
    try:
        done = subprocess.run([*command, *map(str, sizes)], env=env, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return {"error": "no end within 300 s"}
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "rror" in line] or [f"exit {done.returncode}"]
        return {"error": lines[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def nginx() -> Iterator[str]:
    """An nginx on loopback that takes objects to tmpfs and gives them back; it knows no S3."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierd-nginx-") as directory:
        home = Path(directory)
        (home / "root").mkdir()
        config = home / "nginx.conf"
        config.write_text(f"""
            daemon off; user root; pid {home}/pid; error_log {home}/error.log; worker_processes 2;
            events {{}}
            http {{ access_log off; sendfile on; client_max_body_size 0; client_body_temp_path {home}/body;
                   client_body_buffer_size 1m; keepalive_requests 1000000;
                   server {{ listen 127.0.0.1:{NGINX_PORT}; root {home}/root;
                            add_header ETag x;
                            location / {{ dav_methods PUT DELETE; create_full_put_path on; }} }} }}""")
        process = subprocess.Popen([shutil.which("nginx") or "/usr/sbin/nginx", "-c", config])
        try:
            time.sleep(1)
            yield f"http://127.0.0.1:{NGINX_PORT}"
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait(20)


@contextmanager
def rgw(endpoint: str) -> Iterator[str]:
    """A bucket on the S3 server, emptied and removed afterwards."""
    os.environ.update(CREDENTIALS)
    client = boto_client(Job("rgw", endpoint, 0, 0, 0))
    client.create_bucket(Bucket=BUCKET)
    try:
        yield endpoint
    finally:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for item in page.get("Contents", ()):
                client.delete_object(Bucket=BUCKET, Key=item["Key"])
        client.delete_bucket(Bucket=BUCKET)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def page(result: dict[str, dict]) -> str:
    """The Markdown page of everything measured so far, both servers."""
    lines = [
        "# S3 clients beside each other",
        "",
        "Written by `benchmarks/clients.py`; medians (and ranges) of rounds.",
        "",
    ]
    for server, run in result.items():
        at, of = run["at_once"], f"{run['count']} objects of {run['size'] >> 20} MiB"
        lines += [f"## {server}: {of}, {at} at once", "", f"{run['cpu']}; {run['rounds']} rounds; {run['date']}.", ""]
        lines += [
            "| client | put MB/s | put CPU-s/GB | get MB/s | get CPU-s/GB |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for name, samples in run["samples"].items():
            row, why = [name], []
            for operation in ("put", "get"):
                good = [sample for sample in samples[operation] if "error" not in sample]
                why += [sample["error"] for sample in samples[operation] if "error" in sample][:1]
                moved = run["size"] * run["count"]
                speeds = [moved / 1e6 / sample["seconds"] for sample in good]
                costs = [sample["cpu"] / (moved / 1e9) for sample in good]
                for values, form in ((speeds, ".0f"), (costs, ".2f")):
                    spread = f" ({min(values):{form}}-{max(values):{form}})" if values else ""
                    row.append(f"{statistics.median(values):{form}}{spread}" if values else "-")
            lines.append("| " + " | ".join(row) + " |")
            if why:
                lines.append(f"| | {why[0].replace('|', '/')} | | | |")
        lines.append("")
    lines += ["## What each does", "", *(f"- **{name}**: {run.__doc__}" for name, run in CLIENTS.items()), ""]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rgw", metavar="URL", help="endpoint of an S3 server with the test keys")
    parser.add_argument("--nginx", action="store_true", help="start one, and measure against it")
    parser.add_argument("--size", type=int, default=64, help="MiB an object")
    parser.add_argument("--count", type=int, default=16, help="objects")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CLIENTS), help="clients, separated by commas")
    parser.add_argument(
        "--between", help="a shell command to run between rounds, such as the server's garbage collection"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results")
    options = parser.parse_args()
    places = [("nginx", nginx())] * options.nginx + [("rgw", rgw(options.rgw))] * bool(options.rgw)
    store = options.out / "clients.json"
    result = json.loads(store.read_text()) if store.exists() else {}
    for server, place in places:
        sizes = options.size << 20, options.count, options.at_once
        names = options.only.split(",")
        run = dict(zip(("size", "count", "at_once"), sizes, strict=True), rounds=0, cpu=processor())
        run |= {"date": time.strftime("%Y-%m-%d"), "samples": {name: {"put": [], "get": []} for name in names}}
        with place as endpoint:
            for number in range(options.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    for operation in ("put", "get"):
                        sample = measured(name, operation, server, endpoint, *sizes)
                        run["samples"][name][operation].append(sample)
                        print(number, server, name, operation, sample, flush=True)
                run["rounds"] = number + 1
                result[server] = run
                store.write_text(json.dumps(result, indent=1) + "\n")
                (options.out / "clients.md").write_text(page(result))
                if options.between:
                    subprocess.run(options.between, shell=True, check=False, capture_output=True)


if __name__ == "__main__":
    main()
