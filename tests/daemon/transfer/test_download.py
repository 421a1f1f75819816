"""A download goes on where it was interrupted, trusts nothing that it finds, and holds no more than it may."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import random
import threading
from array import array
from pathlib import Path

import pytest
from support.doubles import Double, damage, flipped, is_chunk
from support.timed import timed
from support.waiting import until
from support.world import CHUNK, RUN, commit, content, listing, part, read, reconciler, running, settle

from tierd.codec.chunk_codec import CODECS, encode
from tierd.core.errors import CorruptChunk, SpoolFull, SpoolUnusable, StoreUnavailable
from tierd.core.ids import chunk_key
from tierd.core.manifest import MANIFEST_NAME
from tierd.daemon.concurrency import MemoryBudget, thread_uncancelled
from tierd.daemon.transfer import download as download_module
from tierd.daemon.transfer import tier_fetch as fetch_module
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.download import Progress
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.shared_encoding import SharedEncoder, Throughput
from tierd.daemon.transfer.tier_fetch import fetch
from tierd.spool.direct_io import LARGE, PAGE
from tierd.spool.spool import Spool
from tierd.stores.memory_store import MemoryStore

PART = part(7)
CHUNKS = 6
FILES = content(7, chunks=CHUNKS)
ALL = CHUNKS + 1  # the small file is a chunk, the empty one is none


@pytest.fixture
def store(tmp_path) -> Double:
    """A tier that holds `PART`."""
    home = Spool(tmp_path / "home")
    commit(home, PART, FILES)
    store = Double()
    asyncio.run(flush(home, PART, TierUploadContext(store.inner)))
    return store


def gets(store: Double) -> list[str]:
    return [key for operation, key in store.calls if operation == "get" and is_chunk(key)]


def budget(hands: int) -> MemoryBudget:
    """One for this many chunks at a time: 8 is the most, and a budget too small for two lets one through."""
    return MemoryBudget(1) if hands == 1 else MemoryBudget()


def interrupted(spool: Spool, store: Double, after: int, how: str = "error", hands: int = 1) -> None:
    """A fetch that gets `after` chunks and then fails, or is cancelled."""

    async def work() -> None:
        task = asyncio.ensure_future(fetch(spool, PART, {"tier": store}, budget(hands)))

        def cut(operation: str, key: str) -> None:
            if operation == "get" and is_chunk(key) and len(gets(store)) > after:
                if how == "error":
                    raise StoreUnavailable("the network is gone")
                task.cancel()

        store.before = cut
        with pytest.raises((StoreUnavailable, asyncio.CancelledError)):
            await task

    store.calls = []
    asyncio.run(work())
    store.before, store.calls = None, []


def right(spool: Spool) -> int:
    """How many chunks of the partial download are right on disk."""
    home, found = spool.fetch_directory(PART), 0
    for name, data in FILES.items():
        path = home / name
        there = path.read_bytes() if path.exists() else b""
        found += sum(there[at : at + CHUNK] == data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
    return found


@pytest.mark.parametrize("hands", [1, 8])
@pytest.mark.parametrize("how", ["error", "cancel"])
@pytest.mark.parametrize("after", range(ALL))
def test_fetch_interrupted_at_any_chunk_fetches_only_the_missing_chunks(spool, store, after, how, hands):
    interrupted(spool, store, after, how, hands)
    assert not spool.parts()
    there = right(spool)
    if hands == 1:
        assert there == after
    progress = Progress()
    fetched = asyncio.run(fetch(spool, PART, {"tier": store}, budget(hands), progress))
    assert read(spool, PART) == FILES
    assert len(gets(store)) == fetched.chunks == ALL - there
    assert progress.done == progress.total == sum(map(len, FILES.values()))
    assert not list((spool.control / "fetch").iterdir())


HARMS = ["flip", "truncate", "empty", "lengthen", "remove", "directory", "symlink", "fifo"]


@pytest.mark.parametrize("victim", ["weights.bin", "deep/er/state.json"])
@pytest.mark.parametrize("harm", [*HARMS, "holes"])
def test_partial_file_that_was_damaged_meanwhile_is_fetched_again(spool, store, harm, victim):
    interrupted(spool, store, ALL - 1)
    path = spool.fetch_directory(PART) / victim
    size = path.stat().st_size
    if harm == "holes":
        os.truncate(path, 0)
        os.truncate(path, size)
    else:
        damage(path, harm)
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES


def test_nothing_but_the_manifests_files_is_ever_made_visible(spool, store, tmp_path):
    interrupted(spool, store, 3)
    home = spool.fetch_directory(PART)
    (home / MANIFEST_NAME).write_bytes(b"of a commit that was cut off")
    (home / "stray").write_bytes(b"x")
    (home / "deep" / "stray").mkdir(parents=True)
    (home / "deep" / "stray" / "file").write_bytes(b"x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "mine").write_bytes(b"mine")
    (home / "link").symlink_to(tmp_path / "outside")
    asyncio.run(fetch(spool, PART, {"tier": store}))
    found = {str(path.relative_to(spool.path(PART))) for path in spool.path(PART).rglob("*") if path.is_file()}
    assert found == {*FILES, MANIFEST_NAME} and read(spool, PART) == FILES
    assert (tmp_path / "outside" / "mine").read_bytes() == b"mine"


async def test_two_fetches_of_one_part_get_every_chunk_once(spool, store):
    store.delay = 0.01
    async with running(reconciler(spool, {"tier": store})) as daemon:
        await settle(daemon)
        store.calls = []
        await asyncio.gather(daemon.repairs.fetch(PART), daemon.repairs.fetch(PART))
        assert not daemon._repairer.running_fetches
    assert read(spool, PART) == FILES and len(gets(store)) == ALL


def test_a_full_disk_is_said_before_anything_is_fetched(spool, store, monkeypatch):
    monkeypatch.setattr(Spool, "free", lambda self: (64 << 20, 1 << 40))
    with pytest.raises(SpoolFull, match="free"):
        asyncio.run(fetch(spool, PART, {"tier": store}))
    assert not gets(store)


def test_small_disk_accepts_a_part_that_fits_beside_a_small_reserve(spool, store, monkeypatch):
    """64 MiB to spare are more than a disk of some MB has."""
    monkeypatch.setattr(Spool, "free", lambda self: (4 << 20, 8 << 20))
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES


def test_abandoned_partial_fetch_gives_way_to_a_wanted_part(spool, store, monkeypatch):
    other = spool.fetch_directory(part(3))
    other.mkdir()
    (other / "weights.bin").write_bytes(b"half of something else")
    monkeypatch.setattr(Spool, "free", lambda self: (0 if other.exists() else 1 << 40, 1 << 40))
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES and not other.exists()


def test_progress_only_grows_and_ends_at_the_whole(spool, store):
    seen: list[tuple[int, int]] = []
    progress = Progress(on_progress=lambda at: seen.append((at.done, at.total)))
    asyncio.run(fetch(spool, PART, {"tier": store}, progress=progress))
    whole = sum(map(len, FILES.values()))
    assert seen == sorted(seen) and seen[0] == (0, whole) and seen[-1] == (whole, whole)
    assert progress.tiers == ("tier",) and progress.written_chunks == ALL and not progress.kept_bytes
    again = Progress()
    asyncio.run(fetch(spool, PART, {"tier": store}, progress=again))
    assert again.kept_bytes == again.done == whole and not again.written_chunks


class Counting(MemoryBudget):
    """Notes the most that was held at once."""

    most = 0

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total = total

    def _serve(self) -> None:
        super()._serve()
        self.most = max(self.most, self.total - self._free)


@pytest.mark.parametrize("total", [500, 1000, 2500, 10**6])
def test_no_more_than_the_budget_is_in_hand(spool, store, total):
    budget = Counting(total)
    active = most = 0
    real = store.inner.get

    async def slow(key, into=None):
        nonlocal active, most
        active += is_chunk(key)
        most = max(most, active)
        await asyncio.sleep(0.01)
        try:
            return await real(key, into)
        finally:
            active -= is_chunk(key)

    store.inner.get = slow
    asyncio.run(fetch(spool, PART, {"tier": store}, budget))
    assert read(spool, PART) == FILES
    assert 0 < budget.most <= total and budget._free == total
    assert most <= max(1, total // CHUNK) + 1  # the small file weighs next to nothing


def test_a_fetch_that_fails_gives_the_budget_back(spool, store):
    budget = MemoryBudget(3000)
    store.before = lambda operation, key: _raise(StoreUnavailable("gone")) if is_chunk(key) else None
    with pytest.raises(StoreUnavailable):
        asyncio.run(fetch(spool, PART, {"tier": store}, budget))
    assert budget._free == 3000


def _raise(error: Exception) -> None:
    raise error


def linked(spool: Spool, tmp_path: Path) -> tuple[Path, Path]:
    """A committed file that a program has under another name, as in a watched run; both paths."""
    commit(spool, PART, FILES)
    path, theirs = spool.path(PART) / "weights.bin", tmp_path / "theirs"
    os.link(path, theirs)
    return path, theirs


def test_healthy_file_of_two_names_is_still_shared(spool, store, tmp_path):
    """A copy of each file of a watched run doubled its disk space."""
    path, theirs = linked(spool, tmp_path)
    assert not asyncio.run(fetch(spool, PART, {"tier": store})).chunks
    assert path.samefile(theirs)


@pytest.mark.parametrize("hands", [1, 8])
@pytest.mark.parametrize("bad", [0, CHUNKS - 1])
def test_a_file_of_two_names_is_copied_before_it_is_written(spool, store, tmp_path, monkeypatch, hands, bad):
    """The program may write to a chunk that was right, until the copy is made."""
    path, theirs = linked(spool, tmp_path)
    theirs.write_bytes(flipped(path.read_bytes(), bad * CHUNK))
    real, other = download_module.unshare, 1

    def unshare(file):
        if file == path:
            theirs.write_bytes(flipped(theirs.read_bytes(), other * CHUNK))
        real(file)

    monkeypatch.setattr(download_module, "unshare", unshare)
    progress = Progress()
    assert asyncio.run(fetch(spool, PART, {"tier": store}, budget(hands), progress)).chunks == 2
    assert not path.samefile(theirs) and theirs.read_bytes() != FILES["weights.bin"]
    assert read(spool, PART) == FILES
    assert progress.done == progress.total == sum(map(len, FILES.values()))


def test_each_file_is_synced_once(spool, store, monkeypatch):
    synced: list[str] = []
    real = os.fsync

    def fsync(fd):
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    asyncio.run(fetch(spool, PART, {"tier": store}))
    files = [
        path for path in synced if not Path(path).is_dir() and path.split("/")[-1] in {Path(n).name for n in FILES}
    ]
    assert len(files) == len(set(files)) == len(FILES)


def test_chunks_that_an_interrupted_repair_wrote_are_synced_by_the_next_repair(spool, store, monkeypatch):
    commit(spool, PART, FILES)
    path = spool.path(PART) / "weights.bin"
    path.write_bytes(flipped(path.read_bytes(), 0))
    path.write_bytes(flipped(path.read_bytes(), 3 * CHUNK))
    interrupted(spool, store, 1)
    path.write_bytes(FILES["weights.bin"])  # and somebody else the other chunk
    synced, real = [], os.fsync

    def fsync(fd):
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE))
        return real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert not asyncio.run(fetch(spool, PART, {"tier": store})).chunks
    assert (str(path), os.O_RDONLY) in synced, "also one that may not be written"


def test_a_file_that_could_not_be_synced_is_not_believed(spool, store, monkeypatch):
    """After EIO the page cache may show what the disk does not have: the next attempt fetches all of the file."""
    real = os.fsync

    def failing(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("weights.bin"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(SpoolUnusable):
        asyncio.run(fetch(spool, PART, {"tier": store}))
    monkeypatch.setattr(os, "fsync", real)
    assert not (spool.fetch_directory(PART) / "weights.bin").exists()
    store.calls = []
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES and len(gets(store)) >= CHUNKS


def test_large_chunks_that_begin_anywhere_in_a_page(spool, tmp_path, monkeypatch):
    """Raw and packed ones, past the page cache where it can be done, and cut at every awkward place."""
    noise = random.Random(1)
    files = {
        "raw": noise.randbytes(5 * LARGE + 777),
        "packed": bytes(range(256)) * (LARGE // 64),
        "pages": noise.randbytes(3 * LARGE),
        "text": b"so many words, and none of them new. " * 10_000,
        "numbers": array("f", [noise.gauss(0, 1) for _ in range(LARGE // 2)]).tobytes(),
    }
    home, store = Spool(tmp_path / "home"), MemoryStore()
    monkeypatch.setattr("support.world.CHUNK", LARGE + 123)
    packing = Throughput()
    packing.encode = encode  # however fast the link is
    commit(home, PART, files)
    asyncio.run(flush(home, PART, TierUploadContext(store, encoding=SharedEncoder(packing))))
    assert {key.rpartition(".")[2] for key in asyncio.run(_keys(store)) if is_chunk(key)} == set(CODECS)
    asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == files
    for name in files:
        path = spool.path(PART) / name
        path.write_bytes(flipped(path.read_bytes(), min(LARGE + PAGE + 1, len(files[name]) - 1)))
    fetched = asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == files and fetched.chunks == len(files)


def test_a_stored_chunk_that_grew_is_corrupt_and_no_refusal(spool, store):
    key = sorted(key for key in asyncio.run(_keys(store.inner)) if is_chunk(key))[0]
    asyncio.run(store.inner.put(key, asyncio.run(store.inner.get(key)) + b"more"))
    with pytest.raises(CorruptChunk, match="not the"):
        asyncio.run(fetch(spool, PART, {"tier": store}))
    assert not list((spool.control / "fetch").iterdir()), "nobody will ask for it again"


def test_fetch_that_is_cancelled_while_it_waits_for_its_place_releases_it(spool, store, monkeypatch):
    entered, real = threading.Event(), fetch_module.make_locked_directory

    def slow(path: Path) -> int:
        fd = real(path)
        entered.set()
        threading.Event().wait(0.1)
        return fd

    async def work() -> None:
        task = asyncio.ensure_future(fetch(spool, PART, {"tier": store}))
        await asyncio.to_thread(entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(fetch_module, "make_locked_directory", slow)
    asyncio.run(work())
    assert len(spool.leftovers()) == 1, "nobody holds it"


def test_leftover_that_cannot_be_removed_is_released(spool, store, monkeypatch):
    interrupted(spool, store, 3)
    monkeypatch.setattr(Path, "rename", lambda *paths: _raise(OSError(errno.EIO, os.strerror(errno.EIO))))
    (left,) = spool.leftovers()
    with pytest.raises(OSError, match="Input/output"):
        spool.discard(left)
    assert spool.leftovers() == [left]


def test_a_tier_that_hangs_keeps_no_other_from_giving_all(spool, store):
    hung = Double()
    hung.delay = 1000.0

    async def work() -> None:
        async with asyncio.timeout(60):
            fetched = await fetch(spool, PART, {"first": hung, "tier": store, "last": hung}, answer_s=0.1)
        assert fetched.tiers == ("tier",) and not fetched.defects

    asyncio.run(work())
    assert read(spool, PART) == FILES
    spool.remove([PART])
    with pytest.raises(StoreUnavailable, match="first: did not answer"):
        asyncio.run(fetch(spool, PART, {"first": hung, "empty": MemoryStore()}, answer_s=0.1))


def test_a_tier_that_fails_is_not_asked_first_for_every_chunk(spool, store):
    failing = Double(store.inner)
    failing.before = lambda operation, key: _raise(StoreUnavailable("gone")) if is_chunk(key) else None
    fetched = asyncio.run(fetch(spool, PART, {"first": failing, "tier": store}, budget(1)))
    assert read(spool, PART) == FILES and fetched.tiers == ("tier",)
    assert len(gets(failing)) == 1


async def _keys(store) -> list[str]:
    return [info.key async for info in store.scan("")]


@pytest.mark.parametrize("keep_manifest", [True, False])
def test_fetch_reads_a_chunk_under_another_checkpoint_of_its_rank(spool, store, keep_manifest):
    """As where equal chunks are shared; under another rank's name nobody looks, and what lies there is not believed."""
    commit(spool, PART, FILES)
    (spool.path(PART) / "weights.bin").unlink()
    if not keep_manifest:
        asyncio.run(store.inner.delete([PART.manifest_key]))
    for key in asyncio.run(_keys(store.inner)):
        if is_chunk(key):
            name = key.rpartition("/")[2]
            data = bytes(asyncio.run(store.inner.get(key)))
            wrong = f"{RUN}/{chunk_key(part(3), *name.split('.'))}"
            other = f"{RUN}/{chunk_key(part(5), *name.split('.'))}"
            asyncio.run(store.inner.put(wrong, flipped(data)))
            asyncio.run(store.inner.put(other, data))
            asyncio.run(store.inner.delete([key]))
    fetched = asyncio.run(fetch(spool, PART, {"tier": store}))
    assert read(spool, PART) == FILES and fetched.tiers == ("tier",)


def test_interrupted_fetch_is_kept_for_a_while_and_then_deleted(spool, store, monkeypatch):
    interrupted(spool, store, 3)

    async def work(patience: float) -> None:
        timed(monkeypatch, taken_up_s=patience)
        async with running(reconciler(spool, {"tier": store})) as daemon:
            await settle(daemon)
            await asyncio.sleep(0.2)
            daemon.wake()
            await settle(daemon)
            if not patience:
                await until(lambda: daemon.wake() or not spool.fetch_directory(PART).exists())

    asyncio.run(work(1000.0))
    assert spool.fetch_directory(PART).exists()
    asyncio.run(work(0.0))
    assert listing(spool) == listing(Spool(spool.root)) and not spool.leftovers()


@pytest.mark.parametrize("why", ["low", "there"])
def test_interrupted_fetch_that_is_in_the_way_is_deleted_at_once(spool, store, why):
    interrupted(spool, store, 3)
    if why == "there":
        commit(spool, PART, FILES)

    async def work() -> None:
        low = {"min_free_percent": 99.99} if why == "low" else {}
        async with running(reconciler(spool, {"tier": store}, **low)) as daemon:
            await until(lambda: daemon.wake() or not spool.fetch_directory(PART).exists())
            if why == "there":
                assert read(spool, PART) == FILES

    asyncio.run(work())


async def test_a_fetch_under_way_is_never_discarded(spool, store):
    async with running(reconciler(spool, {"tier": store}, min_free_percent=99.99)) as daemon:
        await settle(daemon)
        store.delay = 0.1
        task = asyncio.ensure_future(daemon.repairs.fetch(PART))
        while not task.done():
            daemon.wake()
            await asyncio.sleep(0.01)
        await task
    assert read(spool, PART) == FILES


async def test_cancelled_thread_is_at_rest_when_the_cancellation_is_raised():
    begun, ended = threading.Event(), []

    def work() -> None:
        begun.set()
        threading.Event().wait(0.1)
        ended.append(True)

    task = asyncio.ensure_future(thread_uncancelled(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
