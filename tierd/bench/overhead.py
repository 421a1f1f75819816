"""`tierd bench overhead`: the whole run, and the files that it writes.

Invariant: the printed figures are those in the files. A run that ends early leaves the sizes that it had finished.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec
import torch

from tierd.bench import drive, page, plot, procfs, training
from tierd.bench.arms import ARMS
from tierd.bench.result import FORMAT, Result, measured_cost
from tierd.core.errors import ConfigError

JSON, MARKDOWN, PNG = "overhead.json", "overhead.md", "overhead.png"
_PACKAGES = ("tierd", "torch", "torch_checkpointing")


def overhead(
    sizes: Sequence[float],
    rounds: Sequence[int],
    arms: Sequence[str],
    steps_per_save: int | None,
    directory: Path | None,
    out: Path | None,
    say: Callable[[str], None],
    device: str = "cpu",
) -> Result:
    """Measure, and write the files to `out` after each size.

    Args:
        device: where training runs, `"cpu"` or `"cuda"`.

    Raises:
        ConfigError: an option cannot be used.
        ChildProcessError: an arm failed; the message has the end of its log.
    """
    counts = _check(sizes, rounds, arms)
    name = _check_device(device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=directory) as scratch:
        place = Path(scratch)
        result = Result(
            format=FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=procfs.machine(place, training.threads(), versions()),
            options={
                "sizes": ",".join(f"{size:g}" for size in sizes),
                "rounds": ",".join(map(str, rounds)),
                "arms": ",".join(arms),
                "every": str(steps_per_save or "by the step's time"),
                "device": name,
            },
            sizes=[],
        )
        for size, count in zip(sizes, counts, strict=True):
            result.sizes.append(drive.measure(size, arms, count, steps_per_save, place, say, device))
            result.advise = measured_cost(result.sizes)
            if out is not None:
                write(result, out, say)
    return result


def write(result: Result, out: Path, say: Callable[[str], None]) -> None:
    """Write the three files."""
    (out / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    missing = plot.draw(result, out / PNG)
    if missing:
        say(missing)
    (out / MARKDOWN).write_text(page.page(result, None if missing else PNG), encoding="utf-8")


def _check(sizes: Sequence[float], rounds: Sequence[int], arms: Sequence[str]) -> list[int]:
    """Check the options and return the number of rounds of each size."""
    if not sizes or min(sizes) <= 0:
        raise ConfigError("--sizes: one or more numbers above 0, in GB")
    if not rounds or min(rounds) < 1 or len(rounds) not in (1, len(sizes)):
        raise ConfigError("--rounds: one number of at least 1, or one for each of --sizes")
    unknown = [arm for arm in arms if arm not in ARMS]
    if unknown or not arms:
        raise ConfigError(f"--arms: {', '.join(unknown) or 'none given'}; there are {', '.join(ARMS)}")
    return list(rounds) * (len(sizes) // len(rounds))


def _check_device(device: str) -> str:
    """Check that the device exists and return its name."""
    if device == "cpu":
        return device
    if device != "cuda":
        raise ConfigError(f"--device {device}: cpu or cuda")
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; leave it out to measure on the CPU")
    return torch.cuda.get_device_name()


def versions() -> dict[str, str]:
    """The versions of the packages that are compared, if they are installed."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed
