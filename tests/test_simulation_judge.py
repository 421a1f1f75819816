"""The judge of the simulation's whole lives (`faults.simulation.keeper`): what it accepts at rest, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults.rounds import Lost
from faults.simulation.keeper import Keeper
from faults.simulation.rules import Rules, Saved, is_on
from faults.simulation.store import Bucket

DAY = 86400.0


class Region:
    """One node, `A`, with an empty spool; each tier keeps the last two, and what is saved lies where it is put."""

    def __init__(self, home: Path, *, configured: bool) -> None:
        self.now = 0.0
        self.near, self.far = Bucket("near"), Bucket("far")
        two = {"near": Rules(2), "far": Rules(2)}
        self.keeper = Keeper(lambda: self.now, two, Rules(1), [self.near, self.far], hold_for=3600.0)
        self.keeper.spools = lambda: {"A": home}
        self.keeper.started("A", configured=configured)

    def save(
        self, step: int, *tiers: Bucket, node: str = "A", launch: int = 1, origin: tuple[int, int] | None = None
    ) -> None:
        self.keeper.begun(Saved("run", launch, step, origin, node, float(step), float(step), float(step)))
        self.keeper.acked.add(("run", launch, step))
        for tier in tiers:
            key = f"run/manifests/{step:012}.{launch:012x}-{launch:08x}/00000-of-00001.json"
            tier.put(key, json.dumps({"run": "run", "files": []}).encode(), "A")

    def silence(self, tier: Bucket) -> None:
        self.keeper.asked("A", tier.name, answers=False)
        self.now += 2 * DAY


def test_a_run_that_left_an_unconfigured_daemon_keeps_the_default(tmp_path: Path) -> None:
    region = Region(tmp_path, configured=False)
    for step in (1, 2, 3):
        region.save(step, region.near, region.far)
    assert len(region.keeper.at_rest()) == 2  # its daemon may be given a configuration while it has the run
    region.keeper.departs("A", "run")
    assert region.keeper.at_rest() == []


@pytest.mark.parametrize(
    "why", ["more than the default", "less", "configured", "recorded", "trained again", "elsewhere"]
)
def test_and_nothing_else_is_taken_for_the_default(tmp_path: Path, why: str) -> None:
    region = Region(tmp_path, configured=why == "configured")
    steps = {"more than the default": (1, 2, 3, 4), "less": (3,)}.get(why, (1, 2, 3))
    for step in (1, 2, 3, 4)[: max(steps)]:
        region.save(step, *([region.near] if step in steps else ()), region.far)
    if why == "recorded":
        for tier in (region.near, region.far):
            key = "run/retention/00000000.configuration.json"
            region.keeper.changed(tier, key, None, b"{}", "A")
    if why == "elsewhere":  # another node saved the newest, and is the one that prunes
        region.save(5, region.near, region.far, node="B")
    region.keeper.departs("A", "run")
    if why == "trained again":
        region.save(4, region.near, region.far)
    assert [wrong for wrong in region.keeper.at_rest() if wrong.startswith("near holds")]


def test_checkpoint_that_only_a_silent_tier_has_cannot_be_sent_to_another(tmp_path: Path) -> None:
    region = Region(tmp_path, configured=True)
    region.save(1, region.near, region.far)
    region.save(2, region.near)
    region.silence(region.near)
    region.keeper.departs("A", "run")
    region.keeper.asked("A", "near", answers=True)
    assert region.keeper.at_rest() == []
    region.save(3, region.near)
    assert [wrong for wrong in region.keeper.at_rest() if wrong.startswith("far holds")]


def test_checkpoint_on_an_answering_tier_must_be_sent_before_the_run_leaves(tmp_path: Path) -> None:
    region = Region(tmp_path, configured=True)
    region.save(1, region.near)
    region.save(2, region.near, region.far)
    region.silence(region.far)
    region.keeper.asked("A", "far", answers=True)
    region.now += DAY
    region.keeper.departs("A", "run")
    assert [wrong for wrong in region.keeper.at_rest() if wrong.startswith("far holds")]


@pytest.mark.parametrize("reported", [True, False])
def test_launch_that_only_a_head_names_decides_the_restored_checkpoint(tmp_path: Path, reported: bool) -> None:
    """FORMAT.md: the newest attempt is the newest in any manifest or head, also if nothing of it can be read. Seed
    1000105: B restored where only A's spool had the newest launch, and a head on the tier told of it."""
    region = Region(tmp_path, configured=True)
    region.save(2, region.near)
    region.save(5, region.near)
    region.save(3, node="B", launch=3, origin=(1, 2))
    if reported:
        launches = {f"{one:012x}-{one:08x}": {} for one in (1, 3)}
        region.near.put("run/timeline/00000000.json", json.dumps({"launches": launches}).encode(), "B")
    reach = region.keeper.reach("A")
    assert region.keeper.offered("A", "run", reach, 0.0) == ("run", 1, 2 if reported else 5)
    assert is_on(region.keeper.passed("A", "run"), ("run", 1, 5)) is not reported


@pytest.mark.parametrize("later_s", [10.0, 1000.0])
def test_deletion_may_have_been_decided_before_another_copy_was_deleted_for_want_of_room(
    tmp_path: Path, later_s: float
) -> None:
    """Seed 1000039: the spool keeps two. Of three, the oldest was to go, and the second went first, for a full disk."""
    region = Region(tmp_path, configured=True)
    region.keeper.spool = Rules(2)
    homes = [tmp_path / "run" / f"{step:012}.{1:012x}-{1:08x}" / "00000-of-00001" for step in (1, 2, 3)]
    for step, home in enumerate(homes, 1):
        region.save(step, region.near)
        home.mkdir(parents=True)
    region.now = 2000.0
    region.keeper.pressed["A"] += 1
    region.keeper.leaves_spool("A", ("run", 1, 2))
    homes[1].rmdir()
    region.keeper.pressed["A"] -= 1
    region.now += later_s
    if later_s < 100:
        region.keeper.leaves_spool("A", ("run", 1, 1))
    else:
        with pytest.raises(Lost, match="its own rules want"):
            region.keeper.leaves_spool("A", ("run", 1, 1))
