"""What a watch keeps when the times of files lie: a clock set back, copies without times, files of one step."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from support import layouts
from support.watched_run import RUN, Reported, observed, take

from tierd.daemon.intake.taken_units import TakenUnits
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.spool.spool import Spool
from tierd.spool.stage import Stage
from tierd.watching.checkpoint_names import KnownCheckpoints
from tierd.watching.settling_units import UnitShape
from tierd.watching.unit import ListedEntry

HOUR = 3600


def save(root: Path, name: str, second: int) -> None:
    """Write a checkpoint that was finished at a second."""
    (root / name).parent.mkdir(exist_ok=True)
    torch.save({"w": torch.full((10,), float(len(name) + second))}, root / name)
    os.utime(root / name, (second, second))


def refused(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def newest_first(spool: Spool) -> list[int]:
    """The steps of the run, in the order in which retention and a restore see them."""
    return [one.step for one in sorted((part.checkpoint for part in spool.parts(RUN)), reverse=True)]


def test_unit_written_after_a_clock_was_set_back_is_newer(root: Path, spool: Spool) -> None:
    for step in (10, 20, 30):
        save(root, f"a-{step}.pt", 100_000 + HOUR + step)
    take(spool, root)
    for step in (40, 50):
        save(root, f"a-{step}.pt", 100_000 + step)
    take(spool, root)
    assert newest_first(spool) == [50, 40, 30, 20, 10] and spool.pins() == set()
    assert len({part.checkpoint.attempt for part in spool.parts(RUN)}) == 1


def test_program_that_rolls_back_after_a_clock_was_set_back_is_newer(root: Path, spool: Spool) -> None:
    for step in (10, 20, 30):
        save(root, f"a-{step}.pt", 100_000 + HOUR + step)
    take(spool, root)
    for step in (15, 25):
        save(root, f"a-{step}.pt", 100_000 + step)
    take(spool, root)
    assert newest_first(spool) == [25, 15, 30, 20, 10]


def test_units_written_while_no_daemon_ran_follow_in_their_order(root: Path, spool: Spool) -> None:
    save(root, "a-10.pt", 10)
    take(spool, root)
    for step in (40, 20, 50, 30):
        save(root, f"a-{step}.pt", step)
    take(spool, root)
    assert newest_first(spool) == [50, 40, 30, 20, 10] and spool.pins() == set()
    assert len({part.checkpoint.attempt for part in spool.parts(RUN)}) == 1


def test_program_that_rolled_back_while_no_daemon_ran_has_a_new_attempt(root: Path, spool: Spool) -> None:
    for step in (10, 20, 30):
        save(root, f"a-{step}.pt", step)
    take(spool, root)
    for step in (20, 40):
        save(root, f"a-{step}.pt", 100 + step)
    take(spool, root)
    assert newest_first(spool) == [40, 20, 30, 20, 10] and spool.pins() == set()


def test_unit_that_another_node_took_while_this_node_was_down_is_in_no_doubt(
    root: Path, spool: Spool, tmp_path: Path
) -> None:
    save(root, "a-10.pt", 10)
    take(spool, root)
    other, known = Spool(tmp_path / "other"), observed(spool)
    for step in (20, 30, 40, 50):
        save(root, f"a-{step}.pt", step)
    took = UnitWatch(other, root, RUN, Reported(), settle_s=0.0)
    for now_s in (1.0, 2.0):
        took.observe(known, now_s)
    made, seen, reported = observed(other).created, observed(spool), Reported()
    again = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for now_s, one in enumerate(sorted(made)[2:]):  # retention deleted those before
        seen = seen.with_checkpoint(one, made[one], None)
        again.observe(seen, float(now_s))
    assert reported.doubts == {} and spool.pins() == set()
    assert {part.checkpoint for part in reported.parts} == set(sorted(made)[:2]), "they have the names that they had"


def test_unit_written_after_the_last_take_is_newer_at_any_time(root: Path, spool: Spool) -> None:
    """Also if the watch is killed before its next listing."""
    save(root, "a-10.pt", 10)
    take(spool, root)
    save(root, "a-20.pt", 100_000)
    take(spool, root)
    save(root, "a-15.pt", 50_000)
    take(spool, root)
    assert newest_first(spool) == [15, 20, 10] and spool.pins() == set()


@pytest.mark.parametrize("first", [True, False])
def test_copies_without_times_lose_none(first: bool, root: Path, spool: Spool) -> None:
    """`cp -r` copies by name: step 1000 before 800 and 900."""
    if not first:
        save(root, "a-700.pt", 10)
        take(spool, root)
    for second, step in enumerate((1000, 800, 900)):
        save(root, f"a-{step}.pt", 100 + second)
    reported = take(spool, root)
    (pinned,) = spool.pins()
    assert pinned.step == 1000 and reported.doubts == {"a-1000.pt": pinned}
    assert newest_first(spool)[0] == 900


def test_a_launch_in_another_directory_leaves_no_doubt(root: Path, spool: Spool) -> None:
    for step in (100, 200):
        save(root, f"one/a-{step}.pt", step)
        save(root, f"two/a-{step // 2}.pt", 1000 + step)
    reported = take(spool, root)
    assert newest_first(spool) == [100, 50, 200, 100] and not reported.doubts


def test_first_watch_that_was_killed_continues_as_it_began(root: Path, spool: Spool) -> None:
    for step in (10, 20, 30, 40):
        save(root, f"a-{step}.pt", step)

    class Killed(BaseException):
        pass

    class Killer(Reported):
        def report_taken(self, part, outcome) -> None:  # type: ignore[no-untyped-def]
            raise Killed

    watch = UnitWatch(spool, root, RUN, Killer(), settle_s=0.0)
    watch.observe(KnownCheckpoints(), 1.0)
    with pytest.raises(Killed):
        watch.observe(KnownCheckpoints(), 2.0)
    assert newest_first(spool) == [40]
    take(spool, root)
    assert newest_first(spool) == [40, 30, 20, 10]
    assert len({part.checkpoint.attempt for part in spool.parts(RUN)}) == 1


def test_new_node_keeps_checkpoint_that_the_times_on_a_tier_contradict(
    root: Path, spool: Spool, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save(root, f"a-{step}.pt", 100_000 + HOUR + step)
    take(spool, root)
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", "a-40.pt", 100_040)
    reported, node = Reported(), Spool(tmp_path / "node")
    watch = UnitWatch(node, tmp_path / "other", RUN, reported, settle_s=0.0)
    for now_s in (1.0, 2.0):
        watch.observe(observed(spool), now_s)
    assert [one.step for one in node.pins()] == [40] and list(reported.doubts) == ["a-40.pt"]


# -- several files of one step ----------------------------------------------------------------------------------------


def test_the_files_of_one_step_are_one_checkpoint(root: Path, spool: Spool) -> None:
    for step in (10, 20):
        save(root, f"model_{step}.pt", step)
        save(root, f"opt_{step}.pt", step)  # at the same time, by a coarse clock
    assert len(take(spool, root).parts) == 2
    assert newest_first(spool) == [20, 10]
    for part in spool.parts(RUN):
        step = part.checkpoint.step
        assert {file.path for file in spool.manifest(part).files} == {
            f"model_{step}.pt",
            f"opt_{step}.pt",
            "unit.json",
        }


def test_units_of_one_step_and_one_time_are_all_taken(root: Path, spool: Spool) -> None:
    for name in ("one/a-10.pt", "two/a-10.pt"):
        save(root, name, 10)
    assert len(take(spool, root).parts) == 2
    assert take(spool, root).parts == []
    assert {file.path for part in spool.parts(RUN) for file in spool.manifest(part).files} == {
        *("one/a-10.pt", "two/a-10.pt", "unit.json"),
    }


def test_a_second_name_of_a_step_is_not_taken_twice(root: Path, spool: Spool) -> None:
    """Lightning's `save_last` writes each checkpoint once more, as `last.ckpt`."""
    for name in ("epoch=3-step=40.ckpt", "last.ckpt"):
        torch.save({"global_step": 40, "w": torch.ones(3)}, root / name)
        os.utime(root / name, (100 + len(name), 100 + len(name)))
    take(spool, root)
    (part,) = spool.parts(RUN)
    assert "epoch=3-step=40.ckpt" in {file.path for file in spool.manifest(part).files}


def test_units_without_a_step_beside_others_are_taken_together_as_another_watch(root: Path, spool: Spool) -> None:
    """Lightning's `last.ckpt`, a loop's `best.pt`: rewritten in place, so their order is the time of the last write."""
    for name in ("epoch=3-step=40.ckpt", "last.ckpt", "best.pt"):
        torch.save({"global_step": 40, "w": torch.ones(3)}, root / name)
        os.utime(root / name, (100 + len(name), 100 + len(name)))
    watch = UnitWatch(spool, root, RUN, Reported(), settle_s=0.0, stepless=True)
    for now_s in (1.0, 2.0):
        watch.observe(observed(spool), now_s)
    (part,) = spool.parts(RUN)
    assert {file.path for file in spool.manifest(part).files} == {"last.ckpt", "best.pt", "unit.json"}
    assert part.checkpoint.step == 100 + len("last.ckpt") and not watch.refused


def test_units_without_a_step_are_left_when_the_others_are_gone(root: Path, spool: Spool) -> None:
    for name in ("model_10.pt", "last.pt"):
        torch.save({"w": torch.ones(3)}, root / name)
    watch = UnitWatch(spool, root, RUN, Reported(), settle_s=0.0)
    for now_s in (1.0, 2.0):
        watch.observe(observed(spool), now_s)
    assert watch.leaves_stepless
    (root / "model_10.pt").unlink()
    watch = UnitWatch(spool, root, RUN, Reported(), settle_s=0.0)  # also after a restart
    for now_s in (3.0, 4.0):
        watch.observe(observed(spool), now_s)
    assert len(spool.parts(RUN)) == 1 and watch.leaves_stepless


# -- what lies beside -------------------------------------------------------------------------------------------------


def test_a_refused_unit_is_named_until_it_is_gone(root: Path, spool: Spool) -> None:
    path = layouts.torch_save(root)
    whole = path.read_bytes()
    path.write_bytes(whole[:-50])
    watch = UnitWatch(spool, root, RUN, Reported(), settle_s=0.0)
    for now_s in (1.0, 2.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert "damaged" in watch.refused["model_step100.pt"]
    path.write_bytes(whole)
    for now_s in (3.0, 4.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert watch.refused == {} and len(spool.parts(RUN)) == 1


@pytest.mark.parametrize("again", [False, True], ids=["the same watch", "a later one"])
def test_a_rewrite_of_another_size_that_keeps_the_time_is_taken(again: bool, root: Path, spool: Spool) -> None:
    reported, path = Reported(), root / "model_step7.pt"
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for number in (1, 2, 3):
        torch.save({"w": torch.rand(1000 * number)}, path)
        os.utime(path, (1_700_000_000,) * 2)
        if again:
            watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
        for now_s in (1.0, 2.0, 3.0, 4.0):
            watch.observe(observed(spool), 10.0 * number + now_s)
    assert [part.checkpoint.step for part in reported.parts] == [7, 7, 7]
    newest = max(spool.parts(RUN), key=lambda part: part.checkpoint)
    assert (spool.path(newest) / path.name).read_bytes() == path.read_bytes()


def test_a_rewrite_that_another_node_took_is_not_taken_again(root: Path, spool: Spool, tmp_path: Path) -> None:
    path, reported = root / "model_step7.pt", (Reported(), Reported())
    one, two = (
        UnitWatch(each, root, RUN, reported, settle_s=0.0)
        for each, reported in zip((spool, Spool(tmp_path / "two")), reported, strict=True)
    )
    for number in (1, 2):
        torch.save({"w": torch.rand(1000 * number)}, path)
        os.utime(path, (1_700_000_000,) * 2)
        for watch in (one, two):
            for now_s in (1.0, 2.0, 3.0):
                watch.observe(observed(spool), 10.0 * number + now_s)
    assert (len(reported[0].parts), len(reported[1].parts)) == (2, 0)


def prune(spool: Spool, *steps: int) -> None:
    spool.remove([part for part in spool.parts(RUN) if part.checkpoint.step in steps])


@pytest.mark.parametrize("meanwhile", [(), ("b-5.pt",)])
def test_remounted_directory_is_the_same_directory(meanwhile: tuple[str, ...], root: Path, spool: Spool) -> None:
    """The directory is an empty mount point for a while, or one in which the program had saved without its mount."""
    for step in (10, 20, 30, 40, 50):
        save(root, f"a-{step}.pt", 100_000 + step)
    take(spool, root)
    prune(spool, 10, 20, 30)
    away = root.rename(root.with_name("away"))
    root.mkdir()
    for name in meanwhile:
        save(root, name, 100_000)
    take(spool, root)
    for path in root.iterdir():
        path.rename(away / path.name)
    root.rmdir()
    away.rename(root)
    assert take(spool, root).parts == []
    assert [step for step in newest_first(spool) if step != 5] == [50, 40]


def test_unit_that_was_not_taken_yet_keeps_its_place_without_its_mount(root: Path, spool: Spool) -> None:
    save(root, "a-10.pt", 100_010)
    save(root, "a-50.pt", 100_050)
    UnitWatch(spool, root, RUN, Reported(), settle_s=0.0).observe(
        KnownCheckpoints(), 1.0
    )  # killed, or the spool was full
    old = (root / "a-10.pt").rename(root.with_name("a-10.pt"))
    assert [part.checkpoint.step for part in take(spool, root).parts] == [50]
    old.rename(root / "a-10.pt")
    assert [part.checkpoint.step for part in take(spool, root).parts] == [10]
    assert newest_first(spool) == [50, 10]


def test_a_new_spool_beside_a_missing_mount_begins_with_the_mount(root: Path, spool: Spool, tmp_path: Path) -> None:
    for step in (10, 50):
        save(root, f"a-{step}.pt", 100_000 + step)
    take(spool, root)
    prune(spool, 10)
    fresh, empty = Spool(tmp_path / "fresh"), tmp_path / "empty"
    empty.mkdir()
    watch, reported = UnitWatch(fresh, empty, RUN, Reported(), settle_s=0.0), Reported()
    watch.observe(observed(spool), 1.0)
    watch = UnitWatch(fresh, root, RUN, reported, settle_s=0.0)
    for now_s in (2.0, 3.0):
        watch.observe(observed(spool), now_s)
    (newest,) = (part.checkpoint for part in spool.parts(RUN))
    assert [part.checkpoint.step for part in reported.parts] == [10] and reported.parts[0].checkpoint < newest


def test_the_record_remembers_the_last_of_many_that_are_gone(spool: Spool) -> None:
    """Two units of 5000 files each are as many as it remembers."""
    entry = ListedEntry("file", 1, 1)
    shapes: dict[str, UnitShape] = {unit: tuple((f"{unit}{at}", entry) for at in range(5000)) for unit in "abcd"}
    record = TakenUnits(spool, RUN)
    for name in "abcd":
        record.record_listing({name: shapes[name]}, None)
        record.add(name, shapes[name])
    record = TakenUnits(spool, RUN)
    assert [name for name in "abcd" if record.has_taken(name, shapes[name])] == ["b", "c", "d"]


def test_doubt_about_a_checkpoint_that_could_not_be_committed_is_recorded_once(root: Path, spool: Spool) -> None:
    for second, step in enumerate((1000, 800, 900)):
        save(root, f"a-{step}.pt", 100 + second)
    watch = UnitWatch(spool, root, RUN, Reported(), settle_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "commit", refused)
        for now_s in (1.0, 2.0, 100.0, 200.0):
            watch.observe(KnownCheckpoints(), now_s)
    assert [one.step for one in TakenUnits(spool, RUN).doubted] == [1000]
    record = json.loads((spool.control / "watched" / f"{RUN}.json").read_bytes())
    assert len(record["doubted"]) == 1 and record["doubts"] == 1
