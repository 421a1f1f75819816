"""What a spool remembers of runs: who saved here, and what the trainer wants kept."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from pathlib import Path

import msgspec
import pytest
from support.bad_readers import WrongPages
from support.world import RUN, attempt, commit, part

from tierd.core.errors import ConfigError, FormatTooNew, ManifestError, SpoolUnusable
from tierd.core.ids import parse_retention, retention_key
from tierd.core.planning.place import LocalLaunch
from tierd.core.retention.policy import (
    Best,
    RetentionPolicy,
    StoredRetention,
    check_policy,
    decode_policy,
    encode_policy,
)
from tierd.core.timeline.launch_chain import Head
from tierd.daemon.concurrency import MemoryBudget
from tierd.daemon.spool_observer import SpoolObserver
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.run_records import (
    committed_parts,
    forget_committed,
    forget_launch,
    mark_saved,
    newest_launches,
    record_committed,
    record_head,
    record_policy,
    recorded_heads,
    recorded_policies,
    saved_attempts,
)
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

RICH = RetentionPolicy(
    keep_last=4, keep_within="2h", keep_every_steps=(10, 15), keep_every="6h", keep_best=Best(metric="loss", count=2)
)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "spool")


# -- who saved --------------------------------------------------------------------------------------------------------


def test_a_save_is_recorded_once_an_attempt_and_a_restore_is_not(spool, tmp_path, monkeypatch):
    assert saved_attempts(spool.control, [RUN]) == {}
    commit(spool, part(1, launch=1))
    commit(spool, part(2, launch=3))
    commit(spool, part(3, launch=2))
    assert attempt(1) not in os.listdir(spool.control / "saved" / RUN)  # nobody asks for the older ones
    assert saved_attempts(spool.control, [RUN]) == {RUN: {attempt(2), attempt(3)}}  # the newest, whichever came last
    store, other = MemoryStore(), Spool(tmp_path / "other")
    asyncio.run(flush(spool, part(2, launch=3), TierUploadContext(store)))
    asyncio.run(fetch(other, part(2, launch=3), {"tier": store}, MemoryBudget(), Progress()))
    assert other.parts() == [part(2, launch=3)] and saved_attempts(other.control, [RUN]) == {}

    synced = []
    monkeypatch.setattr("tierd.spool.run_records.sync_directory", synced.append)
    commit(spool, part(4, launch=3))
    assert synced == []
    commit(spool, part(5, launch=4))
    rooms = spool.root, spool.control, spool.control / "saved", spool.control / "saved" / RUN
    assert set(synced) == set(rooms)  # every directory above the mark, because nobody else syncs them


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["a pipe", "a huge file", "a link"])
def test_foreign_file_in_the_place_of_a_record_is_neither_waited_for_nor_read_whole(spool, tmp_path, what):
    one = part(1)
    commit(spool, one)
    mark = spool.control / "saved" / RUN / f"{one.checkpoint.attempt}.{one.name}"
    mark.unlink()
    if what == "a pipe":
        os.mkfifo(mark)
    elif what == "a huge file":
        mark.touch()
        os.truncate(mark, 1 << 43)
    else:
        (tmp_path / "other").write_text(f"{1:012}")
        mark.symlink_to(tmp_path / "other")
    forget_committed(spool.control, one)
    if what == "a huge file":
        assert mark.stat().st_size == 1 << 43
    record_committed(spool.control, one)
    if what == "a link":
        assert mark.is_symlink() and (tmp_path / "other").read_text() == f"{1:012}"


def test_part_that_tierd_itself_deletes_is_not_missed(spool):
    one = part(1)
    commit(spool, one)
    record_committed(spool.control, one)
    assert committed_parts(spool.control) == {one}
    forget_committed(spool.control, part(2))
    assert committed_parts(spool.control) == {one}
    forget_committed(spool.control, one)
    assert committed_parts(spool.control) == set() and newest_launches(spool.control)[RUN].ranks == {1: {0}}


def test_the_ranks_that_were_saved_here_are_known_without_any_copy(spool):
    assert newest_launches(spool.control) == {}
    commit(spool, part(1, launch=1))
    for rank in (1, 3):
        commit(spool, part(2, launch=2, rank=rank, world=4))
    commit(spool, part(7, launch=1, run="other"))
    spool.remove(spool.parts())
    for name in spool.leftovers():
        spool.discard(name)
    assert not (spool.root / RUN).exists()
    assert newest_launches(spool.control) == {
        RUN: LocalLaunch(attempt(2), {4: frozenset({1, 3})}),
        "other": LocalLaunch(attempt(1), {1: frozenset({0})}),
    }
    assert newest_launches(spool.control, [RUN]).keys() == {RUN}
    spool.discard(f"saved/{RUN}/{attempt(2)}")
    assert newest_launches(spool.control).keys() == {"other"} and not (spool.control / "saved" / RUN).exists()


def test_launch_that_has_just_begun_is_not_forgotten_with_its_predecessor(spool):
    record_policy(spool.control, RUN, RICH)
    commit(spool, part(1, launch=1))
    commit(spool, part(2, launch=2))
    forget_launch(spool.control, RUN, attempt(1))
    assert newest_launches(spool.control)[RUN].attempt == attempt(2) and recorded_policies(spool.control, [RUN])
    later = spool.control / "saved" / RUN / attempt(2)
    before = later.stat().st_mtime_ns
    os.utime(later, ns=(before - 10**9, before - 10**9))
    commit(spool, part(3, launch=2))
    assert later.stat().st_mtime_ns > before - 10**9, "each save says that it is there"
    forget_launch(spool.control, RUN, attempt(2))
    assert newest_launches(spool.control) == {} and not recorded_policies(spool.control, [RUN])


def test_a_spool_from_before_the_marker_was_saved_in_by_nobody(spool):
    commit(spool, part(1))
    for path in sorted((spool.control / "saved").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (spool.control / "saved").rmdir()
    assert saved_attempts(spool.control, [RUN]) == {} and recorded_policies(spool.control, [RUN]) == {}
    again = Spool(spool.root)
    commit(again, part(2))
    assert saved_attempts(again.control, [RUN]) == {RUN: {attempt(1)}}


def test_launch_that_ends_before_its_first_commit_takes_nothing_from_its_predecessor(spool):
    """Its node would count as one that had only restored the run, and nobody would prune it."""
    commit(spool, part(1, launch=1))
    spool.stage(part(2, launch=2)).abandon()
    assert saved_attempts(spool.control, [RUN]) == {RUN: {attempt(1), attempt(2)}}
    assert SpoolObserver(spool).observe().restored == frozenset()
    commit(spool, part(2, launch=3))
    assert saved_attempts(spool.control, [RUN]) == {RUN: {attempt(3)}}


def test_a_link_in_the_place_of_a_room_is_not_followed(spool, tmp_path):
    (spool.control / "saved").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (spool.control / "saved").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SpoolUnusable, match="link"):
        mark_saved(spool.control, part(1))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_head_that_is_wrong_in_the_page_cache_only_is_read_from_the_disk(spool, monkeypatch):
    head = Head(version=1, run=RUN, by="", counter=1, before=None, written="", launches={})
    record_head(spool.control, head)
    WrongPages(monkeypatch, spool.control / "timeline" / f"{RUN}.json")
    assert recorded_heads(spool.control) == {RUN: (head,)}


# -- the trainer's policy ---------------------------------------------------------------------------------------------


def test_a_policy_is_remembered_and_written_only_when_it_is_new(spool):
    record_policy(spool.control, RUN, RICH)
    (path,) = (spool.control / "retention").iterdir()
    first = path.read_bytes()
    record_policy(spool.control, RUN, RICH)
    assert path.read_bytes() == first and path.stat().st_mode & 0o077 == 0
    assert recorded_policies(spool.control, [RUN])[RUN][0].retention == RICH
    record_policy(spool.control, RUN, RetentionPolicy())
    assert recorded_policies(spool.control, [RUN])[RUN][0].retention == RetentionPolicy()
    assert os.listdir(spool.control / "retention") == [path.name]


def test_a_damaged_policy_is_said_to_be(spool):
    (spool.control / "retention" / "damaged.json").write_bytes(b"{")
    found = recorded_policies(spool.control, ["damaged", RUN])
    assert list(found) == ["damaged"] and found["damaged"][0].retention is None and found["damaged"][0].why


def test_policy_in_the_spool_that_is_misread_once_with_a_smaller_number_is_read_again(spool, monkeypatch):
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=10))
    reads, pread = [], os.pread

    def misread_once(fd, count, offset):
        reads.append(data := pread(fd, count, offset))
        return data.replace(b'"keep_last": 10', b'"keep_last": 1 ') if len(reads) == 1 else data

    monkeypatch.setattr(os, "pread", misread_once)
    assert recorded_policies(spool.control, [RUN])[RUN][0].retention == RetentionPolicy(keep_last=10)
    assert len(reads) == 3


def test_policy_in_the_spool_of_which_all_reads_differ_is_not_known(spool, monkeypatch):
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=10))
    digits = iter(range(1, 10))
    monkeypatch.setattr(os, "pread", lambda *_: b"%d" % next(digits))
    (unknown,) = recorded_policies(spool.control, [RUN])[RUN]
    assert unknown.retention is None and "reads gave different" in unknown.why


def test_policy_in_the_spool_is_read_again_only_after_it_changed(spool, monkeypatch):
    record_policy(spool.control, RUN, RICH)
    path, known = spool.control / "retention" / f"{RUN}.json", {}
    os.utime(path, ns=(0, 0))
    assert recorded_policies(spool.control, [RUN], known)[RUN][0].retention == RICH
    record_policy(spool.control, RUN, RetentionPolicy(keep_last=10))
    assert recorded_policies(spool.control, [RUN], known)[RUN][0].retention == RetentionPolicy(keep_last=10)
    os.utime(path, ns=(0, 0))
    recorded_policies(spool.control, [RUN], known)
    monkeypatch.setattr(os, "pread", None)
    assert recorded_policies(spool.control, [RUN], known)[RUN][0].retention == RetentionPolicy(keep_last=10)


def test_a_policy_that_the_disk_does_not_give_is_not_none(spool, monkeypatch):
    """The default would prune what the trainer wants kept."""
    record_policy(spool.control, RUN, RICH)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # since Python 3.14, if the disk gives an error

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "lstat", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        recorded_policies(spool.control, [RUN])


# -- its form ---------------------------------------------------------------------------------------------------------


def test_a_policy_reads_as_it_was_written_and_by_hand():
    stored = StoredRetention(RUN, "0123abcd", "trainer", "node-7", "2026-11-22T10:00:00+00:00", RICH)
    text = encode_policy(stored).decode()
    assert '"keep_last": 4' in text and text.endswith("}\n") and "null" not in text
    assert decode_policy(text.encode(), RUN, "0123abcd", "trainer") == stored
    more = msgspec.json.decode(text)
    assert decode_policy(msgspec.json.encode({**more, "note": 1}), RUN, "0123abcd", "trainer") == stored


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"format": 2}, FormatTooNew),
        ({"format": 0}, ManifestError),
        ({"format": "1"}, ManifestError),
        ({"run": "other"}, ManifestError),
        ({"by": "ffffffff"}, ManifestError),
        ({"given": "default"}, ManifestError),
        ({"host": "a\nb"}, ManifestError),
        ({"host": "x" * 300}, ManifestError),
        ({"retention": {"keep_last": 3, "keep_more": 1}}, FormatTooNew),
        ({"retention": {"keep_last": True}}, ManifestError),
        ({"retention": {"keep_best": [{"metric": "a"}] * 17}}, ManifestError),
        ({"retention": None}, ManifestError),
    ],
)
def test_anything_else_is_refused(change, error):
    members = msgspec.json.decode(encode_policy(StoredRetention(RUN, "0123abcd", "trainer", retention=RICH)))
    with pytest.raises(error, match=f"retention of {RUN}"):
        decode_policy(msgspec.json.encode({**members, **change}), RUN, "0123abcd", "trainer")


def test_keys():
    key = retention_key(RUN, "0123abcd", "trainer")
    assert key == f"{RUN}/retention/0123abcd.trainer.json" and parse_retention(RUN, key) == ("0123abcd", "trainer")
    for other in ("0123ABCD.trainer.json", "0123abcd.json", "x/0123abcd.trainer.json", "0123abcd.trainer.json.new"):
        assert parse_retention(RUN, f"{RUN}/retention/{other}") is None
    assert parse_retention(RUN, key.replace(RUN, "other")) is None


# -- as a program makes it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "3", None])
def test_a_number_of_checkpoints_that_is_none_is_refused_where_it_is_written(count):
    with pytest.raises(ConfigError, match=re.escape(f"keep_last={count!r}: a number of checkpoints from 1 on")):
        RetentionPolicy(keep_last=count)


def test_invalid_policy_of_a_program_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="retention="):
        check_policy({"keep_last": 3})
    assert check_policy(RICH) == RICH
    with pytest.raises(ConfigError, match="keep_every_steps=0"):
        RetentionPolicy(keep_every_steps=[0])


@pytest.mark.parametrize("rule", ["keep_within", "keep_every"])
def test_a_time_that_is_none_is_refused_where_it_is_written(rule):
    with pytest.raises(ValueError, match=f"{rule}='soon': a time is"):
        RetentionPolicy(**{rule: "soon"})
