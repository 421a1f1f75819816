"""A look at the spool by what has changed sees what a look at everything sees."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from support.world import RUN, commit, corrupt, part

from tierd.core.manifest import MANIFEST_NAME
from tierd.daemon import spool_observer
from tierd.daemon.spool_observer import SpoolObserver
from tierd.spool.spool import Spool


def age(spool: Spool, seconds: float = 60.0) -> None:
    """Have everything that lies there be of some time ago."""
    then = time.time_ns() - int(seconds * 1e9)
    for path in [spool.root / RUN, *(spool.root / RUN).glob("*")]:
        if path.is_dir():
            os.utime(path, ns=(then, then))


def looked(eye: SpoolObserver) -> tuple[object, ...]:
    place = eye.look()
    defects = [(which, type(why)) for which, why in place.defects()]
    seen = {one: (found.ranks, found.facts) for one, found in place.checkpoints.items()}
    return seen, defects, eye.touched, set(eye.childless), place.quarantined.keys(), place.launches, place.restored


@pytest.fixture
def opened(monkeypatch) -> list:
    real, found = Spool.look_into, []
    monkeypatch.setattr(Spool, "look_into", lambda self, one: found.append(one.step) or real(self, one))
    return found


def test_only_what_changed_is_read_again_and_the_rest_is_the_same_object(tmp_path: Path, opened):
    spool = Spool(tmp_path)
    for step in range(5):
        commit(spool, part(step, world=2))
    age(spool)
    eye = SpoolObserver(spool)
    first = eye.look()
    assert eye.look() is first  # with all that was worked out of it
    opened.clear()
    commit(spool, part(3, rank=1, world=2))
    second = eye.look()
    assert opened == [3]
    assert second.checkpoints[part(3).checkpoint].complete
    assert all(second.checkpoints[part(step).checkpoint] is first.checkpoints[part(step).checkpoint] for step in (0, 4))


def test_a_second_change_within_the_same_tick_is_seen(tmp_path: Path):
    spool = Spool(tmp_path)
    commit(spool, part(1, world=2))
    eye = SpoolObserver(spool)
    home = spool.root / RUN / part(1).checkpoint.name
    eye.look()
    stamp = home.stat().st_mtime_ns
    commit(spool, part(1, rank=1, world=2))
    os.utime(home, ns=(stamp, stamp))
    assert eye.look().checkpoints[part(1).checkpoint].complete


def test_a_manifest_that_was_replaced_is_read_again_when_somebody_says_so_and_once_a_minute(
    tmp_path: Path, monkeypatch
):
    spool = Spool(tmp_path)
    commit(spool, part(1))
    age(spool)
    eye = SpoolObserver(spool)
    assert not list(eye.look().defects())
    corrupt(spool.path(part(1)) / MANIFEST_NAME)
    eye.doubt(part(1).checkpoint)
    assert [which for which, _ in eye.look().defects()] == [part(1)]
    commit(spool, part(2))
    age(spool)
    eye.look()
    corrupt(spool.path(part(2)) / MANIFEST_NAME)
    monkeypatch.setattr(spool_observer, "_FULL_S", 0.0)
    assert [which for which, _ in eye.look().defects()] == [part(1), part(2)]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_it_sees_what_a_fresh_look_sees(tmp_path: Path, seed):
    rng, spool = random.Random(seed), Spool(tmp_path)
    eye, count = SpoolObserver(spool), 0
    for _ in range(12):
        parts = spool.parts()
        match rng.randint(0, 7):
            case 0 | 1 | 2 | 3:
                count += 1
                commit(spool, part(count // 2, rank=count % 2, world=2, launch=1 + count // 8), {"a": b"1"})
            case 4 if parts:
                spool.remove([rng.choice(parts)])
            case 5 if parts:
                spool.quarantine(rng.choice(parts))
            case 6 if parts:
                shutil.rmtree(spool.path(rng.choice(parts)))
            case 7:
                (spool.root / RUN / part(90 + count).checkpoint.name).mkdir(parents=True, exist_ok=True)
        if rng.random() < 0.5 and (spool.root / RUN).exists():
            age(spool, 100.0 - count)  # each time another one
            looked(eye)
        assert looked(eye) == looked(SpoolObserver(spool))
