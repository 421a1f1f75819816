"""A restore from the spool alone reads the newest few manifests, and finds what it would find by reading all."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from support.seeds import seeds
from support.world import RUN, attempt, commit, corrupt, part

from tierd.client.ranks.ranks import Ranks
from tierd.client.restoring import part_source
from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.restorer import Restorer
from tierd.core.errors import TierdError
from tierd.core.ids import CheckpointId
from tierd.core.manifest import MANIFEST_NAME
from tierd.spool.spool import Spool


def restored(spool: Spool, *, deep: bool = False, **asked):
    """What a restore of all files finds: step, attempt, and what it passed over; or its error."""
    restorer = Restorer(NodeSource(spool, RUN, tiers=False), Ranks(0, 1))
    restorer.source.deep = deep
    try:
        found = restorer.restore(asked.pop("step", None), None, **asked)
    except TierdError as error:
        return type(error), str(error)
    return found and (found.part, [str(one) for one in found.skipped], max(found.attempts), found.unreached)


@pytest.fixture
def counted(monkeypatch) -> list:
    read, real = [], Spool.manifest

    def manifest(self, which):
        read.append(which)
        return real(self, which)

    monkeypatch.setattr(Spool, "manifest", manifest)
    return read


def test_a_restore_reads_the_manifests_of_the_newest_few_alone(tmp_path: Path, counted):
    spool = Spool(tmp_path)
    for step in range(12):
        commit(spool, part(step))
    assert restored(spool)[0] == part(11)
    assert {one.checkpoint.step for one in counted} == {8, 9, 10, 11} and len(counted) == 5  # the last one once more


@pytest.mark.parametrize("bad", [1, 3, 4, 7, 9])
def test_restore_continues_past_the_newest_checkpoints_where_they_are_corrupt(tmp_path: Path, bad):
    spool = Spool(tmp_path)
    for step in range(10):
        commit(spool, part(step))
    for step in range(10 - bad, 10):
        corrupt(spool.path(part(step)) / "weights.bin")
    found = restored(spool)
    assert found[0] == part(9 - bad)
    assert [one.partition(" (")[0] for one in found[1]] == [f"step {step}" for step in range(9, 9 - bad, -1)]


def test_checkpoint_older_than_the_newest_few_is_restored_by_its_step_and_is_not_gone(tmp_path: Path):
    spool = Spool(tmp_path)
    for step in range(10):
        commit(spool, part(step, rank=0, world=2))
        commit(spool, part(step, rank=1, world=2)) if step < 2 else None
    assert restored(spool, step=1)[0] is not None
    spool = Spool(tmp_path / "other")
    for step in reversed(range(10)):  # the last commit is step 0
        commit(spool, part(step))
    view = part_source.NodeSource(spool, RUN, tiers=False, line=None, keep=True).run_view()
    assert view.down_to == (attempt(1), 6) and not view.gone
    assert restored(spool)[1] == []


def test_restore_begins_no_fresh_run_past_hollow_checkpoints(tmp_path: Path):
    spool = Spool(tmp_path)
    for step in range(6):
        commit(spool, part(step))
    for step in range(5):
        (spool.root / RUN / CheckpointId(RUN, attempt(9), step).name / "00000-of-00001").mkdir(parents=True)
    assert restored(spool)[0] == part(5)


def history(spool: Spool, rng: random.Random) -> None:
    """A few launches that resume from each other, with checkpoints that are incomplete, corrupt, or names alone."""
    origin = None
    for launch in range(1, rng.randint(2, 6)):
        written = []
        for step in sorted(rng.sample(range(20), rng.randint(1, 6))):
            size = rng.choice((1, 1, 1, 1, 2))
            for rank in range(size):
                one = part(step, launch, rank, size)
                commit(spool, one, {"a": bytes([step])}, origin=origin)
                path = spool.path(one)
                match rng.randint(0, 9):
                    case 0:
                        corrupt(path / "a")
                    case 1:
                        corrupt(path / MANIFEST_NAME)
                    case 2:
                        shutil.rmtree(path)
                    case 3:
                        spool.quarantine(one)
                    case _:
                        written.append(one.checkpoint)
        origin = rng.choice(written) if written else origin
    for _ in range(rng.choice((0, 0, 1, 5))):
        planted = CheckpointId(RUN, attempt(rng.randint(1, 9)), rng.randint(0, 30))
        (spool.root / RUN / planted.name / "00000-of-00001").mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("seed", seeds(weight=8))
def test_lazy_restore_chooses_the_same_checkpoint_as_reading_every_manifest(tmp_path: Path, seed):
    spool = Spool(tmp_path / "spool")
    history(spool, random.Random(seed))
    shutil.copytree(tmp_path / "spool", tmp_path / "copy", symlinks=True)
    lazily = restored(spool)
    every = restored(Spool(tmp_path / "copy"), deep=True)
    assert str(lazily).replace(str(spool.root), "") == str(every).replace(str(tmp_path / "copy"), "")
