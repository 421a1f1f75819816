"""A cold, verified restore beside an unverified download and torch.load: seconds, and CPU seconds of every process.

    eval "$(bash tests/system/s3server.sh env)"
    python benchmarks/restore.py --data fp32-0.5GB.safetensors --work /nvme/work --tree now=. [--tree before=/other]

Invariant: every turn is a process of its own, with an empty spool, and arms take turns round by round, because the
machine may be shared. After each turn the state is compared with the file, byte by byte. The daemon was started before
and has looked at its tier; CPU seconds are of the trainer and of the daemon, from the call to its return.

`--data` is a safetensors file as `flush/checkpoints.py` makes it. Writes `restore.json`, every sample, to `--out`.
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
from pathlib import Path
from typing import Any

BUCKET, RUN = "tierd-restore", "bench"
HERE = Path(__file__).resolve().parent


def s3() -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=os.environ["TIERD_TEST_S3_ENDPOINT"], region_name="us-east-1")


def url(place: str, work: Path) -> str:
    if place == "file":
        return f"file://{work}/tier"
    return f"s3://{BUCKET}/tier?endpoint={os.environ['TIERD_TEST_S3_ENDPOINT']}&addressing=path&region=us-east-1"


def used(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def forget(directory: Path) -> None:
    """Have no page of these files in the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def put(data: Path, work: Path) -> None:
    """Put the checkpoint everywhere."""
    import torch
    from flush import checkpoints

    import tierd

    state = dict(checkpoints.load(data))
    (work / "tier").mkdir(parents=True)
    client = s3()
    client.create_bucket(Bucket=BUCKET)
    with tierd.Checkpointer(work / "put", run=RUN, to=[url("file", work), url("s3", work)]) as checkpointer:
        save = checkpointer.save(1, state)
        for tier in ("file", "s3"):
            save.wait(tier, timeout=600)
    (work / "plain").mkdir()
    torch.save(state, work / "plain" / "state.pt")
    client.upload_file(str(work / "plain" / "state.pt"), BUCKET, "state.pt")


def turn(arm: str, place: str, data: Path, work: Path) -> None:
    """Restore once, and print what it took."""
    import torch
    from flush import checkpoints

    state, spool = dict(checkpoints.blank(data)), work / f"spool-{os.getpid()}"
    for part in ("tier", "plain"):
        forget(work / part)
    if arm == "unverified":
        client, target = s3(), work / f"down-{os.getpid()}.pt"
        client.list_buckets()
        begun, before = time.perf_counter(), used(os.getpid())
        if place == "s3":
            client.download_file(BUCKET, "state.pt", str(target))
        else:
            shutil.copyfile(work / "plain" / "state.pt", target)
        checkpoints.fill(state, torch.load(target, weights_only=True))
        found = {"s": time.perf_counter() - begun, "client_cpu_s": used(os.getpid()) - before, "daemon_cpu_s": 0.0}
        target.unlink()
    else:
        import tierd

        checkpointer = tierd.Checkpointer(spool, run=RUN, to=[url(place, work)])
        daemon = int((spool / ".tierd" / "lock").read_text())
        time.sleep(2.0)  # it looks at its tier
        before, theirs, begun = used(os.getpid()), used(daemon), time.perf_counter()
        restored = checkpointer.restore(state)
        found = {"s": time.perf_counter() - begun}
        found |= {"client_cpu_s": used(os.getpid()) - before, "daemon_cpu_s": used(daemon) - theirs}
        assert restored is not None and restored.tier == place
        checkpointer.close()
        os.kill(daemon, signal.SIGTERM)
        time.sleep(0.5)
        shutil.rmtree(spool, ignore_errors=True)
    if not checkpoints.same(state, data):
        raise SystemExit("what was restored is not what was saved")
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=DIRECTORY", help="a checkout of tierd")
    parser.add_argument("--places", default="file,s3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--do", nargs=2, help=argparse.SUPPRESS)  # one turn: its arm and place
    options = parser.parse_args()
    os.environ["AWS_ACCESS_KEY_ID"] = os.environ["TIERD_TEST_S3_ACCESS_KEY"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = os.environ["TIERD_TEST_S3_SECRET_KEY"]
    work = options.work.absolute()
    if options.do:
        arm, place = options.do
        put(options.data[0], work) if arm == "put" else turn(arm, place, options.data[0], work)
        return
    trees = dict(tree.split("=", 1) for tree in options.tree or [f"now={HERE.parent}"])
    samples: list[dict[str, Any]] = []
    for data in options.data:
        shutil.rmtree(work, ignore_errors=True)
        os.environ["PYTHONPATH"] = next(iter(trees.values()))
        command = [
            sys.executable,
            str(HERE / "restore.py"),
            "--data",
            str(data.absolute()),
            "--work",
            str(work),
            "--do",
        ]
        subprocess.run([*command, "put", "all"], check=True)
        for number in range(options.rounds):
            for place in options.places.split(","):
                for arm in ("unverified", *trees):
                    env = os.environ | {"PYTHONPATH": str(Path(trees.get(arm, HERE.parent)).absolute())}
                    done = subprocess.run(
                        [*command, arm, place], env=env, stdout=subprocess.PIPE, text=True, check=True
                    )
                    figures = json.loads(done.stdout.splitlines()[-1])
                    samples.append({"data": data.stem, "place": place, "arm": arm, "round": number, **figures})
                    print(samples[-1], flush=True)
                    (options.out / "restore.json").write_text(json.dumps({"restores": samples}, indent=1) + "\n")
    client = s3()
    for found in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        for one in found.get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=one["Key"])
    client.delete_bucket(Bucket=BUCKET)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
