"""The two newest checkpoints of each series stay on the tiers, whatever retention keeps of the run.

Judged by the words of docs/howto/watch.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.by_hand import parts_on
from support.watched_run import RUN, files
from support.whole_layouts import pt, write

from tierd.cli import run
from tierd.core.ids import CheckpointId, pin_key
from tierd.daemon.intake.series_pins import TEXT

pytestmark = pytest.mark.usefixtures("quick")


def watched(root: Path, tier: Path) -> None:
    command = ["watch", str(root), "--run", RUN, "--to", f"file://{tier}", "--keep-last", "1", "--until-idle"]
    assert run(command) == 0


def save(root: Path, step: int, *names: str) -> None:
    write(root, {f"{name}/step_{step}/w.pt": pt(step, len(name)) for name in names}, 1_000_000 + step)


def checkpoints_on(tier: Path) -> list[CheckpointId]:
    return [CheckpointId(RUN, attempt, step) for step, attempt, _, _ in parts_on(tier, RUN)]


def test_series_that_is_saved_seldom_is_not_deleted_by_another_series(root: Path, tier: Path) -> None:
    save(root, 1, "actor", "best")
    watched(root, tier)
    for step in (2, 3, 4, 5):
        save(root, step, "actor")
        watched(root, tier)
    watched(root, tier)
    assert sorted(one.step for one in checkpoints_on(tier)) == [1, 4, 5]
    assert run(["restore", str(tier), "--run", RUN, "--into", str(root.parent / "new")]) == 0
    assert files(root.parent / "new") == {"actor/step_5/w.pt": pt(5, 5), "best/step_1/w.pt": pt(1, 4)}


def test_first_watch_keeps_each_series(root: Path, tier: Path) -> None:
    for step in (1, 2, 3):
        save(root, step, "actor")
    save(root, 1, "best")
    watched(root, tier)
    assert run(["restore", str(tier), "--run", RUN, "--into", str(root.parent / "new")]) == 0
    assert set(files(root.parent / "new")) == {"actor/step_3/w.pt", "best/step_1/w.pt"}


def test_pin_of_a_person_is_kept(root: Path, tier: Path) -> None:
    save(root, 1, "actor", "best")
    watched(root, tier)
    pinned = next(one for one in checkpoints_on(tier) if (tier / pin_key(one)).read_bytes() == TEXT)
    (tier / pin_key(pinned)).write_bytes(b"")  # as `tierd pin` puts it
    for step in (2, 3, 4):
        save(root, step, "actor", "best")
        watched(root, tier)
    watched(root, tier)
    assert pinned in checkpoints_on(tier) and sorted(one.step for one in checkpoints_on(tier)) == [1, 3, 3, 4, 4]


def test_one_series_is_not_pinned(root: Path, tier: Path) -> None:
    for step in (1, 2, 3):
        save(root, step, "actor")
        watched(root, tier)
    assert not (tier / RUN / "pins").exists()
