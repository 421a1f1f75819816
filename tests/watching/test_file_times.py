"""Retention of a watched run whose files have wrong times.

Judged by the words of docs/explanation/deletion.md.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.by_hand import parts_on
from support.waiting import wait_until
from support.watched_run import RUN, watching
from support.whole_layouts import pt, write

from tierd.cli import run

_BEGIN_S = 1_700_000_000
_DAY_S = 86_400


def keep(root: Path, tier: Path, *steps: int, minutes: int = 10, future: int | None = None) -> list[int]:
    """Save these steps, so many minutes apart, and watch; return the steps on a tier that keeps one day."""
    for step in steps:
        wrong_by_s = 2 * _DAY_S if step == future else 0
        write(root, {f"step_{step}/w.pt": pt(step)}, _BEGIN_S + 60 * minutes * step + wrong_by_s)
    file = root.parent / "tierd.toml"
    file.write_text(
        f'spool = "{root.parent}/spool"\n[[tier]]\nname = "t"\nurl = "file://{tier}"\n'
        f'retention = {{ keep_last = 1, keep_within = "1d" }}\n[[watch]]\ndirectory = "{root}"\nrun = "{RUN}"\n'
    )
    for _ in range(2):
        assert run(["run", "--config", str(file), "--until-idle"]) == 0
    return sorted(step for step, *_ in parts_on(tier, RUN))


@pytest.mark.usefixtures("quick")
def test_file_of_the_future_makes_no_other_checkpoint_old(root: Path, tier: Path) -> None:
    assert keep(root, tier, 1, 2, 3) == [1, 2, 3]
    assert keep(root, tier, 4, future=4) == [1, 2, 3, 4]
    assert keep(root, tier, 5, 6) == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("quick")
def test_keep_within_deletes_checkpoints_of_watched_run(root: Path, tier: Path) -> None:
    """Of checkpoints 10 h apart: the longest step is not counted, so that 3 and 4 are 20 h and 10 h old."""
    assert keep(root, tier, 1, 2, 3, 4, 5, 6, minutes=600) == [3, 4, 5, 6]


@pytest.mark.usefixtures("quick")
def test_old_file_counts_as_verified_when_it_is_taken(root: Path, tier: Path) -> None:
    write(root, {"step_1/w.pt": pt(1)}, _BEGIN_S)
    began = datetime.now(UTC).replace(microsecond=0)
    with watching(root.parent, "spool", scrub="7d") as daemon:
        scrubber = daemon.reconciler.scrubber

        def oldest() -> str | None:
            daemon.call(scrubber.next("local"))
            return scrubber.status().oldest

        wait_until(oldest)
        status = scrubber.status()
    assert status.oldest is not None and datetime.fromisoformat(status.oldest) >= began and status.due == 0
