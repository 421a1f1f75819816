"""Four ranks on two nodes with a daemon each: kill ranks, daemons and nodes, and go on as if nothing had happened.

The same as `tests/system/test_ranks_s3.py` does on S3, smaller.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest
from support.ranked import Directory, Point, cluster, complete, resumes
from support.ranked_kills import Killer, a_launch_lives_on, a_node_is_replaced, finish
from support.world import part

from tierd.core.config import Config, TierConfig
from tierd.core.ids import PartId
from tierd.core.planning.actions import Flush
from tierd.core.planning.copies import ManifestFacts
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.plan import plan
from tierd.core.retention.policy import RetentionPolicy

pytestmark = pytest.mark.timeout(400)

SEED = int(os.environ.get("TIERD_TEST_SEED", "1"))
KILLS = 6


@pytest.fixture
def made(tmp_path):
    with cluster(tmp_path, Directory(tmp_path / "tier")) as made:
        yield made


def test_every_rank_continues_where_it_was_after_any_kill(made):
    with Killer(made, SEED) as killer:
        killer.run(KILLS)
        finish(made)


def test_an_empty_node_takes_over_and_another_world_size_is_refused(made):
    a_node_is_replaced(made)


def test_a_zombie_launch_harms_nobody_but_itself(made):
    a_launch_lives_on(made)


A, B, C = (f"{number:012x}-{number:08x}" for number in (1, 2, 3))
ALL = {0, 1, 2, 3}


def test_judge_asks_for_every_rank_and_follows_the_timeline():
    seen = {Point(A, 5): ALL, Point(A, 10): ALL, Point(A, 15): ALL, Point(B, 15): {0, 1, 2}}
    whole = complete(seen)
    assert whole == {Point(A, 5), Point(A, 10), Point(A, 15)}
    assert resumes(seen, whole, {A: None, B: Point(A, 10)}) == Point(A, 10)
    assert resumes(seen, whole | {Point(B, 15)}, {A: None, B: Point(A, 10)}) == Point(B, 15)
    assert resumes({*seen, Point(C, 5)}, whole, {A: None, B: Point(A, 10), C: None}) is None
    assert resumes({}, (), {}) is None


def test_saves_that_outrun_flushes_still_leave_whole_checkpoints_on_the_tier():
    """Two nodes, two ranks each; a node flushes one part while both of its ranks save one more."""
    policy = RetentionPolicy(keep_last=3)
    config = Config(spool="/spool", tier=(TierConfig(name="tier", url="file:///tier", retention=policy),))
    facts = ManifestFacts(datetime(2026, 1, 1, tzinfo=UTC), {}, None, 1, 1, frozenset())
    spools: list[dict[PartId, ManifestFacts]] = [{}, {}]
    tier: dict[PartId, ManifestFacts] = {}
    for step in range(1, 31):
        for node, spool in enumerate(spools):
            spool |= {part(step, rank=rank, world=4): facts for rank in (2 * node, 2 * node + 1)}
            actions = plan(Inventory(Place.of(spool), {"tier": Place.of(tier)}), config, {}, 0.0)
            tier |= {next(action.part for action in actions if isinstance(action, Flush)): facts}
    found = Place.of(tier).checkpoints
    assert max((one.step for one, seen in found.items() if seen.usable), default=0) > 20, sorted(found)
