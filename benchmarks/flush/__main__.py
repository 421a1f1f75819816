"""What it takes to get a checkpoint to S3 and back, and what training feels of it. One command:

    eval "$(bash tests/system/s3server.sh env)"
    python benchmarks/flush --dir /nvme --peer-python /path/to/venv/bin/python

    a   save -> committed and verified on S3, beside DCP + zstd + boto3's upload
    d   restore on a fresh node, from S3 and from a directory, beside an unverified download and torch.load
    e   the daemon's memory while it flushes, and a training's steps beside it

Checkpoints are real ones: a transformer is trained on real text first (`checkpoints.py`) and kept in --dir for the next
run. Every arm's turn is a process of its own, turns interleave round by round, and after each one the results so far
are written: flush.json (every sample) and flush.md. Nothing of a run stays on the server.

The peer needs torch, safetensors, zstandard and boto3; where the venv that runs this has boto3 as well (of the version
whose botocore aiobotocore pins), --peer-python is not needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import checkpoints
import host
import measures
import msgspec
from bench import Bench
from page import FORMAT, Result, page, verdicts

from tierd.bench import process_counters
from tierd.bench.report_page import write_result

HERE = Path(__file__).resolve().parent

_TOLD = ("parts", "sizes", "sizes_e", "rounds", "rounds_e", "window", "train_steps", "train_seconds")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up, as Ctrl-C does
    options = _options()
    kinds, parts = options.kinds.split(","), options.parts.split(",")
    sizes, beside = _numbers(options.sizes), _numbers(options.sizes_e or options.sizes)
    directory = options.dir.absolute() / "tierd-flush"
    directory.mkdir(parents=True, exist_ok=True)
    env = host.environment(options.endpoint)
    wanted = {(kind, size) for size in sizes for kind in kinds} if {"a", "d"} & set(parts) else set()
    if "e" in parts:  # those that a training cannot save live
        wanted |= {("fp32", size) for size in beside if not measures.lives(size)}
    data = _data(wanted, directory, options.train_steps, options.train_seconds, env)
    bucket = host.Bucket(options.endpoint, env, options.reclaim)
    try:
        rounds = dict.fromkeys("ad", options.rounds) | {"e": options.rounds_e or options.rounds}
        bench = Bench(directory, bucket, env, options.peer_python, rounds, options.window, _say)
        result = Result(
            format=FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=process_counters.describe_machine(directory, 1, {}),
            server=bucket.server,
            options={name: str(value) for name in _TOLD if (value := getattr(options, name)) is not None},
            data=data,
            cache_dropped=True,
            cases=bench.cases,
        )
        bench.save = lambda: _write(result, bench, options.out)
        for part in parts:
            for size in beside if part == "e" else sizes:
                if part == "a":
                    measures.saves(bench, size, kinds)
                elif part == "d":
                    measures.restores(bench, size, kinds)
                else:
                    measures.beside(bench, size, options.places_e.split(","), options.small)
        bench.save()
    finally:
        bucket.close()
    for verdict in verdicts(result):
        print(f"{verdict.what}: {verdict.measured} ({verdict.spread}): {verdict.met}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="a,d,e")
    parser.add_argument("--sizes", default="1", metavar="GB,…", help="of parts a and d")
    parser.add_argument("--sizes-e", metavar="GB,…", help="of part e; not given, as --sizes")
    parser.add_argument("--kinds", default=",".join(checkpoints.KINDS), help="of parts a and d")
    parser.add_argument("--places-e", default="file,s3", help="the tiers of part e")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rounds-e", type=int, help="of part e; not given, as --rounds")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of training alone, beside each flush")
    parser.add_argument("--small", type=float, default=1.0, metavar="GB", help="training that saves what is too large")
    parser.add_argument("--train-steps", type=int, default=200)
    parser.add_argument("--train-seconds", type=float, default=300.0, help="at most, for each checkpoint")
    parser.add_argument("--endpoint", default=os.environ.get("TIERD_TEST_S3_ENDPOINT", "http://127.0.0.1:7480"))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--reclaim", metavar="COMMAND", help="run after deleting objects, to have their space back")
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to measure; needs ten times the size")
    parser.add_argument("--out", type=Path, default=HERE.parent / "results")
    return parser.parse_args()


def _data(
    wanted: set[tuple[str, float]], directory: Path, steps: int, seconds: float, env: dict[str, str]
) -> dict[str, dict[str, str]]:
    """Make the checkpoints that are not there yet, each in a process of its own; how each was made."""
    found = {}
    for kind, size in sorted(wanted, key=lambda pair: (pair[1], pair[0])):
        path = checkpoints.file_of(directory, kind, size)
        if not path.exists():
            _say(f"{size:g} GB {kind}: training for at most {steps} steps or {seconds:g} s")
            arguments = (kind, str(size), str(path), str(steps), str(seconds))
            subprocess.run([sys.executable, str(HERE / "checkpoints.py"), *arguments], env=env, check=True)
        found[f"{kind}, {size:g} GB"] = checkpoints.about(path)
    return found


def _write(result: Result, bench: Bench, out: Path) -> None:
    """Both files, so far."""
    packages = host.versions(bench.peer_packages)
    result.machine = msgspec.structs.replace(result.machine, packages=packages)
    result.cache_dropped = bench.dropped
    write_result(out, "flush", result, page(result))


def _numbers(text: str) -> Sequence[float]:
    return [float(word) for word in text.split(",")]


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
