"""When a watched unit is due: the state machine alone. Whole lives of writers are in test_taken.py."""

from __future__ import annotations

from tierd.watching.settling_units import SettlingTracker
from tierd.watching.unit import ListedEntry, Listing, Unit


def listing(*mtimes: int, name: str = "model.pt") -> Listing:
    return Listing(
        {f"{name}{number}.pt": ListedEntry("file", 5, mtime, (1, number)) for number, mtime in enumerate(mtimes)}
    )


def test_a_unit_is_due_when_it_has_not_changed_for_long_enough() -> None:
    settling = SettlingTracker(10.0)
    assert settling.observe(listing(1), 0.0) == [] and settling.observe(listing(1), 9.9) == []
    assert settling.observe(listing(2), 10.0) == []  # written to: it begins anew
    assert settling.observe(listing(2), 19.9) == []
    [due] = settling.observe(listing(2), 20.0)
    assert settling.record_outcome(due, True, listing(2)) == "taken"
    assert settling.observe(listing(2), 99.0) == []
    assert settling.observe(listing(3), 100.0) == [] and len(settling.observe(listing(3), 110.0)) == 1


def test_refused_unit_is_due_again_after_a_change_alone() -> None:
    settling = SettlingTracker(10.0)
    settling.observe(listing(1), 0.0)
    [due] = settling.observe(listing(1), 10.0)
    assert settling.is_waiting()
    assert settling.record_outcome(due, False, listing(1)) == "refused" and not settling.is_waiting()
    assert settling.observe(listing(1), 500.0) == []
    settling.observe(listing(2), 501.0)
    assert len(settling.observe(listing(2), 511.0)) == 1


def test_unit_that_changes_while_it_is_taken_is_not_finished_and_waits_longer_each_time() -> None:
    settling, now = SettlingTracker(10.0), 0.0
    for mtime, wait in enumerate((10.0, 20.0, 40.0, 80.0)):
        settling.observe(listing(mtime), now)
        assert settling.observe(listing(mtime), now + wait - 0.1) == []
        [due] = settling.observe(listing(mtime), now + wait)
        assert due.tries == mtime
        assert settling.record_outcome(due, True, listing(mtime + 1)) == "changed"
        now += wait
    settling.observe(listing(9), now)
    [due] = settling.observe(listing(9), now + 160.0)
    assert settling.record_outcome(due, True, Listing({})) == "changed"  # deleted


def test_newest_unit_is_first_and_a_deleted_unit_is_forgotten() -> None:
    settling = SettlingTracker(10.0)
    shown = listing(5, 7, 6, name="step")
    settling.observe(shown, 0.0)
    assert [due.unit.path for due in settling.observe(shown, 10.0)] == ["step1.pt", "step2.pt", "step0.pt"]
    assert settling.observe(Listing({}), 11.0) == [] and settling._seen == {}


def test_an_incomplete_unit_is_never_due() -> None:
    entries = {"checkpoint-1": ListedEntry("directory"), "checkpoint-1/optimizer.pt": ListedEntry("file", 5, 1, (1, 2))}
    settling = SettlingTracker(10.0)
    assert [settling.observe(Listing(entries), now) for now in (0.0, 10.0, 1e6)] == [[], [], []]
    whole = entries | {"checkpoint-1/trainer_state.json": ListedEntry("file", 2, 2, (1, 3))}
    assert not settling.is_waiting(), "what a dead program left is waited for"
    settling.observe(Listing(whole), 1e6)
    assert settling.is_waiting()
    [due] = settling.observe(Listing(whole), 1e6 + 10)
    assert isinstance(due.unit, Unit) and settling.record_outcome(due, True, Listing(entries)) == "changed"


def checkpoint(**mtimes_s: float) -> Listing:
    """A Trainer's checkpoint, or DCP's, of these files."""
    names = {"state": "trainer_state.json", "metadata": ".metadata", "tensors": "__0_0.distcp"}
    files = {f"checkpoint-1/{names.get(one, one)}": int(s * 1e9) for one, s in mtimes_s.items()}
    entries = {path: ListedEntry("file", 5, mtime, (1, len(path))) for path, mtime in files.items()}
    return Listing({"checkpoint-1": ListedEntry("directory")} | entries)


def due(settling: SettlingTracker, shown: Listing, now_s: float) -> bool:
    """Whether a unit is due after it has settled as it is shown."""
    settling.observe(shown, now_s)
    found = settling.observe(shown, now_s + 10)
    return bool(found) and settling.record_outcome(found[0], True, shown) == "taken"


def test_due_unit_is_due_again_only_after_a_whole_save() -> None:
    settling = SettlingTracker(10.0)
    first = checkpoint(a=1, b=1, state=2)
    assert due(settling, first, 0)
    assert not due(settling, checkpoint(a=5, b=1, state=2), 20)  # a writer died within a save over it
    assert not due(settling, checkpoint(a=5, b=5, state=2), 40)
    assert due(settling, checkpoint(a=5, b=5, state=6), 60)
    assert not due(settling, checkpoint(a=5, state=6), 80)  # within a deletion
    assert due(settling, checkpoint(a=7, b=7, state=8), 100)
    assert due(settling, checkpoint(a=7, b=7, state=8, readme=9), 120)  # something was added


def test_index_that_is_older_than_its_named_files_is_of_another_save() -> None:
    assert due(SettlingTracker(10.0), checkpoint(tensors=5, metadata=6), 0)
    assert due(SettlingTracker(10.0), checkpoint(tensors=6.9, metadata=6), 0)  # clocks of two nodes
    assert not due(SettlingTracker(10.0), checkpoint(tensors=7.1, metadata=6), 0)


def megatron(points_to: int, pointer_s: int = 9, step: int = 20, **mtimes_s: int) -> Listing:
    """Megatron's checkpoint of these ranks, and the pointer beside it."""
    pointer, unit = "latest_checkpointed_iteration.txt", f"iter_{step:07}"
    ranks = {f"{unit}/mp_rank_{rank}/model_optim_rng.pt": s * 10**9 for rank, s in mtimes_s.items()}
    entries = {path: ListedEntry("file", 5, mtime, (1, len(path))) for path, mtime in ranks.items()}
    directories = {path.rpartition("/")[0] for path in ranks} | {unit}
    entries |= {path: ListedEntry("directory") for path in directories}
    entries[pointer] = ListedEntry("file", 2, pointer_s * 10**9, (1, 1))
    return Listing(entries, {pointer: str(points_to)})


def ranks(first_s: int, second_s: int) -> dict[str, int]:
    return {"00": first_s, "01": second_s}


def test_rewrite_in_place_is_due_while_its_pointer_names_a_later_checkpoint() -> None:
    settling = SettlingTracker(10.0)
    assert due(settling, megatron(30, **ranks(1, 1)), 0)
    assert not due(settling, megatron(30, **ranks(5, 1)), 20), "a rank's file is that of the former save"
    assert due(settling, megatron(30, **ranks(5, 6)), 40)
    assert not due(settling, megatron(30, **{"00": 7}), 60), "within a deletion"
    settling = SettlingTracker(10.0)
    assert due(settling, megatron(20, **ranks(1, 1)), 0)
    assert not due(settling, megatron(20, **ranks(5, 6)), 20), "its program writes the pointer again"
    assert due(settling, megatron(20, pointer_s=10, **ranks(5, 6)), 40)


def test_units_of_two_saves_are_named_after_an_hour() -> None:
    settling, mixed = SettlingTracker(10.0), megatron(30, **ranks(5, 1))
    assert due(settling, megatron(30, **ranks(1, 1)), 0) and not due(settling, mixed, 20)
    settling.observe(mixed, 3700)
    assert settling.mixed_units(3700, 3600) == ["iter_0000020"] and settling.mixed_units(3500, 3600) == []
