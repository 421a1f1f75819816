"""Heads: what outlives the manifests that it speaks of, and what a restore notices by it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import pytest
import torch
from support.world import Daemon, hurry

import tierd
from tierd.client.restoring.restorer import Restored
from tierd.core.errors import CheckpointNotFound, FormatTooNew, ManifestError
from tierd.core.ids import LATEST_MS, CheckpointId
from tierd.core.manifest import Origin
from tierd.core.manifest_codec import seal
from tierd.core.timeline.launch_chain import (
    LastHead,
    LaunchRecord,
    decode_head,
    encode_head,
    launches_to_record,
    remember_heads,
    rollback_reason,
    successor_head,
)
from tierd.daemon.daemon_status import make_status
from tierd.daemon.tiers.run_removal import remove_from_spool
from tierd.daemon.tiers.tier_run_records import why_rolled_back
from tierd.events.journal import Journal
from tierd.events.save_events import SaveEvents
from tierd.spool.spool import Spool
from tierd.stores.base import ObjectInfo
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.file_store import FileStore

A, B, C = (f"019f0000000{number}-00000001" for number in range(3))


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    """A spool and a tier. Launch 1 saved 10, 20 and 30; launch 2 resumed from 20 and saved 25."""
    hurry(monkeypatch)
    (tmp_path / "tier").mkdir()
    with Daemon(tmp_path / "spool", lambda: {"tier": FileStore(tmp_path / "tier")}) as daemon:
        for steps, back in (((10, 20, 30), None), ((25,), 20)):
            with tierd.Checkpointer(tmp_path / "spool", "r") as ckpt:
                if back:
                    ckpt.restore({"w": torch.zeros(10)}, step=back)
                for step in steps:
                    ckpt.save(step, {"w": torch.full((10,), float(step))}).wait("tier", timeout=60)
        daemon.settle()
    return tmp_path


def manifest(home: Path, step: int) -> Path:
    (found,) = (home / "tier/r/manifests").glob(f"{step:012}.*/*.json")
    return found


def restored(home: Path, spool: str) -> Restored | None:
    with (
        Daemon(home / spool, lambda: {"tier": FileStore(home / "tier")}),
        tierd.Checkpointer(home / spool, "r") as ckpt,
    ):
        state = {"w": torch.zeros(10)}
        found = ckpt.restore(state)
        assert found is None or bool((state["w"] == found.step).all())
        return found


def read(home: Path) -> dict:
    (path,) = (home / "tier/r/timeline").iterdir()
    return json.loads(path.read_text())


def test_head_names_the_origin_and_the_newest_checkpoint_of_each_launch(home) -> None:
    head = read(home)
    (first, one), (_, two) = sorted(head["launches"].items())
    assert (one, two) == (
        {"resumed_from": None, "newest": 30},
        {"resumed_from": {"step": 20, "attempt": first}, "newest": 25},
    )
    assert head["counter"] > 1 and len(head["before"]) == 32
    (kept,) = (home / "spool/.tierd/timeline").glob("*.json")
    assert json.loads(kept.read_text())["launches"] == head["launches"]


def test_single_head_is_left_where_a_run_continues_elsewhere(home) -> None:
    before = read(home)
    with Daemon(home / "other", lambda: {"tier": FileStore(home / "tier")}) as daemon:
        with tierd.Checkpointer(home / "other", "r") as ckpt:
            ckpt.restore({"w": torch.zeros(10)})
            ckpt.save(26, {"w": torch.zeros(10)}).wait("tier", timeout=60)
        daemon.settle()
    head = read(home)
    assert head["by"] != before["by"] and head["counter"] > before["counter"]
    assert head["launches"][max(head["launches"])]["newest"] == 26
    assert head["launches"].items() >= before["launches"].items()


@pytest.mark.parametrize("harm", ["a bit flips", "empty", "deleted"])
def test_origin_of_a_launch_survives_the_loss_of_its_only_manifest(home, harm) -> None:
    path = manifest(home, 25)
    data = path.read_bytes()
    if harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"" if harm == "empty" else data.replace(b'"step":25', b'"step":24', 1))
    found = restored(home, "other")
    assert found and found.step == 20
    assert [one.step for one in found.skipped] == [25]


def test_readable_manifests_decide_without_a_head(home) -> None:
    shutil.rmtree(home / "tier/r/timeline")
    manifest(home, 25).write_bytes(b"")
    found = restored(home, "other")
    assert found and found.step == 30
    assert [(one.step, one.reason[:10]) for one in found.skipped] == [(25, "unreadable")]


@pytest.mark.parametrize("attempt", ["fffffffffff0-00000000", "ffffffffffff-00000000", "01ffffffffff-00000000"])
def test_a_name_that_somebody_put_there_stops_nobody(home, attempt) -> None:
    planted = home / f"tier/r/manifests/000000000001.{attempt}/00000-of-00001.json"
    planted.parent.mkdir()
    planted.touch()
    for spool in ("other", "third"):
        found = restored(home, spool)
        assert found and found.step == 25
        with tierd.Checkpointer(home / spool, "r", to=[]) as ckpt:
            ckpt.save(26, {"w": torch.zeros(10)}).wait(timeout=60)


def test_a_tier_that_is_an_older_copy_of_itself_is_noticed_by_the_spool(home) -> None:
    for step in (25, 30):
        shutil.rmtree(manifest(home, step).parent)
    shutil.rmtree(home / "tier/r/timeline")
    shutil.rmtree(home / "spool/r")
    found = restored(home, "spool")
    assert found and found.step == 20
    assert [(one.step, one.reason[:4]) for one in found.skipped] == [(25, "gone")]


def test_a_run_that_was_deleted_on_the_tier_is_no_fresh_start_where_the_spool_remembers_it(home) -> None:
    shutil.rmtree(home / "tier/r")
    shutil.rmtree(home / "spool/r")
    with pytest.raises(CheckpointNotFound, match="gone: it was whole once"):
        restored(home, "spool")
    assert restored(home, "other") is None


def test_a_tier_that_lost_everything_but_its_head_is_no_fresh_start_either(home) -> None:
    shutil.rmtree(home / "tier/r/manifests")
    with pytest.raises(CheckpointNotFound, match=r"step 25 .*gone: it was whole once"):
        restored(home, "other")
    with tierd.open(home / "tier", "r") as reader, pytest.raises(CheckpointNotFound, match="gone"):
        reader.restore({"w": torch.zeros(10)})


def test_restore_is_refused_where_a_forged_name_replaces_a_lost_checkpoint(home) -> None:
    checkpoint = manifest(home, 25).parent
    shutil.rmtree(home / "tier/r/manifests")
    checkpoint.mkdir(parents=True)
    (checkpoint / "00003-of-99999.json").touch()
    with pytest.raises(CheckpointNotFound, match=r"step 25 .*gone: it was whole once"):
        restored(home, "other")


def test_who_knows_that_there_was_more_says_so(home) -> None:
    with tierd.open(home / "tier", "r") as reader:
        assert reader.restore({"w": torch.zeros(10)}, at_least=25).step == 25
        with pytest.raises(
            CheckpointNotFound, match="no checkpoint of step 26 or later: what is left begins at r step 25"
        ):
            reader.restore({"w": torch.zeros(10)}, at_least=26)
    daemon = Daemon(home / "other", lambda: {"tier": FileStore(home / "tier")})
    with daemon, tierd.Checkpointer(home / "other", "r") as ckpt:
        state = {"w": torch.zeros(10)}
        with pytest.raises(CheckpointNotFound, match="no checkpoint of step 26 or later"):
            ckpt.restore(state, at_least=26)
    daemon = Daemon(home / "other", lambda: {"tier": FileStore(home / "tier")})
    with daemon, tierd.Checkpointer(home / "other", "new") as ckpt:
        assert ckpt.restore({"w": torch.zeros(10)}) is None
        with pytest.raises(CheckpointNotFound, match="step 1 or later: there is none at all"):
            ckpt.restore({"w": torch.zeros(10)}, at_least=1)


def test_record_of_the_spool_counts_though_every_other_trace_of_the_run_is_lost(home) -> None:
    shutil.rmtree(home / "tier/r")
    shutil.rmtree(home / "spool/r")
    shutil.rmtree(home / "spool/.tierd/saved/r")
    with pytest.raises(CheckpointNotFound, match=r"step 25 .*gone: it was whole once"):
        restored(home, "spool")


def test_origin_of_a_launch_is_known_without_a_daemon_too(home) -> None:
    (path,) = (home / "spool/r").glob("000000000025.*/*/manifest.json")
    path.write_bytes(b"")
    with tierd.Checkpointer(home / "spool", "r", to=[]) as ckpt:
        found = ckpt.restore({"w": torch.zeros(10)})
    assert found and found.step == 20
    assert [one.step for one in found.skipped] == [25]


def test_a_planted_step_that_is_too_old_hides_none_that_is_not(home) -> None:
    attempt = manifest(home, 25).parent.name.partition(".")[2]
    planted = home / f"tier/r/manifests/000000000005.{attempt}/00000-of-00001.json"
    planted.parent.mkdir()
    planted.touch()
    manifest(home, 25).write_bytes(b"")
    with tierd.open(home / "tier", "r") as reader:
        assert reader.restore({"w": torch.zeros(10)}, at_least=15).step == 20
        with pytest.raises(
            CheckpointNotFound, match=r"step 21 or later: what is left begins at r step 5(.|\n)*step 25"
        ):
            reader.restore({"w": torch.zeros(10)}, at_least=21)


def test_record_of_the_spool_is_deleted_with_the_run(home) -> None:
    spool = Spool(home / "spool")
    assert list((spool.control / "timeline").iterdir())
    remove_from_spool(spool, "r")
    assert not list((spool.control / "timeline").iterdir())


def reported(home: Path, spool: str) -> list[tuple[str, str]]:
    """The rollbacks that the daemon of a spool tells of until it has looked some times."""
    with Daemon(home / spool, lambda: {"tier": FileStore(home / "tier")}) as daemon:
        for _ in range(3):
            daemon.settle()
        journal = daemon.reconciler.journal
        found = [(one.place, one.why) for one in journal.events if one.what == "rolled back"]
        alerts = [one.place for one in make_status(daemon.reconciler, 0, 0).problems if one.severity == "alert"]
        assert alerts == sorted({place for place, _ in found})  # also after the next head was written
        return found


def copied(tier: Path, to: Path) -> None:
    if to.exists():
        shutil.rmtree(to)
    shutil.copytree(tier, to)


def saved_here(home: Path, spool: str, *steps: int) -> None:
    with (
        Daemon(home / spool, lambda: {"tier": FileStore(home / "tier")}) as daemon,
        tierd.Checkpointer(home / spool, "r") as ckpt,
    ):
        ckpt.restore({"w": torch.zeros(10)})
        for step in steps:
            ckpt.save(step, {"w": torch.full((10,), float(step))}).wait("tier", timeout=60)
        daemon.settle()


class SlowAtFirst(FileStore):
    """Between looking at a run here and comparing what was seen, a daemon asks for intents. It waits for them."""

    async def scan(self, prefix: str, after: str = "") -> AsyncGenerator[ObjectInfo]:
        if "/flushing/" in prefix:
            await asyncio.sleep(0.5)
        async for info in super().scan(prefix, after):
            yield info


def test_older_copy_of_a_tier_is_reported_though_another_tier_is_finished_first(home) -> None:
    (home / "other").mkdir()
    spool = Spool(home / "spool")

    def daemon() -> Daemon:
        stores = {"tier": lambda: FileStore(home / "tier"), "other": lambda: SlowAtFirst(home / "other")}
        return Daemon(home / "spool", lambda: {name: made() for name, made in stores.items()})

    with daemon() as first:
        first.settle()
        copied(home / "other", home / "copy")
        with tierd.Checkpointer(spool.root, "r") as ckpt:
            ckpt.restore({"w": torch.zeros(10)})
            ckpt.save(40, {"w": torch.full((10,), 40.0)}).wait("other", timeout=60)
        first.settle()
    copied(home / "copy", home / "other")
    with daemon() as second:
        second.settle()
        found = [one.place for one in second.reconciler.journal.events if one.what == "rolled back"]
    assert found == ["other"]


def test_older_copy_of_a_tier_is_reported_once_whichever_node_writes_the_next_head(home) -> None:
    copied(home / "tier", home / "copy")
    before = read(home)["counter"]
    saved_here(home, "spool", 40)
    after = read(home)["counter"]
    assert after > before and not reported(home, "spool")
    copied(home / "copy", home / "tier")
    why = f"the run's head there is number {before} and was number {after} before"
    assert [(place, text.startswith(why)) for place, text in reported(home, "spool")] == [("tier", True)]
    assert reported(home, "spool") == []


@pytest.mark.parametrize("harm", ["deleted", "empty"])
def test_lost_head_is_reported(home, harm) -> None:
    (path,) = (home / "tier/r/timeline").iterdir()
    if harm == "deleted":
        path.unlink()
    else:
        path.write_bytes(b"")
    ((place, why),) = reported(home, "spool")
    assert place == "tier" and ("is gone" if harm == "deleted" else "cannot be read") + " and was number" in why
    assert reported(home, "spool") == []


def test_rollback_that_nobody_writes_over_is_reported_once_while_it_lasts() -> None:
    journal = Journal()
    notices = SaveEvents(journal)
    for why in ("old", "old", "older", None, "older"):
        notices.report_rollback("tier", "r", why)
    notices.report_rollback("tier", "s", "older")
    reported = [(one.run, one.why) for one in journal.events]
    assert reported == [("r", "old"), ("r", "older"), ("s", "older")]


def test_a_head_that_another_node_replaced_is_no_rollback(home) -> None:
    saved_here(home, "other", 40, 50)
    assert reported(home, "spool") == []
    saved_here(home, "spool", 60)
    assert reported(home, "other") == []


def test_a_head_that_is_replaced_while_its_tier_is_looked_at_is_no_rollback(home) -> None:
    (path,) = (home / "tier/r/timeline").iterdir()
    head = decode_head(path.read_bytes(), "r", path.stem)
    store = FileStore(home / "tier")
    seen = LastHead(head.counter, head.digest)
    assert asyncio.run(why_rolled_back(store, "r", seen, ())) is None  # the look saw none, and there is one
    path.unlink()
    assert "is gone" in (asyncio.run(why_rolled_back(store, "r", seen, ())) or "")


@pytest.mark.parametrize("added", [True, False], ids=["a key is added", "a key is left out"])
def test_a_head_of_another_key_is_not_said_to_be_older(home, added) -> None:
    plain = FileStore(home / "tier")
    keyed = EncryptedStore(plain, EncryptionKey(bytes(32)))
    (path,) = (home / "tier/r/timeline").iterdir()
    data = path.read_bytes()
    head = decode_head(data, "r", path.stem)
    if not added:
        asyncio.run(keyed.put(f"r/timeline/{path.name}", data))
    why = asyncio.run(why_rolled_back(keyed if added else plain, "r", LastHead(head.counter, head.digest), ())) or ""
    assert f"cannot be read and was number {head.counter} before, so nothing shows whether" in why
    assert ("it is not encrypted" if added else "name its file by the tier's key_file, or --key-file") in why
    assert "somebody deleted" not in why


def test_a_spool_remembers_the_last_head_of_each_tier() -> None:
    one, two, three = (LastHead(number, f"{number:032}") for number in (1, 2, 3))
    assert remember_heads({"a": two, "b": one}, {"a": three, "b": None}) == {"a": three, "b": one}
    assert (
        rollback_reason(two, one) is None and rollback_reason(one, None) is None and rollback_reason(None, None) is None
    )
    assert rollback_reason(two, LastHead(2, "f" * 32)) is None  # two nodes wrote at the same time
    assert "is number 1 and was number 2" in (rollback_reason(one, two) or "")
    many = remember_heads({str(number): one for number in range(40)}, {"new": two})
    assert len(many) == 16 and many["new"] == two
    head = msgspec.structs.replace(
        successor_head((), "r", "", {A: LaunchRecord(resumed_from=None, newest=3)}, ""), tiers=many
    )
    assert decode_head(encode_head(head), "r", "") == head


def test_no_counter_is_so_high_that_none_can_follow() -> None:
    launches = {A: LaunchRecord(resumed_from=None, newest=3)}
    last = msgspec.structs.replace(successor_head((), "r", "0123abcd", launches, ""), counter=(1 << 53) - 1)
    head = successor_head((last,), "r", "0123abcd", launches, "")
    assert decode_head(encode_head(head), "r", "0123abcd") == head


# -- the object ------------------------------------------------------------------------------------------------------


def test_a_head_is_read_as_it_was_written_and_nothing_else_is() -> None:
    launches = {
        A: LaunchRecord(resumed_from=None, newest=3),
        B: LaunchRecord(resumed_from=Origin(step=3, attempt=A), newest=None),
    }
    first = successor_head((), "r", "0123abcd", {A: launches[A]}, "2026-11-22T00:00:00+00:00")
    head = successor_head((first,), "r", "0123abcd", launches, "2026-11-22T00:00:01+00:00")
    assert (head.counter, head.before) == (2, first.digest)
    data = encode_head(head)
    assert decode_head(data, "r", "0123abcd") == head
    for run, by in (("s", "0123abcd"), ("r", "0123abce")):
        with pytest.raises(ManifestError, match="it says that it is of"):
            decode_head(data, run, by)
    for at in range(0, len(data), 7):
        with pytest.raises(ManifestError):
            decode_head(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "r", "0123abcd")
    with pytest.raises(ManifestError):
        decode_head(data[:-1], "r", "0123abcd")


def test_head_keeps_the_newest_record_and_forgets_no_launch_on_the_timeline() -> None:
    ids = {name: CheckpointId("r", name, 3) for name in (A, B, C)}
    origins = {A: None, B: ids[A], C: ids[B]}
    remembered = {B: LaunchRecord(resumed_from=Origin(step=3, attempt=A), newest=9)}
    said = launches_to_record([], [ids[C]], origins, remembered)
    assert list(said) == [C, B, A]  # A and B have nothing left, and C descends from them
    assert said[B].newest == 9 and said[C].newest is None
    off = launches_to_record([ids[C]], [ids[C]], {A: None, B: ids[A], C: None}, remembered)
    assert off == {C: LaunchRecord(resumed_from=None, newest=3)}  # nothing is left of B, and nothing descends from it


def test_a_head_of_a_newer_version_or_that_turns_in_a_circle_is_refused() -> None:
    head = successor_head((), "r", "0123abcd", {A: LaunchRecord(resumed_from=None, newest=3)}, "")
    with pytest.raises(FormatTooNew, match="version 2"):
        decode_head(seal(msgspec.structs.replace(head, version=2)), "r", "0123abcd")
    circle = msgspec.structs.replace(head, launches={A: LaunchRecord(resumed_from=Origin(step=3, attempt=B), newest=3)})
    with pytest.raises(ManifestError, match="not earlier"):
        decode_head(seal(circle), "r", "0123abcd")


@pytest.mark.parametrize("attempt", ["ffffffffffff-00000000", f"{LATEST_MS:012x}-00000000"])
def test_a_launch_that_nobody_can_have_made_is_in_no_head(attempt) -> None:
    """It would be the newest, and nothing that lies there would be on its timeline."""
    head = successor_head((), "r", "0123abcd", {attempt: LaunchRecord(resumed_from=None, newest=3)}, "")
    with pytest.raises(ManifestError, match="2200"):
        decode_head(seal(head), "r", "0123abcd")
