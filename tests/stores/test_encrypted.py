"""An encrypted tier keeps what it holds to itself, and believes nothing that its key did not make under that name."""

from __future__ import annotations

import asyncio
import os
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores.conformance import Conformance, keys
from support.doubles import Double, contents, flipped

from tierd.core.errors import (
    ConfigError,
    CorruptChunk,
    FormatTooNew,
    ManifestError,
    ObjectNotFound,
    StoreRefused,
    WrongKey,
)
from tierd.core.manifest_codec import MAX_MANIFEST_SIZE, decode, seal, unwrap, wrap
from tierd.core.urls import parse_url
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey, read_key
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore
from tierd.stores.open import open_store
from tierd.stores.retry import RetryingStore
from tierd.stores.store_wrappers import CountedStore, DeletionGuard, LimitedStore

SECRET = bytes(range(32))
KEY, OTHER = EncryptionKey(SECRET), EncryptionKey(bytes(32))
OWNER = "000000000100.01941f297c00-0a0b0c0d"


def chunk_key(digest: str, codec: str = "raw", run: str = "run", owner: str = OWNER, rank: int = 0) -> str:
    return f"{run}/chunks/{owner}/{rank:05}/{digest}.{codec}"


def manifest_key(owner: str = OWNER, rank: int = 0, world: int = 2, where: str = "manifests") -> str:
    return f"run/{where}/{owner}/{rank:05}-of-{world:05}.json"


ONE, TWO = chunk_key("1" * 32), chunk_key("2" * 32)


class VersionOne(msgspec.Struct):
    version: int


class TestEncryptedMemoryStore(Conformance):
    many = 1100
    operations = 200

    @pytest.fixture
    def make(self):
        return lambda: EncryptedStore(MemoryStore(), KEY)


class TestEncryptedFileStore(Conformance):
    many = 300
    operations = 60

    @pytest.fixture
    def make(self, tmp_path):
        return lambda: EncryptedStore(FileStore(tmp_path), KEY)


class TestEncryptedStoreThatVerifies(Conformance):
    many = 10
    operations = 20
    verifies = "crc64nvme"

    @pytest.fixture
    def make(self):
        def made():
            double = Double()
            double.verifies = "crc64nvme"
            return EncryptedStore(double, KEY)

        return made


NAMES = st.one_of(
    st.builds(
        chunk_key,
        st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}"),
        st.sampled_from(["raw", "zst"]),
        st.sampled_from(["run", "a"]),
        st.sampled_from([OWNER, OWNER.replace("1", "2")]),
        st.sampled_from([0, 7]),
    ),
    st.sampled_from([f"run/chunks/{OWNER}/00000/{name}" for name in ("README", "0123", "zz", "x/y")]),
    st.sampled_from(["run/pins/x", "README.md", "run/chunks/stray", manifest_key()]),
)


@given(st.lists(NAMES, max_size=12, unique=True), st.data())
def test_scan_of_an_encrypted_store_equals_the_scan_of_a_plain_store(names, data):
    prefix = data.draw(st.sampled_from(["", "run/", "run/chunks/", *names]).flatmap(_cut))
    after = data.draw(st.sampled_from(["", *names, *(f"{name[:60]}\x7f" for name in names)]).flatmap(_cut))

    async def work():
        plain, encrypted = MemoryStore(), EncryptedStore(MemoryStore(), KEY)
        for number, name in enumerate(names):
            for store in (plain, encrypted):
                await store.put(name, b"x" * number)
        want = [(info.key, info.size) async for info in plain.scan(prefix, after)]
        assert [(info.key, info.size) async for info in encrypted.scan(prefix, after)] == want
        assert await contents(encrypted) == await contents(plain)
        await encrypted.delete(names[::2])
        assert sorted(await keys(encrypted)) == sorted(set(names) - set(names[::2]))

    asyncio.run(work())


def _cut(text: str) -> st.SearchStrategy[str]:
    return st.integers(0, len(text)).map(lambda end: text[: len(text) - end]) | st.just(text)


async def test_encrypted_place_shows_neither_bytes_nor_digests_nor_equality():
    data = b"what nobody should read " * 50
    digest = "0123456789abcdef" * 2

    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    names = [chunk_key(digest, rank=rank) for rank in (0, 1)] + [chunk_key(digest, owner=OWNER.replace("1", "2"))]
    names += [manifest_key(), manifest_key(where="quarantine"), manifest_key(where="flushing") + ".x", "run/else"]
    for name in names:
        await store.put(name, data)
    lies = await contents(inner)
    assert [await store.get(name) for name in names] == [data] * len(names)
    assert not any(digest in name for name in lies)
    assert len({name.rpartition("/")[2] for name in lies if "/chunks/" in name}) == 3
    assert len(set(lies.values())) == len(names)
    assert not any(piece in found for found in lies.values() for piece in (b"what", b"nobody"))


async def test_the_same_bytes_never_have_the_same_nonce():
    inner = MemoryStore()
    store, seen = EncryptedStore(inner, KEY), set()
    for _ in range(50):
        await store.put(ONE, b"same")
        (name,) = await keys(inner)
        seen.add(bytes(await inner.get(name))[:12])
    assert len(seen) == 50


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ONE, TWO),
        (ONE, chunk_key("1" * 32, "zst")),
        (ONE, chunk_key("1" * 32, rank=1)),
        (ONE, chunk_key("1" * 32, owner=OWNER.replace("1", "2"))),
        (ONE, chunk_key("1" * 32, run="other")),
        (manifest_key(), manifest_key(rank=1)),
        (manifest_key(), manifest_key(world=3)),
        (manifest_key(), manifest_key(where="flushing")),
        (manifest_key(), manifest_key(where="quarantine")),
        (manifest_key(), manifest_key(owner=OWNER.replace("100", "200"))),
        (manifest_key(), manifest_key().replace("run/", "other/")),
    ],
)
async def test_object_put_in_the_place_of_another_is_not_believed(first, second):
    """Another rank, checkpoint, run, digest, codec: a writer on the tier cannot swap them."""

    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    await store.put(first, b"first")
    await store.put(second, b"other")
    one, two = store._hidden(first), store._hidden(second)
    a, b = bytes(await inner.get(one)), bytes(await inner.get(two))
    await inner.put(one, b)
    await inner.put(two, a)
    for key in (first, second):
        with pytest.raises(CorruptChunk if "/chunks/" in key else ManifestError, match="under this name"):
            await store.get(key)


@pytest.mark.parametrize("key", [ONE, manifest_key()])
async def test_every_flip_and_every_cut_is_noticed(key):
    data = b"checkpoint" * 3

    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    await store.put(key, data)
    ((name, lies),) = (await contents(inner)).items()
    harmed = [flipped(lies, at) for at in range(len(lies))]
    harmed += [lies[:end] for end in range(len(lies))] + [lies + b"x", b"x" + lies, bytes(len(lies))]
    for one in harmed:
        await inner.put(name, one)
        into = bytearray(b"!" * len(data))
        with pytest.raises((CorruptChunk, ManifestError, StoreRefused)) as caught:
            await store.get(key, memoryview(into))
        assert caught.type is not StoreRefused or len(one) > len(lies)
        assert bytes(into) == b"!" * len(data)  # nothing is handed on before it was verified


@pytest.mark.parametrize("cut", [0, 1, 27])
@pytest.mark.parametrize("key", [ONE, manifest_key(), manifest_key(where="flushing") + ".x"])
async def test_an_empty_or_cut_object_is_refused_by_the_store_itself(key, cut):
    """Whatever a later layer would do: no caller may take an object that was cut to nothing for an empty one."""

    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    await store.put(key, b"")  # an empty object has a tag, too, and comes back as what it is
    ((name, lies),) = (await contents(inner)).items()
    assert len(lies) >= 28 and bytes(await store.get(key)) == b""
    await inner.put(name, lies[:cut])
    for into in (None, memoryview(bytearray(8))):
        with pytest.raises(CorruptChunk if key == ONE else ManifestError):
            await store.get(key, into)


MARKS = [f"run/pins/{OWNER}", f"run/pruning/{OWNER}.01941f297c00-0a0b0c0d"]


@pytest.mark.parametrize("key", MARKS)
async def test_pins_and_marks_have_a_tag_and_those_of_older_tiers_have_none(key):
    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    await inner.put(key, b"")  # as tierd wrote them before they had a tag
    assert bytes(await store.get(key)) == b""
    await store.put(key, b"")
    ((name, lies),) = (await contents(inner)).items()
    assert name == key and unwrap(lies, key).key_id == KEY.id
    assert [(info.key, info.size) async for info in store.scan("")] == [(key, 0)]
    assert bytes(await store.get(key)) == b""
    with pytest.raises(WrongKey):
        await EncryptedStore(inner, OTHER).get(key)
    await inner.put(key, lies.replace(b"encrypted", b"Encrypted"))
    with pytest.raises(ManifestError):
        await store.get(key)


async def test_large_chunk_is_encrypted_in_pieces_and_decrypted_into_a_buffer():
    data = random.Random(5).randbytes((5 << 20) + 7)

    store = EncryptedStore(MemoryStore(), KEY)
    await store.put(ONE, data)
    into = bytearray(len(data) + 10)
    found = await store.get(ONE, memoryview(into))
    assert found.obj is into and bytes(found) == data and into[len(data) :] == bytes(10)
    assert bytes(await store.get(ONE)) == data
    with pytest.raises(StoreRefused, match=rf"{len(data)}\b.*\b100\b"):
        await store.get(ONE, memoryview(bytearray(100)))
    with pytest.raises(ObjectNotFound):
        await store.get(TWO, memoryview(into))


# -- other keys -------------------------------------------------------------------------------------------------------


def test_a_manifest_of_another_key_or_of_none_is_not_called_corrupt():
    async def work():
        inner = MemoryStore()
        store = EncryptedStore(inner, KEY)
        await EncryptedStore(inner, OTHER).put(manifest_key(), b"{}")
        with pytest.raises(
            WrongKey, match=f"encrypted with key {OTHER.id}, which the key in .* \\({KEY.id}\\) does not"
        ):
            await store.get(manifest_key())
        with pytest.raises(WrongKey, match=f"encrypted with key {OTHER.id}: name its file"):
            decode(bytes(await inner.get(manifest_key())))
        await inner.put(manifest_key(), seal(VersionOne(version=1)))
        with pytest.raises(WrongKey, match="is not encrypted, and could be anybody's"):
            await store.get(manifest_key())
        await inner.put(manifest_key(), wrap(KEY.id, b"").replace(b'"version":2', b'"version":3'))
        with pytest.raises(ManifestError, match="its own digest"):
            await store.get(manifest_key())

    asyncio.run(work())
    assert issubclass(WrongKey, FormatTooNew)  # so that nobody quarantines, prunes or steps back over it


async def test_a_key_id_that_was_changed_with_its_seal_opens_nothing():
    inner = MemoryStore()
    await EncryptedStore(inner, OTHER).put(manifest_key(), b"{}")
    stolen = unwrap(bytes(await inner.get(manifest_key())), "").encrypted
    await inner.put(manifest_key(), wrap(KEY.id, stolen.encode()))
    with pytest.raises(ManifestError, match=f"not what key {KEY.id} encrypted"):
        await EncryptedStore(inner, KEY).get(manifest_key())
    for odd in ("=", "AAAA====", "ä", "A A", "A"):
        await inner.put(manifest_key(), wrap(KEY.id, odd.encode()))
        with pytest.raises(ManifestError):
            await EncryptedStore(inner, KEY).get(manifest_key())


async def test_manifest_that_no_reader_would_accept_is_not_put():
    inner = MemoryStore()
    with pytest.raises(StoreRefused, match="too many"):
        await EncryptedStore(inner, KEY).put(manifest_key(), bytes(MAX_MANIFEST_SIZE))
    assert not await keys(inner)


# -- keys -------------------------------------------------------------------------------------------------------------


def key_file(path, text=None, mode=0o600):
    path.write_text(SECRET.hex() + "\n" if text is None else text)
    path.chmod(mode)
    return path


def test_a_key_shows_its_id_and_nothing_else(tmp_path):
    key = read_key(key_file(tmp_path / "key", mode=0o400))
    assert (key.id, repr(key)) == (KEY.id, f"Key({KEY.id})")
    assert key.id != OTHER.id and len(key.id) == 16
    store = open_store(parse_url("file:///mnt/x"), key=key)
    for shown in (repr(key), str(key), repr(store), f"{store}"):
        assert SECRET.hex() not in shown and repr(SECRET) not in shown
    assert not hasattr(key, "__dict__")


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "64 hex digits"),
        ("ab" * 31, 0o600, "64 hex digits"),
        ("ab" * 33, 0o600, "64 hex digits"),
        ("g" * 64, 0o600, "64 hex digits"),
        ("ab" * 32 + "\n\n", 0o600, "64 hex digits"),
        ("ab" * 32, 0o640, "chmod 600"),
        ("ab" * 32, 0o604, "chmod 600"),
    ],
)
def test_a_file_that_is_no_key_or_open_to_others_is_refused(tmp_path, text, mode, says):
    with pytest.raises(ConfigError, match=says) as caught:
        read_key(key_file(tmp_path / "key", text, mode))
    assert not text or text not in str(caught.value)
    assert str(tmp_path / "key") in str(caught.value)


def test_a_missing_file_a_fifo_and_anothers_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*openssl rand"):
        read_key(tmp_path / "none")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="no plain file"):
        read_key(tmp_path / "fifo")
    with pytest.raises(ConfigError):
        read_key(tmp_path)
    if os.geteuid() == 0:
        path = key_file(tmp_path / "key")
        os.chown(path, 4711, -1)
        with pytest.raises(ConfigError, match="belongs to user 4711"):
            read_key(path)
    (tmp_path / "link").symlink_to(key_file(tmp_path / "real"))  # as secrets are mounted
    assert read_key(tmp_path / "link").id == KEY.id


def test_memory_of_an_encrypted_object_is_counted_twice():
    plain, copying = MemoryStore(), MemoryStore()
    copying.copies_in_memory = 2
    assert [EncryptedStore(it, KEY).memory_for(7) for it in (plain, copying)] == [14, 21]
    assert plain.memory_for(7) == 7
    for around in (RetryingStore, CountedStore, DeletionGuard, lambda store: LimitedStore(store, 1, 1)):
        assert around(copying).memory_for(7) == 14
