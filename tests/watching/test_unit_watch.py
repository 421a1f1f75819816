"""A watch: what it takes how, what it refuses, and that it leaves the watched directory and its files alone."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import layouts
from support.timed import timed
from support.waiting import wait_until
from support.watched_run import RUN, Reported, files, flush, observed, take, watching
from support.world import Daemon, read

from tierd.core.config import WatchConfig, from_toml, from_urls
from tierd.core.errors import ConfigError, SpoolFull
from tierd.daemon.daemon_status import make_status
from tierd.daemon.intake import unit_files, unit_watch
from tierd.daemon.intake.taken_units import TakenUnits
from tierd.daemon.intake.unit_watch import UnitWatch
from tierd.spool import foreign_files
from tierd.spool.foreign_files import is_open_for_writing, unshare
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.mounted_directories import check_no_overlap
from tierd.watching.checkpoint_names import KnownCheckpoints
from tierd.watching.unit import Unit
from tierd.watching.unit_description import UnitDescription
from tierd.watching.unit_inspection import Opener


def stored(spool: Spool) -> dict[str, bytes]:
    (part,) = spool.parts(RUN)
    return {path: data for path, data in read(spool, part).items() if path != "unit.json"}


@pytest.mark.parametrize("way", ["link", "reflink", "copy"])
def test_a_unit_is_taken_by_every_way_alike(way: str, root: Path, spool: Spool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    layouts.torchtitan(root)
    torch.save({"w": torch.rand(5_000_000)}, root / "step-100" / "large.pt")
    if way == "reflink":  # as a file system that has them: the clone has blocks of its own

        def clone(made: int, request: int, fd: int) -> None:
            os.pwrite(made, os.pread(fd, os.fstat(fd).st_size, 0), 0)

        monkeypatch.setattr(foreign_files.fcntl, "ioctl", clone)
    if way == "copy":

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    before = {path: path.stat() for path in root.rglob("*")}
    assert len(take(spool, root).parts) == 1
    assert stored(spool) == files(root)
    links = {path.stat().st_nlink for path in root.rglob("*") if path.is_file()}
    assert links == ({2} if way == "link" else {1})
    assert all(path.stat().st_mtime_ns == was.st_mtime_ns for path, was in before.items())
    assert before.keys() == set(root.rglob("*"))


def test_a_name_without_a_step_is_never_linked(root: Path, spool: Spool) -> None:
    layouts.safetensors(root)
    take(spool, root)
    assert (root / "model.safetensors").stat().st_nlink == 1 and stored(spool) == files(root)


def test_a_repair_never_writes_to_the_programs_file(root: Path, spool: Spool, tmp_path: Path) -> None:
    layouts.torch_save(root)
    take(spool, root)
    flush(spool, tmp_path / "tier")
    right, path = files(root), root / "model_step100.pt"
    with path.open("r+b") as file:  # the program rewrites it, and so the bytes that it shares with the spool
        file.seek(700)
        file.write(b"other bytes")
    rewritten = files(root)
    (part,) = spool.parts(RUN)
    with Daemon(spool.root, lambda: {"file": FileStore(tmp_path / "tier")}) as daemon:
        daemon.call(daemon.reconciler.repairs.fetch(part))
    assert files(root) == rewritten
    assert stored(spool) == right


def test_a_file_of_its_own_is_not_copied_by_unshare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    path = tmp_path / "file"
    path.write_bytes(b"data")
    inode = path.stat().st_ino
    unshare(path)
    assert path.stat().st_ino == inode
    os.link(path, tmp_path / "other")
    unshare(path)
    assert path.stat().st_ino != inode and path.read_bytes() == b"data" and len(list(tmp_path.iterdir())) == 2
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino], "the data first, then the name"
    unshare(tmp_path / "missing")


def test_file_that_is_open_for_writing_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"data")
    fd = os.open(path, os.O_RDONLY)
    try:
        assert not is_open_for_writing(fd)
        with path.open("ab"):
            assert is_open_for_writing(fd)
        assert not is_open_for_writing(fd)
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of other users")
@pytest.mark.parametrize(
    ("owner", "mode", "links", "is_taken"),
    [(1234, 0o600, 2, False), (1234, 0o600, 1, True), (1234, 0o644, 2, True), (4321, 0o600, 2, True)],
)
def test_hard_link_of_another_owners_private_file_is_not_taken(
    root: Path, spool: Spool, tmp_path: Path, owner: int, mode: int, links: int, is_taken: bool
) -> None:
    path = layouts.torch_save(root)
    os.chown(root, 4321, 4321)
    os.chown(path, owner, owner)
    path.chmod(mode)
    if links == 2:
        (tmp_path / "private").hardlink_to(path)
    reported = Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for now_s in (1.0, 2.0, 3.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert bool(reported.parts) == is_taken
    assert bool(watch.refused) != is_taken
    if not is_taken:
        assert "link of a file of uid 1234" in watch.refused[path.name]


def test_unit_that_is_open_for_writing_is_not_read_and_is_reported_after_an_hour(
    root: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = layouts.torch_save(root)
    read, inspect_unit = [], unit_watch.inspect_unit
    monkeypatch.setattr(unit_watch, "inspect_unit", lambda *given: (read.append(given), inspect_unit(*given))[1])
    reported, told = Reported(), []
    monkeypatch.setattr(reported, "report_refused", lambda name, why: told.append(why))
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    with path.open("ab"):
        for now_s in range(0, 3600, 300):
            watch.observe(KnownCheckpoints(), float(now_s))
        assert told == [] and watch.refused == {} and watch.is_waiting
        for now_s in (3700, 3800, 3900):
            watch.observe(KnownCheckpoints(), float(now_s))
        assert told == [watch.refused[path.name]] and "open for writing for an hour" in told[0]
        assert not watch.is_waiting, "a watch that ends when it is idle ends, and names it"
    assert read == [] and reported.parts == []
    watch.observe(KnownCheckpoints(), 4000.0)
    assert len(reported.parts) == 1 and len(read) == 1 and watch.refused == {}


def meddle(act: Callable[[Path], None], when: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program acts once: as the first of two files is checked, or as the last is taken."""
    inspect_unit, adopt_file, calls = unit_watch.inspect_unit, unit_files.adopt, [0]

    def checked(*given: Any) -> Any:
        calls[0] += 1
        if when == "checked" and calls[0] == 1:
            act(root)
        return inspect_unit(*given)

    def taken(*given: Any, going: Callable[[], None], **more: Any) -> Any:
        calls[0] += 1

        def acts() -> None:
            if when == "taken" and calls[0] == 3:
                calls[0] += 1
                act(root)
            going()

        return adopt_file(*given, going=acts, **more)

    monkeypatch.setattr(unit_watch, "inspect_unit", checked)
    monkeypatch.setattr(unit_files, "adopt", taken)


def rewrite(root: Path) -> None:
    data = (root / "step-100" / ".metadata").read_bytes()
    (root / "step-100" / ".metadata").write_bytes(data)


def rotate(root: Path) -> None:
    (root / "step-100").rename(root.parent / "rotated")


def grow(root: Path) -> None:
    with (root / "step-100" / "__0_0.distcp").open("ab") as file:
        file.write(b"more")


def replace(root: Path) -> None:
    path = root / "step-100" / "__0_0.distcp"
    fresh = root / "fresh"
    fresh.write_bytes(path.read_bytes())
    os.utime(fresh, ns=(0, path.stat().st_mtime_ns))
    fresh.replace(path)


@pytest.mark.parametrize("when", ["checked", "taken"])
@pytest.mark.parametrize("act", [rewrite, rotate, grow, replace])
def test_a_unit_that_changes_while_it_is_taken_is_not_kept(
    act: Callable[[Path], None], when: str, root: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts.torchtitan(root)
    meddle(act, when, root, monkeypatch)
    reported = Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for now_s in (1.0, 2.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert reported.parts == [] and spool.parts() == [] and reported.failures == []
    assert list((spool.control / "stage").iterdir()) == []
    for now_s in (10.0, 20.0, 30.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert len(reported.parts) == (act is rewrite)  # else a part of it is not of the save that its index is of


def test_a_damaged_unit_is_reported_once(root: Path, spool: Spool) -> None:
    path = layouts.torch_save(root)
    path.write_bytes(path.read_bytes()[:-50])
    reported = take(spool, root)
    assert reported.parts == [] and "damaged" in reported.reasons["model_step100.pt"]


def test_a_unit_that_never_rests_is_reported_once_until_it_rests(root: Path, spool: Spool) -> None:
    layouts.torch_save(root)
    path, reported = root / "model_step100.pt", Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=10.0)

    def rewrite_for(seconds: int, start_s: float) -> float:
        for now_s in range(0, seconds, 5):
            os.utime(path, ns=(0, int(start_s + now_s) * 1_000_000_000))
            watch.observe(KnownCheckpoints(), start_s + now_s)
        return start_s + seconds

    now_s = rewrite_for(3600, 0.0)
    assert reported.reasons == {} and watch.refused == {}
    now_s = rewrite_for(10, now_s)
    assert "for an hour without a rest of 10 s" in reported.reasons.pop(path.name)
    now_s = rewrite_for(1000, now_s)
    assert reported.reasons == {} and path.name in watch.refused
    for _ in range(3):
        now_s += 10.0
        watch.observe(KnownCheckpoints(), now_s)
    assert len(reported.parts) == 1 and watch.refused == {}
    rewrite_for(3600, now_s)
    assert reported.reasons == {}, "an hour begins anew when it rested"


def test_unit_with_an_unforeseen_error_stops_no_other(root: Path, spool: Spool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    layouts.torch_save(root)
    torch.save({"w": torch.ones(3)}, root / "model_step200.pt")
    describe, unforeseen = unit_watch.describe_unit, [True]

    def fails(unit: Unit, opener: Opener) -> UnitDescription:
        if unforeseen and unit.step == 200:
            raise ZeroDivisionError("nobody foresaw this")
        return describe(unit, opener)

    monkeypatch.setattr(unit_watch, "describe_unit", fails)
    reported, told = Reported(), []
    monkeypatch.setattr(reported, "report_refused", lambda path, why: told.append((path, why)))
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for now_s in (1.0, 2.0, 3.0, 70.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert [part.checkpoint.step for part in reported.parts] == [100] and not watch.is_waiting
    assert (
        told == [("model_step200.pt", watch.refused["model_step200.pt"])] and "ZeroDivisionError: nobody" in told[0][1]
    )
    unforeseen.clear()
    watch.observe(KnownCheckpoints(), 140.0)
    assert [part.checkpoint.step for part in reported.parts] == [100, 200]
    assert watch.refused == {}


def test_a_full_disk_is_reported_and_tried_again(root: Path, spool: Spool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    layouts.torch_save(root)
    full = [True]
    stage_unit = unit_files.stage_unit

    def once(*arguments: object) -> object:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return stage_unit(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(unit_watch, "stage_unit", once)
    reported = Reported()
    watch = UnitWatch(spool, root, RUN, reported, settle_s=0.0)
    for now_s in (1.0, 2.0, 3.0):
        watch.observe(KnownCheckpoints(), now_s)
    assert len(reported.failures) == 1 and isinstance(reported.failures[0], SpoolFull)
    assert "No space left" in watch.refused["model_step100.pt"] and watch.is_waiting
    full.clear()
    watch.observe(KnownCheckpoints(), 70.0)
    assert len(reported.parts) == 1 and not watch.refused and not watch.is_waiting


def test_status_names_units_that_a_full_spool_does_not_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, watch_s=0.02, settle_s=0.05)
    for name in ("out", "tier"):
        (tmp_path / name).mkdir()
    layouts.torch_save(tmp_path / "out")

    def refuses(*_: object) -> object:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unit_watch, "stage_unit", refuses)
    with watching(tmp_path, "spool") as daemon:

        def named() -> bool:
            whys = [problem.why for problem in make_status(daemon.reconciler, 0, 0).problems]
            return any("model_step100.pt is not taken" in why and "No space left" in why for why in whys)

        wait_until(named)


def test_a_link_that_leads_out_is_named_once(root: Path, spool: Spool, tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    layouts.torch_save(root)
    (tmp_path / "out-of-it").mkdir()
    (root / "last.pt").symlink_to("model_step100.pt")
    (root / "absolute.pt").symlink_to(root / "model_step100.pt")
    (root / "deep").mkdir()
    (root / "deep" / "up").symlink_to("../model_step100.pt")
    (tmp_path / "way").symlink_to("out")
    watch = UnitWatch(spool, tmp_path / "way", RUN, Reported(), settle_s=0.0)
    watch.observe(observed(spool), 1.0)
    assert "is not followed" not in caplog.text
    (root / "run").symlink_to("../out-of-it")
    (root / "deep" / "model_step5.pt").symlink_to("/elsewhere/model_step5.pt")
    for now_s in (2.0, 3.0):
        watch.observe(observed(spool), now_s)
    reported = [record.getMessage() for record in caplog.records if "is not followed" in record.getMessage()]
    assert (
        len(reported) == 1
        and "deep/model_step5.pt leads to /elsewhere/model_step5.pt" in reported[0]
        and "1 more" in reported[0]
    )


@pytest.mark.parametrize("killed", [False, True])
def test_a_failed_write_of_the_record_leaves_no_file(killed: bool, spool: Spool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def fails(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fails)
        if killed:
            patch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
        record = TakenUnits(spool, RUN)
        record.add("model_step100.pt", ())
    left = list((spool.control / "watched").iterdir())
    assert len(left) == killed
    record.add("model_step200.pt", ())
    assert [path.name for path in (spool.control / "watched").iterdir()] == [f"{RUN}.json"]
    assert TakenUnits(spool, RUN).has_taken("model_step100.pt", ())


def test_unit_that_retention_deleted_is_not_taken_again(root: Path, spool: Spool) -> None:
    layouts.torch_save(root)
    (part,) = take(spool, root).parts
    spool.remove([part])
    assert take(spool, root).parts == []


def test_two_nodes_that_see_one_directory_give_a_tier_one_checkpoint(root: Path, tmp_path: Path) -> None:
    layouts.torchtitan(root)
    nodes = [Spool(tmp_path / name) for name in ("one", "two")]
    assert len({take(spool, root).parts[0] for spool in nodes}) == 1
    manifests = [spool.manifest(spool.parts()[0]) for spool in nodes]
    assert manifests[0] == manifests[1]
    for spool in nodes:
        flush(spool, tmp_path / "tier")
    assert len(list((tmp_path / "tier" / RUN / "manifests").rglob("*.json"))) == 1


def test_unchanged_chunks_are_sent_once(root: Path, spool: Spool, tmp_path: Path) -> None:
    frozen = torch.rand(2_000_000)
    for step in (1, 2):
        torch.save({"frozen": frozen, "trained": torch.rand(300)}, root / f"model_step{step}.pt")
        os.utime(root / f"model_step{step}.pt", ns=(0, step * 10**9))
    assert len(take(spool, root).parts) == 2
    flush(spool, tmp_path / "tier")
    sent = sum(path.stat().st_size for path in (tmp_path / "tier").rglob("*") if path.is_file())
    assert sent < 1.2 * frozen.nbytes


def test_a_daemon_takes_and_flushes_and_names_the_refused(root: Path, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    timed(monkeypatch, watch_s=0.02, settle_s=0.05)
    (tmp_path / "tier").mkdir()
    with watching(tmp_path, "spool") as daemon:
        layouts.torchtitan(root)
        path = layouts.torch_save(root).rename(root / "model_step7.pt")
        path.write_bytes(path.read_bytes()[:-50])
        wait_until(lambda: daemon.reconciler.journal.counters["flushed"] == 1)
        wait_until(lambda: not daemon.intake.busy)  # type: ignore[attr-defined]
        assert {"persisted", "durable", "not taken"} <= {event.what for event in daemon.reconciler.journal.events}


# -- the configuration ------------------------------------------------------------------------------------------------

TIER = 'spool = "/spool"\n[[tier]]\nname = "t"\nurl = "file:///tier"\n'


def test_a_watch_is_read_from_the_configuration() -> None:
    found = from_toml(f'{TIER}[[watch]]\ndirectory = "/out"\nrun = "r"\n', "tierd.toml")
    assert found.watch == (WatchConfig(directory="/out", run="r"),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[[watch]]\ndirectory = "out"\nrun = "r"\n', r"watch\[0\]"),
        ('[[watch]]\ndirectory = "/out"\nrun = "../r"\n', r"watch\[0\].run"),
        ('[[watch]]\ndirectory = "/out"\n', "run"),
        (2 * '[[watch]]\ndirectory = "/out"\nrun = "r"\n', r"watch\[1\].run: 'r' is the run of /out; "),
        (
            '[[watch]]\ndirectory = "/a"\nrun = "r"\n[[watch]]\ndirectory = "/b"\nrun = "r"\n',
            r"watch\[1\].run: 'r' is the run of /a; .*give /b another one",
        ),
    ],
)
def test_a_watch_that_cannot_be_used_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_toml(TIER + text, "tierd.toml")


@pytest.mark.parametrize(("spool", "tier"), [("out/spool", "tier"), ("spool", "out/tier"), ("spool", "out")])
def test_nothing_of_tierd_lies_in_a_watched_directory(spool: str, tier: str, root: Path) -> None:
    home = root.parent
    watch = [WatchConfig(directory=str(root), run=RUN)]
    config = from_urls(str(home / spool), [str(home / tier)], watch=watch)
    with pytest.raises(ConfigError, match="nothing is written to a watched directory"):
        asyncio.run(check_no_overlap(config))
