"""The two newest checkpoints of each series stay on the tiers, whatever retention keeps of the run.

Judged by the words of docs/explanation/watching.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.by_hand import parts_on
from support.waiting import wait_until
from support.watched_run import RUN, files, watching
from support.whole_layouts import pt, write

from tierd.cli import run
from tierd.core.ids import CheckpointId, pin_key
from tierd.daemon.intake.unit_order import DOUBT_PIN_TEXT, NEWEST_PIN_TEXT

pytestmark = pytest.mark.usefixtures("quick")


def watched(root: Path, tier: Path, *more: str) -> None:
    command = ["watch", str(root), "--run", RUN, "--to", f"file://{tier}", "--keep-last", "1", "--until-idle", *more]
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
    pinned = next(one for one in checkpoints_on(tier) if (tier / pin_key(one)).read_bytes() == NEWEST_PIN_TEXT)
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


def rotate(root: Path, number: int) -> None:
    """ckpt_0.pt is the newest; it is renamed to ckpt_1.pt, and that to ckpt_2.pt, before each save."""
    for old, new in (("ckpt_1.pt", "ckpt_2.pt"), ("ckpt_0.pt", "ckpt_1.pt")):
        if (root / old).exists():
            (root / old).replace(root / new)
    write(root, {"ckpt_0.pt": pt(number)}, 1_000_000 + number)


def test_pins_in_doubt_end_when_a_later_checkpoint_of_the_series_is_on_every_tier(root: Path, tier: Path) -> None:
    for number in range(6):
        rotate(root, number)
        watched(root, tier)
    pinned: dict[str, bytes] = {}
    for _ in range(10):  # a watch that ends as soon as it is idle may not have asked the tier, or pruned, yet
        watched(root, tier)
        pinned = {path.name: path.read_bytes() for path in (tier / RUN / "pins").iterdir()}
        if len(pinned) == 2 and len(checkpoints_on(tier)) == 3:
            break
    assert len(pinned) == 2 and {*pinned.values()} == {DOUBT_PIN_TEXT}, "those of the last renaming"
    assert len(checkpoints_on(tier)) == 3
    assert run(["restore", str(tier), "--run", RUN, "--into", str(root.parent / "new")]) == 0
    assert files(root.parent / "new") == {"ckpt_0.pt": pt(5)}


def test_pin_in_doubt_is_kept_while_no_later_checkpoint_of_the_series_is_certain(root: Path, tier: Path) -> None:
    """A copy without times: step 1000 was copied first."""
    for second, step in enumerate((1000, 800, 900)):
        write(root, {f"a-{step}.pt": pt(step)}, 1_000_000 + second)
    for number in range(2):
        write(root, {f"eval/b-{number}.pt": pt(number)}, 2_000_000 + number)
        watched(root, tier)
    assert 1000 in {one.step for one in checkpoints_on(tier)}
    write(root, {"a-1100.pt": pt(1100)}, 2_000_010)
    for _ in range(3):
        watched(root, tier)
    assert 1000 not in {one.step for one in checkpoints_on(tier)}


def test_pin_in_doubt_that_a_person_removed_is_not_put_again(root: Path, tier: Path) -> None:
    for second, step in enumerate((1000, 800, 900)):
        write(root, {f"a-{step}.pt": pt(step)}, 1_000_000 + second)
    watched(root, tier)
    (pin,) = (tier / RUN / "pins").iterdir()
    assert run(["unpin", RUN, "1000", "--spool", str(root.parent / ".out.tierd"), str(tier)]) == 0
    for _ in range(2):
        watched(root, tier)
    assert not pin.exists()


LAUNCHES = [f"run-20260101_1200{number:02}-{letter * 8}" for number, letter in enumerate("abcdefghijklm")]


def test_pins_of_series_that_were_not_saved_for_longest_are_removed(root: Path, tier: Path) -> None:
    for step, launch in enumerate(LAUNCHES[:5], 1):
        save(root, step, f"{launch}/files")
        watched(root, tier, "--series", "2")
    for _ in range(2):
        watched(root, tier, "--series", "2")
    assert sorted(one.step for one in checkpoints_on(tier)) == [4, 5]


@pytest.mark.parametrize("series", [None, 50])
def test_launches_that_are_each_a_series_are_warned_of(series: int | None, root: Path, tier: Path) -> None:
    with watching(root.parent, "spool", series=series) as daemon:
        warnings = daemon.reconciler.journal.warnings
        for step, launch in enumerate(LAUNCHES, 1):
            assert not warnings or step > 11
            save(root, step, f"{launch}/files")
            wait_until(lambda step=step: any(one.step == step for one in checkpoints_on(tier)))
        if series is None:
            wait_until(lambda: any("series = 3" in why for why in warnings.values()))
        assert bool(warnings) == (series is None), "a person who gave a number knows"


def test_series_that_are_saved_together_are_not_warned_of(root: Path, tier: Path) -> None:
    """Of 13 agents, each is saved at each step."""
    with watching(root.parent, "spool") as daemon:
        for step in (1, 2):
            save(root, step, *LAUNCHES)
            wait_until(lambda step=step: sum(one.step == step for one in checkpoints_on(tier)) == len(LAUNCHES))
        assert not any("series" in why for why in daemon.reconciler.journal.warnings.values())
