"""A look at the spool by what has changed sees what a look at everything sees."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from support.seeds import seeds
from support.world import RUN, attempt, commit, corrupt, part

from tierd.core.manifest import MANIFEST_NAME
from tierd.core.timeline.launch_chain import Head, LaunchRecord
from tierd.daemon import spool_observer
from tierd.daemon.daemon_timings import USUAL
from tierd.daemon.spool_observer import SpoolObserver
from tierd.spool import run_records
from tierd.spool.spool import Spool


def age(spool: Spool, seconds: float = 60.0) -> None:
    """Have everything that lies there be of some time ago."""
    then = time.time_ns() - int(seconds * 1e9)
    for path in [spool.root / RUN, *(spool.root / RUN).glob("*")]:
        if path.is_dir():
            os.utime(path, ns=(then, then))
    for path in (spool.control / run_records.SAVED / RUN).glob("*"):
        os.utime(path, ns=(then, then))


def observed(eye: SpoolObserver, *, sparing: bool = False) -> tuple[object, ...]:
    place = eye.observe(sparing=sparing)
    defects = [(which, type(why)) for which, why in place.defects()]
    seen = {one: (found.ranks, found.facts) for one, found in place.checkpoints.items()}
    marks = place.launches, place.restored, place.committed
    return seen, defects, eye.touched, set(eye.childless), place.quarantined.keys(), marks


@pytest.fixture
def opened(monkeypatch) -> list:
    real, found = Spool.list_parts, []
    monkeypatch.setattr(Spool, "list_parts", lambda self, one: found.append(one.step) or real(self, one))
    return found


def test_observer_reads_only_changed_checkpoints_again_and_keeps_the_other_objects(tmp_path: Path, opened):
    spool = Spool(tmp_path)
    for step in range(5):
        commit(spool, part(step, world=2))
    age(spool)
    eye = SpoolObserver(spool)
    first = eye.observe()
    assert eye.observe() is first  # with all that was worked out of it
    opened.clear()
    commit(spool, part(3, rank=1, world=2))
    second = eye.observe()
    assert opened == [3]
    assert second.checkpoints[part(3).checkpoint].complete
    assert all(second.checkpoints[part(step).checkpoint] is first.checkpoints[part(step).checkpoint] for step in (0, 4))


@pytest.mark.parametrize("sparing", [False, True])
def test_of_a_checkpoint_of_many_ranks_an_observation_reads_only_the_records_that_changed(
    tmp_path: Path, monkeypatch, sparing: bool
):
    """A flush of each of 300 parts observes the spool twice, and read 300 records each time."""
    spool, read = Spool(tmp_path), []
    for rank in range(30):
        commit(spool, part(1, rank=rank, world=30))
    age(spool)
    eye, real = SpoolObserver(spool), run_records.open_plain
    assert eye.observe().committed == {part(1, rank=rank, world=30) for rank in range(30)}
    monkeypatch.setattr(run_records, "open_plain", lambda path: read.append(path.name) or real(path))
    eye.observe(sparing=sparing)
    assert read == []
    commit(spool, part(2, rank=7, world=30))
    assert part(2, rank=7, world=30) in eye.observe(sparing=sparing).committed
    assert [name.rpartition(".")[2] for name in read] == [part(2, rank=7, world=30).name]


def test_heads_of_finished_runs_are_read_once(tmp_path: Path, monkeypatch):
    """Each finished run leaves one for good, which notices a rollback when the run comes back."""
    spool, read, then_ns = Spool(tmp_path), [], time.time_ns() - 60 * 10**9

    def write(run: str, counter: int) -> None:
        launches = {attempt(1): LaunchRecord(resumed_from=None, newest=1)}
        head = Head(version=1, run=run, by="", counter=counter, before=None, written="", launches=launches)
        run_records.record_head(spool.control, head)
        os.utime(spool.control / run_records.TIMELINE / f"{run}.json", ns=(then_ns, then_ns))

    for run in ("a", "b"):
        write(run, 1)
    eye, real = SpoolObserver(spool), run_records.open_plain
    assert {run: head.counter for run, (head,) in eye.observe().heads.items()} == {"a": 1, "b": 1}
    monkeypatch.setattr(run_records, "open_plain", lambda path: read.append(path.name) or real(path))
    assert eye.observe().heads.keys() == {"a", "b"} and read == []
    write("b", 2)  # of the same size and time
    assert {run: head.counter for run, (head,) in eye.observe().heads.items()} == {"a": 1, "b": 2}
    assert read == ["b.json"]
    (spool.control / run_records.TIMELINE / "a.json").unlink()
    assert eye.observe().heads.keys() == {"b"}


def test_second_change_within_the_same_tick_is_observed(tmp_path: Path):
    spool = Spool(tmp_path)
    commit(spool, part(1, world=2))
    eye = SpoolObserver(spool)
    home = spool.root / RUN / part(1).checkpoint.name
    eye.observe()
    stamp = home.stat().st_mtime_ns
    commit(spool, part(1, rank=1, world=2))
    os.utime(home, ns=(stamp, stamp))
    assert eye.observe().checkpoints[part(1).checkpoint].complete


def test_a_manifest_that_was_replaced_is_read_again_when_somebody_says_so_and_once_a_minute(
    tmp_path: Path, monkeypatch
):
    spool = Spool(tmp_path)
    commit(spool, part(1))
    age(spool)
    eye = SpoolObserver(spool)
    assert not list(eye.observe().defects())
    corrupt(spool.path(part(1)) / MANIFEST_NAME)
    eye.invalidate(part(1).checkpoint)
    assert [which for which, _ in eye.observe().defects()] == [part(1)]
    commit(spool, part(2))
    age(spool)
    eye.observe()
    corrupt(spool.path(part(2)) / MANIFEST_NAME)
    later = time.monotonic() + USUAL.full_observation_s
    monkeypatch.setattr(spool_observer.time, "monotonic", lambda: later)
    assert [which for which, _ in eye.observe().defects()] == [part(1), part(2)]


def changed_by_tierd(spool: Spool, rng: random.Random, what: int, count: int) -> int:
    """Commit (0 to 3), remove (4) or quarantine (5) parts; how many were committed so far, of which `count` before."""
    parts = spool.parts()
    match what:
        case 0 | 1 | 2 | 3:
            count += 1
            commit(spool, part(count // 2, rank=count % 2, world=2, launch=1 + count // 8), {"a": b"1"})
        case 4 if parts:
            spool.remove(rng.sample(parts, min(2, len(parts))))
        case 5 if parts:
            spool.quarantine(rng.choice(parts))
    return count


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_observer_equals_a_fresh_observer_after_any_changes(tmp_path: Path, seed):
    rng, spool = random.Random(seed), Spool(tmp_path)
    eye, count = SpoolObserver(spool), 0
    for _ in range(12):
        what = rng.randint(0, 7)
        if what == 6 and (parts := spool.parts()):
            shutil.rmtree(spool.path(rng.choice(parts)))
        elif what == 7:
            (spool.root / RUN / part(90 + count).checkpoint.name).mkdir(parents=True, exist_ok=True)
        else:
            count = changed_by_tierd(spool, rng, what, count)
        if rng.random() < 0.5 and (spool.root / RUN).exists():
            age(spool, 100.0 - count)  # each time another one
            observed(eye)
        assert observed(eye) == observed(SpoolObserver(spool))


@pytest.mark.parametrize("seed", seeds(weight=2))
def test_sparing_observation_equals_a_full_observation_after_any_changes_by_tierd(tmp_path: Path, seed):
    rng, spool = random.Random(seed), Spool(tmp_path)
    eye, count = SpoolObserver(spool), 0
    for _ in range(12):
        count = changed_by_tierd(spool, rng, rng.randint(0, 5), count)
        if rng.random() < 0.5 and (spool.root / RUN).exists():
            age(spool, 100.0 - count)
            observed(eye, sparing=rng.random() < 0.5)
        assert observed(eye, sparing=True) == observed(SpoolObserver(spool))


def test_a_checkpoint_that_lost_a_part_is_asked_about_by_sparing_looks_from_then_on(tmp_path: Path):
    spool = Spool(tmp_path)
    for rank in range(2):
        commit(spool, part(1, rank=rank, world=2))
    age(spool)
    eye = SpoolObserver(spool)
    eye.observe()
    shutil.rmtree(spool.path(part(1, rank=1, world=2)))
    assert not eye.observe().lists(part(1, rank=1, world=2))
    commit(spool, part(1, rank=1, world=2))
    assert eye.observe(sparing=True).lists(part(1, rank=1, world=2))


def test_sparing_observation_reads_checkpoints_that_may_get_parts_and_the_next_reads_the_others(
    tmp_path: Path, monkeypatch
):
    spool, asked = Spool(tmp_path), []
    for step in range(5):
        commit(spool, part(step, world=2 if step == 3 else 1))
    age(spool)
    eye, stamp = SpoolObserver(spool), spool.stamp
    eye.observe()
    monkeypatch.setattr(spool, "stamp", lambda path: asked.append(Path(path).name) or stamp(path))
    eye.observe(sparing=True)
    assert asked == [RUN, part(3).checkpoint.name]
    shutil.rmtree(spool.path(part(1)))
    assert not eye.observe().lists(part(1))
