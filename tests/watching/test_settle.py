"""When a watched unit is due: the state machine alone. Whole lives of writers are in test_taken.py."""

from __future__ import annotations

from tierd.watching.listing import ListedEntry, Listing
from tierd.watching.settle import Settling


def listing(*mtimes: int, name: str = "model.pt") -> Listing:
    return Listing(
        {f"{name}{number}.pt": ListedEntry("file", 5, mtime, (1, number)) for number, mtime in enumerate(mtimes)}
    )


def test_unit_that_changes_while_it_is_taken_is_not_finished_and_waits_longer_each_time() -> None:
    settling, now = Settling(10.0), 0.0
    for mtime, wait in enumerate((10.0, 20.0, 40.0, 80.0)):
        settling.observe(listing(mtime), now)
        assert settling.observe(listing(mtime), now + wait - 0.1) == []
        [due] = settling.observe(listing(mtime), now + wait)
        assert due.tries == mtime
        assert settling.finish(due, True, listing(mtime + 1)) == "changed"
        now += wait
    settling.observe(listing(9), now)
    [due] = settling.observe(listing(9), now + 160.0)
    assert settling.finish(due, True, Listing({})) == "changed"  # deleted


def test_newest_unit_is_first_and_a_deleted_unit_is_forgotten() -> None:
    settling = Settling(10.0)
    shown = listing(5, 7, 6, name="step")
    settling.observe(shown, 0.0)
    assert [due.unit.path for due in settling.observe(shown, 10.0)] == ["step1.pt", "step2.pt", "step0.pt"]
    assert settling.observe(Listing({}), 11.0) == [] and settling._seen == {}


def checkpoint(**mtimes_s: float) -> Listing:
    """A Trainer's checkpoint, or DCP's, of these files."""
    names = {"state": "trainer_state.json", "metadata": ".metadata", "tensors": "__0_0.distcp"}
    files = {f"checkpoint-1/{names.get(one, one)}": int(s * 1e9) for one, s in mtimes_s.items()}
    entries = {path: ListedEntry("file", 5, mtime, (1, len(path))) for path, mtime in files.items()}
    return Listing({"checkpoint-1": ListedEntry("directory")} | entries)


def due(settling: Settling, shown: Listing, now_s: float) -> bool:
    """Whether a unit is due after it has settled as it is shown."""
    settling.observe(shown, now_s)
    found = settling.observe(shown, now_s + 10)
    return bool(found) and settling.finish(found[0], True, shown) == "taken"


def test_due_unit_is_due_again_only_after_a_whole_save() -> None:
    settling = Settling(10.0)
    first = checkpoint(a=1, b=1, state=2)
    assert due(settling, first, 0)
    assert not due(settling, checkpoint(a=5, b=1, state=2), 20)  # a writer died within a save over it
    assert not due(settling, checkpoint(a=5, b=5, state=2), 40)
    assert due(settling, checkpoint(a=5, b=5, state=6), 60)
    assert not due(settling, checkpoint(a=5, state=6), 80)  # within a deletion
    assert due(settling, checkpoint(a=7, b=7, state=8), 100)
    assert due(settling, checkpoint(a=7, b=7, state=8, readme=9), 120)  # something was added


def test_index_that_is_older_than_its_named_files_is_of_another_save() -> None:
    assert due(Settling(10.0), checkpoint(tensors=5, metadata=6), 0)
    assert due(Settling(10.0), checkpoint(tensors=6.9, metadata=6), 0)  # clocks of two nodes
    assert not due(Settling(10.0), checkpoint(tensors=7.1, metadata=6), 0)
