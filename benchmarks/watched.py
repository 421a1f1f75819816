"""What it costs to keep another program's checkpoints, beside `cp`; what `prepare` reads; how long an export takes.

    python -m benchmarks.watched --dir DIR         writes benchmarks/results/watched.json and watched.md

DIR is on the file system to measure, with room for five times the largest state.

- **take**: a program puts a checkpoint of `--gb` (`torch.save`, float32) into a directory at once. The time until it is
  on a tier of the same file system, verified, divided by that of `cp` and `sync` to the same place; in turns. The ten
  seconds without a change for which a watch waits are not part of it, and neither are the pauses of a flush that is
  spread. *Least* is the same work by the simplest code, in one thread: CRC-32 and XXH3 of each byte, a write past the
  page cache, fsync, and XXH3 of the bytes that are read back from the disk. *Polite* is `cp` and `sync` at the
  priority of a daemon's background work, which shows how busy the machine was. CPU seconds are those of the daemon.
- **training beside it**: steps a second of a training process with nothing beside it, beside `cp`, and beside the
  watch, for as long as either takes; in turns.
- **prepare**: the bytes that its process read, as the kernel counts them, divided by those of the checkpoints.
- **export**: the time of an export, with a cold page cache, divided by that of reading the tier's files with `cat`; in
  turns. *Start* is the same command for a checkpoint of 1 MB. *Least* is the same work by the simplest code, in two
  threads: read and XXH3 of each object, decoding, XXH3, a write past the page cache, and one fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import tierd
from tierd.bench.report_page import markdown_table, write_result
from tierd.codec import byte_planes
from tierd.spool.direct_io import PIECE, memory_for, read_into, set_direct, write_pages
from tierd.spool.file_io import digest

RESULT = Path(__file__).parent / "results" / "watched.json"
TIERD = [sys.executable, "-c", "import sys; from tierd.cli import run; sys.exit(run())"]
# A watch that takes what it sees at once, because the wait is not what is measured. With few saves before, no flush is
# spread; SPREAD is the number of saves from which one is.
WATCH = """
import dataclasses, functools, os, sys
from tierd.cli import run
from tierd.core.planning import background_schedule
from tierd.daemon import daemon_timings
from tierd.daemon.intake import intake, unit_watch
background_schedule._FEWEST = int(os.environ["SPREAD"])
quick = dataclasses.replace(daemon_timings.USUAL, watch_s=0.05)
daemon_timings.given = lambda: quick
intake.UnitWatch = functools.partial(unit_watch.UnitWatch, settle_s=0.0)
sys.exit(run())
"""
POLITE = ("nice", "-n", "19", "ionice", "-c", "3")  # the priority of a daemon's background work
TRAIN = """
import sys, time, torch
torch.set_num_threads(1)
layer = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.AdamW(layer.parameters())
data = torch.randn(128, 1024)
print("ready", flush=True)
while True:
    layer(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(time.monotonic(), flush=True)
"""


def cold() -> None:
    """Write everything back, and drop the page cache where that is allowed (root)."""
    os.sync()
    caches = Path("/proc/sys/vm/drop_caches")
    if os.access(caches, os.W_OK):
        caches.write_text("1")


def model(gigabytes: float, seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    count = max(1, round(gigabytes * 16))
    rows = round(gigabytes * 1e9 / count / 4 / 1024)
    return {f"layer{number}.weight": torch.randn(rows, 1024, generator=noise) * 0.02 for number in range(count)}


def timed(command: list[str]) -> tuple[float, float]:
    """The seconds of a command that begins with a cold page cache, and its CPU seconds."""
    cold()
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, command
    return time.monotonic() - begin, used.ru_utime + used.ru_stime


def timed_call(call: Callable[[], object]) -> tuple[float, float]:
    """As `timed`, of a call in this process."""
    cold()
    begin, used = time.monotonic(), time.process_time()
    call()
    return time.monotonic() - begin, time.process_time() - used


# -- take -------------------------------------------------------------------------------------------------------------


class Watching:
    """A watch of `outputs` in a directory, and what it tells."""

    def __init__(self, room: Path, spread_from: int) -> None:
        self.outputs, self.tier = room / "outputs", room / "tier"
        self.outputs.mkdir(parents=True)
        self.tier.mkdir()
        command = ["watch", str(self.outputs), "--run", "watched", "--to", f"file://{self.tier}", "--json"]
        command = [sys.executable, "-c", WATCH, *command, "--keep-last", "1"]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "SPREAD": str(spread_from)},
        )

    def until_durable(self, step: int) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["what"] == "durable" and event["step"] == step:
                return
        raise RuntimeError("the watch has ended")

    def cpu_s(self) -> float:
        """The CPU seconds of the daemon so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)


def copied(source: Path, target: Path, priority: tuple[str, ...] = ()) -> None:
    subprocess.run([*priority, "cp", str(source), str(target)], check=True)
    subprocess.run([*priority, "sync", str(target)], check=True)


def least_take(source: Path, target: Path) -> None:
    """Check, digest, write and read back a file by the simplest code."""
    memory, crc, digests = memory_for(PIECE), 0, []
    with source.open("rb") as file, target.open("xb", buffering=0) as out:
        while length := file.readinto(memory):
            crc = zlib.crc32(memory[:length], crc)
            digests.append(digest(memory[:length]))
            write_pages(out.fileno(), memory[:length], (len(digests) - 1) * PIECE)
        os.fsync(out.fileno())
    with target.open("rb") as file:
        set_direct(file.fileno(), True)
        for number, right in enumerate(digests):
            length = min(PIECE, target.stat().st_size - number * PIECE)
            read_into(file.fileno(), memory, length, number * PIECE)
            assert digest(memory[:length]) == right


class Training:
    """A training process, and the times of its steps on the monotonic clock."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", TRAIN], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def end(self) -> list[float]:
        self._process.terminate()
        said, _ = self._process.communicate(timeout=60)
        return [float(line) for line in re.findall(r"^[0-9.]+$", said, re.MULTILINE)]


@contextmanager
def watching(room: Path, spread_from: int) -> Iterator[Watching]:
    made = Watching(room, spread_from)
    try:
        yield made
    finally:
        made.end()


Arm = Callable[[Path, int], None]  # gets a file and its step


def spans(room: Path, gigabytes: float, step: int, arms: dict[str, Arm]) -> dict[str, tuple[float, float]]:
    """Begin and end of each arm on the monotonic clock, in an order that depends on the step."""
    made = room / "made.pt"
    torch.save(model(gigabytes, step), made)
    found = {}
    first = step % len(arms)
    for arm in (*list(arms)[first:], *list(arms)[:first]):
        os.sync()
        begin = time.monotonic()
        arms[arm](made, step)
        found[arm] = (begin, time.monotonic())
        (room / "copy.pt").unlink(missing_ok=True)
    made.unlink()
    return found


def watched_by(watch: Watching) -> Arm:
    def arm(made: Path, step: int) -> None:
        here = watch.outputs / f"model_{step}.pt"
        os.link(made, here)
        watch.until_durable(step)
        here.unlink()

    return arm


def take(room: Path, gigabytes: float, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = {"cp": [], "polite": [], "least": [], "tierd": []}
    used: list[float] = []

    def taken(made: Path, step: int) -> None:
        before_s = watch.cpu_s()
        watched_by(watch)(made, step)
        used.append((watch.cpu_s() - before_s) / gigabytes)

    with watching(room / "alone", 1 << 30) as watch:
        arms: dict[str, Arm] = {
            "cp": lambda made, _: copied(made, room / "copy.pt"),
            "polite": lambda made, _: copied(made, room / "copy.pt", POLITE),
            "least": lambda made, _: least_take(made, room / "copy.pt"),
            "tierd": taken,
        }
        spans(room, 0.001, 1, arms)  # the daemon has started
        used.clear()
        for step in range(2, rounds + 2):
            for arm, (begin, end) in spans(room, gigabytes, step, arms).items():
                times[arm].append(end - begin)
    shutil.rmtree(room / "alone")
    return {
        "gigabytes": gigabytes,
        "seconds": times,
        "cpu_seconds_per_gb": used,
        **ratios(times["tierd"], times["cp"], times["least"]),
        "load": os.getloadavg()[1],
        "to_polite": statistics.median(a / b for a, b in zip(times["tierd"], times["polite"], strict=True)),
        "least_to_cp": statistics.median(a / b for a, b in zip(times["least"], times["cp"], strict=True)),
    }


def ratios(ours: list[float], theirs: list[float], least: list[float]) -> dict[str, float]:
    """Medians: how often the time of another command, and which share of the least time's pace."""
    return {
        "ratio": statistics.median(one / other for one, other in zip(ours, theirs, strict=True)),
        "share_of_least": statistics.median(other / one for one, other in zip(ours, least, strict=True)),
    }


def training(room: Path, gigabytes: float, rounds: int) -> dict[str, object]:
    rates: dict[str, list[float]] = {"none": [], "cp": [], "tierd": []}
    with watching(room / "beside", 4) as watch:
        arms: dict[str, Arm] = {
            "none": lambda *_: time.sleep(3),
            "cp": lambda made, _: copied(made, room / "copy.pt"),
            "tierd": watched_by(watch),
        }
        for step in range(1, rounds + 1):
            beside = Training()
            try:
                found = spans(room, gigabytes, step, arms)
            finally:
                steps = beside.end()
            for arm, (begin, end) in found.items():
                rates[arm].append(sum(begin <= at < end for at in steps) / (end - begin))
    lost = {
        arm: statistics.median(1 - there / none for there, none in zip(rates[arm], rates["none"], strict=True))
        for arm in ("cp", "tierd")
    }
    return {"steps_per_s": rates, "lost": lost}


# -- prepare ----------------------------------------------------------------------------------------------------------


def read_bytes(command: list[str]) -> tuple[int, float]:
    """The bytes that a process and its threads asked to read, and the seconds that it took."""
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    waited = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    took = time.monotonic() - begin
    counted = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
    assert process.wait() == 0 and waited is not None
    return int(counted["rchar"]), took


def prepare(room: Path, gigabytes: float, units: int) -> dict[str, object]:
    outputs, tier = room / "outputs", room / "tier"
    outputs.mkdir()
    tier.mkdir()
    for step in range(1, units + 1):
        torch.save(model(gigabytes, step), outputs / f"model_{step}.pt")
    size = sum(path.stat().st_size for path in outputs.iterdir())
    common = ["--run", "watched", "--to", f"file://{tier}"]
    (room / "empty").mkdir()
    nothing, _ = read_bytes([*TIERD, "prepare", str(room / "empty"), *common])
    watched = [*TIERD, "watch", str(outputs), *common, "--keep-last", str(units), "--until-idle"]
    subprocess.run(watched, check=True, stdout=subprocess.DEVNULL)
    cold()
    read, took = read_bytes([*TIERD, "prepare", str(outputs), *common])
    plain, _ = timed(["cat", *map(str, outputs.iterdir())])
    return {
        "units": units,
        "bytes": size,
        "read_bytes": read,
        "read_bytes_without_units": nothing,
        "ratio": (read - nothing) / size,
        "seconds": took,
        "cat_s": plain,
    }


# -- export -----------------------------------------------------------------------------------------------------------


def least_export(objects: list[Path], target: Path) -> None:
    """Read, verify, decode, verify and write every object, by the simplest code in two threads."""

    def one(path: Path, offset: int) -> None:
        stored = path.read_bytes()
        digest(stored)
        raw = memoryview(stored) if path.suffix == ".raw" else byte_planes.unpack(stored, raw_size(path))
        digest(raw)
        own = os.open(target, os.O_WRONLY)  # because a write sets and clears O_DIRECT of its descriptor
        write_pages(own, raw, offset)
        os.close(own)

    out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with ThreadPoolExecutor(2) as pool:
        offset, work = 0, []
        for path in objects:
            work.append(pool.submit(one, path, offset))
            offset += raw_size(path)
        for each in work:
            each.result()
    os.fsync(out)
    os.close(out)


def raw_size(path: Path) -> int:
    if path.suffix == ".raw":
        return path.stat().st_size
    with path.open("rb") as file:
        return int(byte_planes.HEAD.unpack(file.read(byte_planes.HEAD.size))[1])


def saved(room: Path, run: str, gigabytes: float) -> list[Path]:
    """Save a checkpoint to the tier, and return the tier's files of the run."""
    tier = room / "tier"
    tier.mkdir(exist_ok=True)
    with tierd.Checkpointer(room / "spool", run, to=[f"file://{tier}"]) as ckpt:
        ckpt.save(1, {"model": model(gigabytes, 1)})
        ckpt.close(wait="file", timeout=1800)
    shutil.rmtree(room / "spool")
    return [path for path in (tier / run).rglob("*") if path.is_file()]


def export(room: Path, gigabytes: float, rounds: int, out: Path) -> dict[str, object]:
    saved(room, "small", 0.001)
    files = saved(room, "export", gigabytes)
    target = out / "exported"

    def command(run: str) -> list[str]:
        return [*TIERD, "export", f"file://{room / 'tier'}", "--run", run, "--to", str(target)]

    objects = [path for path in files if path.suffix in (".planes", ".raw")]  # all but the tree
    packed = sum(path.suffix == ".planes" for path in objects) / len(objects)
    arms: dict[str, Callable[[], tuple[float, float]]] = {
        "cat": lambda: timed(["cat", *map(str, files)]),
        "start": lambda: timed(command("small")),
        "least": lambda: timed_call(lambda: least_export(objects, target)),
        "tierd": lambda: timed(command("export")),
    }
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    used: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, run in arms.items():
            took, cpu = run()
            times[arm].append(took)
            used[arm].append(cpu)
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
    stored = sum(path.stat().st_size for path in files)
    return {
        "raw_bytes": round(gigabytes * 1e9),
        "bytes": stored,
        "compressed_share_of_chunks": packed,
        "seconds": times,
        "cpu_seconds": used,
        **ratios(times["tierd"], times["cat"], times["least"]),
        "least_to_cat": statistics.median(a / b for a, b in zip(times["least"], times["cat"], strict=True)),
    }


# -- the page ---------------------------------------------------------------------------------------------------------


def page(result: dict[str, Any]) -> str:
    """The results as a page of the evidence."""
    taken, beside, prepared, exported = (result[name] for name in ("take", "training", "prepare", "export"))
    spread = {arm: f"{statistics.median(found):.2f} s" for arm, found in taken["seconds"].items()}
    parts = {arm: statistics.median(found) for arm, found in exported["seconds"].items()}
    used = {arm: statistics.median(found) for arm, found in exported["cpu_seconds"].items()}
    called = {
        "cat": "`cat` of the tier's files",
        "start": "the command for 1 MB",
        "least": "least: read, verify, decode, verify, write",
        "tierd": "`tierd export`",
    }
    rows = (
        (
            f"a checkpoint of {taken['gigabytes']:g} GB until it is on a tier, verified, to `cp` and `sync`",
            f"{taken['ratio']:.2f}",
            "1.2",
        ),
        ("the least code that verifies what it wrote, to `cp` and `sync`", f"{taken['least_to_cp']:.2f}", ""),
        ("the watch, as a share of the least code's pace", f"{taken['share_of_least']:.0%}", ""),
        ("the watch, to `cp` and `sync` at its own priority", f"{taken['to_polite']:.2f}", ""),
        ("CPU seconds of the daemon for each GB", f"{statistics.median(taken['cpu_seconds_per_gb']):.2f}", ""),
        (
            "training loses beside a watch; beside `cp`",
            f"{beside['lost']['tierd']:.1%}; {beside['lost']['cp']:.1%}",
            "no more than beside `cp`",
        ),
        (f"bytes that `prepare` reads, to those of {prepared['units']} checkpoints", f"{prepared['ratio']:.4f}", "1"),
        (
            f"an export of {exported['raw_bytes'] / 1e9:g} GB, to `cat` of the tier's files",
            f"{exported['ratio']:.1f}",
            "1.3",
        ),
        ("the least code that decodes and writes, to `cat`", f"{exported['least_to_cat']:.1f}", ""),
        ("the export, as a share of the least code's pace", f"{exported['share_of_least']:.0%}", ""),
    )
    lines = [
        "# What a watch, a `prepare` and an export cost",
        "",
        f"`python -m benchmarks.watched`, {result['created']}: {result['machine']}. Medians of the samples in",
        "`watched.json`; arms of one row were measured in turns. The benchmark's text says what each arm does.",
        "",
        markdown_table(("", "measured", "asked"), rows),
        "",
        "`cp` verifies nothing and reads nothing back. `cat` decodes nothing and writes nothing. So on a fast disk the",
        "rest of the work decides, and *least* is what that work takes at the least. The daemon works at the lowest",
        f"priority, so other work delays a watch more than `cp`, and training loses less: {taken['load']:.0f} "
        f"processes\nwanted the {os.cpu_count()} cores while it was measured. CPU seconds depend less on that.",
        "",
        f"A checkpoint of {taken['gigabytes']:g} GB: `cp` and `sync` {spread['cp']}, least {spread['least']}, a watch "
        f"{spread['tierd']}.",
        "",
        f"Of the exported checkpoint's chunks {exported['compressed_share_of_chunks']:.0%} were compressed. Of",
        f"the export's time, {parts['start'] / parts['tierd']:.0%} is the command's start, which imports torch.",
        "",
        markdown_table(
            ("export", "wall", "CPU"),
            [(text, f"{parts[arm]:.1f} s", f"{used[arm]:.1f} s") for arm, text in called.items()],
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--units", type=int, default=10)
    parser.add_argument("--export-gb", type=float, default=8.0)
    parser.add_argument("--export-to", type=Path, help="where an export is written; --dir if not given")
    parser.add_argument("--only", choices=["take", "training", "prepare", "export"])
    given = parser.parse_args()
    result = json.loads(RESULT.read_text()) if given.only and RESULT.exists() else {}
    parts: dict[str, Callable[[Path], dict[str, object]]] = {
        "take": lambda room: take(room, given.gb, given.rounds),
        "training": lambda room: training(room, given.gb, given.rounds),
        "prepare": lambda room: prepare(room, given.gb, given.units),
        "export": lambda room: export(room, given.export_gb, min(3, given.rounds), given.export_to or room),
    }
    for name, part in parts.items():
        if given.only in (None, name):
            room = given.dir / f"watched-{name}"
            room.mkdir()
            result[name] = part(room)
            shutil.rmtree(room)
            print(name, json.dumps(result[name]))
            machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
            result |= {"created": datetime.now(UTC).date().isoformat(), "machine": machine}
            write_result(RESULT.parent, RESULT.stem, result, page(result) if parts.keys() <= result.keys() else "")


if __name__ == "__main__":
    main()
