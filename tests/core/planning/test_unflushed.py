"""What is left to flush is told rightly: on no tier, or lacking on some."""

from __future__ import annotations

from support.inventories import checkpoint, part, solo

from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.core.planning.unflushed_parts import (
    TierReadiness,
    UnflushedParts,
    describe_unflushed,
    list_unflushed,
    unflushed_by_tier,
)

STEPS = {step: part(checkpoint(1, step)) for step in range(1, 5)}


def seen(spool: Place, **tiers: Place | None) -> Inventory:
    return Inventory(spool, tiers, 1.0, ())


def spool_of(*steps: int) -> Place:
    return solo(Place(), *(checkpoint(1, step) for step in steps))


def test_parts_on_no_tier_are_distinguished_from_parts_that_a_single_tier_lacks() -> None:
    world = seen(spool_of(1, 2, 3, 4), nfs=spool_of(1, 2), s3=spool_of(1))
    wanted = {(STEPS[step], "nfs") for step in (3, 4)} | {(STEPS[step], "s3") for step in (2, 3, 4)}
    left = list_unflushed(world, wanted)
    assert [(one.part, one.on, one.lacks) for one in left] == [
        (STEPS[4], (), ("nfs", "s3")),
        (STEPS[3], (), ("nfs", "s3")),
        (STEPS[2], ("nfs",), ("s3",)),
    ]
    assert describe_unflushed(left) == (
        f"2 parts are on no tier: {STEPS[4]}, {STEPS[3]}; 1 more is on nfs and not on s3"
    )
    assert unflushed_by_tier(left) == {"nfs": (2, 20), "s3": (3, 30)}


def test_part_that_no_tier_wants_is_not_left() -> None:
    assert list_unflushed(seen(spool_of(1, 2), nfs=spool_of(2)), set()) == ()
    assert describe_unflushed(()) == "nothing is left: every part is on every tier that wants it"


def test_a_tier_that_did_not_answer_may_lack_everything() -> None:
    left = list_unflushed(seen(spool_of(1, 2), nfs=spool_of(1), s3=None), {(STEPS[2], "nfs")})
    assert [(one.part, one.on, one.lacks) for one in left] == [
        (STEPS[2], (), ("nfs", "s3")),
        (STEPS[1], ("nfs",), ("s3",)),
    ]
    assert describe_unflushed(left, ["s3"]).startswith(
        f"1 part is on no tier that answers: {STEPS[2]}; 1 more is on nfs"
    )
    assert describe_unflushed(left, ["s3"]).endswith("(s3 did not answer)")


def test_a_sentence_names_a_few_parts_and_counts_the_rest() -> None:
    steps = range(1, 9)
    left = list_unflushed(seen(spool_of(*steps), s3=Place()), {(part(checkpoint(1, step)), "s3") for step in steps})
    assert describe_unflushed(left).endswith("rank 0 of 1, and 3 older ones") and describe_unflushed(left).startswith(
        "8 parts are"
    )


def test_trouble_is_reported_only_when_no_tier_accepts_anything() -> None:
    down, fine = TierReadiness(reached=False, error="no such directory"), TierReadiness(reached=True)
    assert UnflushedParts(tiers={"a": down}).problem == "a: no such directory"
    assert UnflushedParts(tiers={"a": down, "b": down}).problem == "a: no such directory; b: no such directory"
    assert UnflushedParts(tiers={"a": down, "b": fine}).problem is None
    assert UnflushedParts(tiers={"a": TierReadiness(reached=False)}).problem is None  # nobody has looked yet
    assert UnflushedParts(tiers={"a": fine}, paused="until resumed").problem == "paused until resumed"
    assert fine.accepts and not down.accepts and not TierReadiness(reached=False).accepts
