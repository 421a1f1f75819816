"""The newest checkpoint of each series, by time and then by step, sorts last in it, is pinned, and is put back.

Judged by the words of docs/explanation/watching.md: "The newest of each comes back, even if a policy keeps fewer".
"""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.seeds import seeds
from support.watched_run import RUN, files, take
from support.whole_layouts import pt, write

from tierd.cli import run
from tierd.core.ids import CheckpointId
from tierd.spool.spool import Spool
from tierd.watching.checkpoint_names import KnownCheckpoints, name_unit

_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
# Equal times, as after a tar or on a file system of whole seconds; times within a millisecond; and others.
GAPS_US = (0, 100, 900, 1_000, 2_000, 1_000_000)


@st.composite
def saves(draw: st.DrawFn) -> list[tuple[str, int, datetime]]:
    """Saves of several series, each a path's directory, a step and a time; times mostly grow with steps."""
    drawn = list[tuple[str, int, datetime]]()
    at_us = 0
    for step in range(1, draw(st.integers(2, 4)) + 1):
        for series in draw(st.permutations(["actor", "critic", "x"]))[: draw(st.integers(1, 3))]:
            at_us += draw(st.sampled_from(GAPS_US))
            drawn.append((series, step, _EPOCH + timedelta(microseconds=at_us)))
    return drawn


def named(units: list[tuple[str, int, datetime]]) -> dict[str, dict[CheckpointId, tuple[datetime, int]]]:
    """Name units in this order, and return each series' checkpoints."""
    known = KnownCheckpoints()
    names: dict[str, dict[CheckpointId, tuple[datetime, int]]] = {}
    for series, step, made in units:
        own = names.setdefault(series, {})
        at = {one: when for one, (when, _) in own.items()}
        got = name_unit(RUN, f"{series}/step_{step}", step, made, known, None, at)
        assert got.checkpoint not in known.created
        known = known.with_checkpoint(got.checkpoint, made, got.origin)
        own[got.checkpoint] = made, step
    return names


@given(saves(), st.randoms(use_true_random=False))
def test_newest_of_series_has_last_name_in_any_order_of_taking(
    drawn: list[tuple[str, int, datetime]], chance: random.Random
) -> None:
    chance.shuffle(drawn)
    for own in named(drawn).values():
        assert own[max(own)] == max(own.values())


@given(saves())
def test_series_keeps_its_order_when_newest_is_taken_first(drawn: list[tuple[str, int, datetime]]) -> None:
    for own in named(sorted(drawn, key=lambda one: (one[2], one[1]), reverse=True)).values():
        assert [own[one] for one in sorted(own)] == sorted(own.values())


def test_rolled_back_program_keeps_its_timeline() -> None:
    """Step 300 is of a launch from before; step 100 is the one from which the program resumed."""
    at = [_EPOCH + timedelta(seconds=second) for second in range(4)]
    names = named([("a", 200, at[3]), ("a", 300, at[2]), ("a", 100, at[1])])["a"]
    attempts = {step: one.attempt for one, (_, step) in names.items()}
    assert attempts[100] == attempts[200] > attempts[300]


def save(root: Path, series: str, step: int, at_ns: int) -> None:
    write(root, {f"{series}/step_{step}/net.pt": pt(step, len(series))}, 0)
    os.utime(root / f"{series}/step_{step}/net.pt", ns=(at_ns, at_ns))


def test_first_watch_pins_newest_of_series_with_equal_times(root: Path, tier: Path, quick: None) -> None:
    for step in (1, 2, 3):
        for series in ("actor", "critic"):
            save(root, series, step, (1_790_000_000 + step) * 10**9)
    for _ in range(2):
        assert run(["watch", str(root), "--run", RUN, "--to", f"file://{tier}", "--until-idle"]) == 0
    expected = {f"{series}/step_3/net.pt": pt(3, len(series)) for series in ("actor", "critic")}
    new = root.parent / "new"
    assert run(["prepare", str(new), "--run", RUN, "--to", f"file://{tier}", "--spool", f"{new}.spool"]) == 0
    assert files(new) == expected
    assert run(["restore", str(tier), "--run", RUN, "--into", str(root.parent / "into")]) == 0
    assert files(root.parent / "into") == expected


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_watch_orders_each_series(seed: int, root: Path, spool: Spool) -> None:
    """Several takes, some of several saves, by which units lie there from the start or appear later."""
    chance, at_ns, saved = random.Random(seed), 1_790_000_000 * 10**9, dict[str, list[int]]()
    for step in range(1, 5):
        for series in chance.sample(["actor", "critic", "x"], chance.randint(1, 3)):
            at_ns += chance.choice(GAPS_US) * 1000
            save(root, series, step, at_ns)
            saved.setdefault(series, []).append(step)
        if chance.random() < 0.5:
            take(spool, root)
    take(spool, root)
    order = dict[str, list[int]]()
    for part in sorted(spool.parts(RUN)):
        (path,) = (file.path for file in spool.manifest(part).files if file.path != "unit.json")
        order.setdefault(path.split("/")[0], []).append(part.checkpoint.step)
    assert order == saved
