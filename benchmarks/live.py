"""Weights that another process follows, beside full copies and least deltas: `python -m benchmarks.live [--steps 6]`.

GPT-2 small in bf16 (249 MB), updated as Adam would from fp32 masters: each parameter by up to the learning rate. In
each step the three ways take turns, with one follower process, over one directory:

- `tierd`: `Checkpointer.save`, and `Reader.live` in the follower;
- `torch.save`: the whole state to a new name, then a rename; the follower loads it and copies it into its tensors;
- `delta`: by `safetensors`, the indices and values of the elements that changed, by the least code. Nothing verifies
  it, and a follower that misses one of them is lost.

The last two wait for fsync. With `--write`, samples go into `results/live.json`, and the table for
`results/live.md` is printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file

import tierd
from benchmarks.sharing import gpt2
from tierd.bench.report_page import markdown_table, write_result

HERE = Path(__file__).resolve().parent
RATES = (3e-6, 3e-5, 1e-4)
POLL_S = 0.02
Weights = dict[str, torch.Tensor]


def checksum(weights: Weights) -> int:
    return sum(int(tensor.view(torch.int16).sum()) for tensor in weights.values())


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(POLL_S)


def follow(home: str, pipe: Connection) -> None:
    """Apply each step by the way that the trainer names, and answer when, with the pause and the bytes that came."""
    torch.set_num_threads(1)
    weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in gpt2()}
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with (
        tierd.open(f"file://{home}/tier", run="live") as reader,
        reader.live(weights, only="model", period_s=POLL_S) as live,
    ):
        while (order := pipe.recv()) is not None:
            way, step = order
            path = Path(home, f"{way}-{step}")
            if way == "tierd":
                began_s, update = time.monotonic(), live.update()
                while update is None or update.step < step:
                    time.sleep(POLL_S / 4)
                    began_s, update = time.monotonic(), live.update()
                size = update.fetched_bytes
            else:
                wait_for(path)
                size = path.stat().st_size
                loaded = torch.load(path, weights_only=True) if way == "torch.save" else load_file(path)
                began_s = time.monotonic()
                apply(way, other, loaded)
            ended_s = time.monotonic()
            digest = sum(
                int(tensor.view(torch.int16).sum()) for tensor in (weights if way == "tierd" else other).values()
            )
            pipe.send((ended_s, ended_s - began_s, size, digest))


def apply(way: str, weights: Weights, loaded: Weights) -> None:
    for name, tensor in weights.items():
        if way == "torch.save":
            tensor.copy_(loaded[name])
        elif f"{name}/at" in loaded:
            tensor.view(-1)[loaded[f"{name}/at"].long()] = loaded[f"{name}/to"]


def write(way: str, home: Path, step: int, weights: Weights, before: Weights) -> None:
    path, content = home / f"{way}-{step}.new", weights
    if way == "delta":
        content = {}
        for name, tensor in weights.items():
            at = (tensor.view(torch.int16) != before[name].view(torch.int16)).view(-1).nonzero().view(-1).int()
            content |= {f"{name}/at": at, f"{name}/to": tensor.view(-1)[at.long()]} if len(at) else {}
        save_file(content, path)
    else:
        torch.save(content, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    path.rename(home / f"{way}-{step}")
    (home / f"{way}-{step - 2}").unlink(missing_ok=True)


def publish(save: tierd.Save, done: dict[str, float]) -> None:
    def wait() -> None:
        with suppress(tierd.CheckpointNotFound):
            save.wait("file")
            done["verified_s"] = time.monotonic()

    threading.Thread(target=wait, daemon=True).start()


def measure(steps: int, home: Path) -> list[dict[str, float | str]]:
    samples: list[dict[str, float | str]] = []
    (home / "tier").mkdir(parents=True)
    torch.manual_seed(0)
    masters = {name: torch.randn(shape) * 0.02 for name, shape in gpt2()}
    weights = {name: tensor.bfloat16() for name, tensor in masters.items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    before = zeros
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    follower = multiprocessing.get_context("spawn").Process(target=follow, args=(str(home), theirs), daemon=True)
    step = 0
    with tierd.Checkpointer(
        home / "spool", run="live", to=[f"file://{home}/tier"], retention=tierd.Retention(keep_last=3)
    ) as ckpt:
        follower.start()
        for rate in (0.0, *(rate for rate in RATES for _ in range(steps))):
            step += 1
            if rate:
                before = weights
                for tensor in masters.values():
                    tensor.add_(torch.rand_like(tensor).sub_(0.5), alpha=2 * rate)
                weights = {name: tensor.bfloat16() for name, tensor in masters.items()}
            expected = checksum(weights)
            ways = ("tierd", "torch.save", "delta")
            for way in ways[step % 3 :] + ways[: step % 3]:
                ours.send((way, step))
                began_s, done = time.monotonic(), dict[str, float]()
                if way == "tierd":
                    publish(ckpt.save(step, {"model": weights}), done)
                else:
                    write(way, home, step, weights, before)
                blocked_s = time.monotonic() - began_s
                ended_s, pause_s, size, theirs_checksum = ours.recv()
                assert theirs_checksum == expected, f"{way}: other weights"
                sample = {"way": way, "rate": rate, "bytes": size, "blocked_s": blocked_s, "pause_s": pause_s}
                sample["seconds"] = ended_s - began_s
                if way == "tierd":
                    time.sleep(0.3)  # the waiter's answer
                    sample["verified_s"] = done.get("verified_s", began_s) - began_s
                samples.append(sample)
        ours.send(None)
        follower.join()
    return samples


def table(samples: list[dict[str, float | str]]) -> str:
    rows = []
    size = sum(torch.Size(shape).numel() * 2 for _, shape in gpt2())
    for rate in RATES:
        for way in ("tierd", "torch.save", "delta"):
            chosen = [sample for sample in samples if (sample["way"], sample["rate"]) == (way, rate)]

            def middle(key: str, chosen: list[dict[str, float | str]] = chosen) -> float:
                return median(float(sample[key]) for sample in chosen)

            seconds = sorted(float(sample["seconds"]) for sample in chosen)
            rows.append(
                (
                    f"{rate:g}",
                    way,
                    f"{middle('bytes') / 1e6:.1f} MB ({100 * middle('bytes') / size:.0f} %)",
                    f"{middle('seconds'):.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})",
                    f"{1000 * middle('blocked_s'):.0f} ms",
                    f"{1000 * middle('pause_s'):.0f} ms",
                )
            )
    head = ("learning rate", "way", "bytes a step", "save to swapped, s", "trainer blocked", "follower's pause")
    return markdown_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="published steps at each learning rate")
    parser.add_argument("--dir", type=Path, help="where the spool and the tier are made")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory(dir=given.dir) as home:
        samples = measure(given.steps, Path(home))
    print(table(samples))
    if given.write:
        write_result(HERE / "results", "live", {"steps": given.steps, "samples": samples})


if __name__ == "__main__":
    main()
