"""Restores in a new process: verified from tierd's spool, or by torch.load.

Invariant: the model, its optimizer and their memory exist before, and the files are not in the page cache. Only the
load from the files into these objects is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

import tierd
from tierd.bench.training import Training

WAYS = ("tierd", "torch.load")


def make(training: Training, directory: Path) -> None:
    """Save once for each kind of restore."""
    torch.save(training.state_dict(), directory / "state.pt")
    with tierd.Checkpointer(directory / "spool", run="bench", to=[]) as ckpt:
        ckpt.save(training.number, training.state).wait()


def restore(kind: str, training: Training, directory: Path) -> float:
    """Wait for a line on standard input, restore, and return the seconds."""
    if kind == "torch.load":
        _ready()
        start_s = time.perf_counter()
        state = torch.load(directory / "state.pt", mmap=False, weights_only=True, map_location="cpu")
        training.load_state_dict(state)
        training.finish()
        return time.perf_counter() - start_s
    with tierd.Checkpointer(directory / "spool", run="bench", to=[]) as ckpt:
        state = training.state
        _ready()
        start_s = time.perf_counter()
        restored = ckpt.restore(state)
        training.finish()
        restore_s = time.perf_counter() - start_s
    if restored is None:
        raise FileNotFoundError(f"{directory}: no checkpoint in the spool")
    return restore_s


def _ready() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def main() -> None:
    """Run `make`, or restore as one of `WAYS` and print the seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=("make", *WAYS))
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("directory", type=Path)
    parser.add_argument("device")
    options = parser.parse_args()
    training = Training(options.gigabytes, options.device)
    training.step()
    if options.do == "make":
        make(training, options.directory)
    else:
        print(restore(options.do, training, options.directory), flush=True)


if __name__ == "__main__":
    main()
