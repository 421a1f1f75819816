"""`tierd bench growth`: the whole run, and the files that it writes.

Invariant: a run that ends early leaves the parts that it had finished. Parts that are not asked for keep the samples
that lie in `growth.json`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from tierd.bench import procfs, training
from tierd.bench.growth import attached, checkpoints, cold, decoding, flushes, page, values
from tierd.bench.growth import training as beside
from tierd.bench.growth.measured import Rows
from tierd.bench.growth.page import TITLES
from tierd.bench.growth.result import FORMAT, GrowthResult
from tierd.bench.overhead import versions
from tierd.core.errors import ConfigError

JSON, MARKDOWN = "growth.json", "growth.md"


def growth(
    only: Sequence[str],
    scale: float,
    s3: str,
    directory: Path | None,
    out: Path | None,
    say: Callable[[str], None],
) -> GrowthResult:
    """Measure these parts, and write the files to `out` after each row.

    Args:
        only: names of parts, as in `TITLES`.
        scale: so many times as many checkpoints and runs.
        s3: the URL of a place in a bucket, for cold restores; empty for none.

    Raises:
        ConfigError: an option cannot be used.
    """
    if unknown := set(only) - set(TITLES):
        raise ConfigError(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(TITLES)}")
    if not 0 < scale <= 1:
        raise ConfigError("--scale: a number above 0 and at most 1")
    rows_by_part: dict[str, Rows] = checkpoints.parts(scale) | values.parts() | flushes.parts() | decoding.parts()
    rows_by_part |= attached.parts() | cold.parts(s3) | beside.parts(say)
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir=directory) as scratch:
        result = GrowthResult(
            format=FORMAT,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=procfs.machine(Path(scratch), training.threads(), versions()),
        )
        _take_over(result, out)
        for part in (part for part in TITLES if part in only):
            result.parts[part], result.measured[part] = {}, result.created[:10]
            for row, measure in rows_by_part[part]:
                say(f"{part}: {row}")
                with tempfile.TemporaryDirectory(dir=scratch) as home:
                    result.parts[part][row] = measure(Path(home))
                if out is not None:
                    write(result, out)
    return result


def _take_over(result: GrowthResult, out: Path | None) -> None:
    """Take over what an earlier run left in `out`."""
    path = out / JSON if out else None
    if path is not None and path.exists():
        before = msgspec.json.decode(path.read_bytes(), type=GrowthResult)
        result.parts, result.measured = before.parts, before.measured


def write(result: GrowthResult, out: Path) -> None:
    """Write the samples and the page."""
    out.mkdir(parents=True, exist_ok=True)
    (out / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    (out / MARKDOWN).write_text(page.page(result), encoding="utf-8")
