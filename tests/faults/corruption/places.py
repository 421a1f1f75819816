"""A small world on every kind of place, kept so that it can be harmed and put back: for `faults.corruption`.

Two attempts with a rollback, two ranks, a second run: a spool on a file system and two tiers in memory, written by
tierd's own flush. `near` holds planes, zstd and raw, `far` everything raw; chunks are shared between checkpoints. In
one world of two, `near` is encrypted: then a harm is done to the bytes that lie there, or by who has the key.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from faults.corruption.cipher import UNREADABLE, Cipher
from support.world import attempt

from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import VERSION, Manifest, Origin
from tierd.core.manifest_codec import decode
from tierd.daemon.transfer.chunk_source import TierUploadContext
from tierd.daemon.transfer.flush import flush
from tierd.daemon.transfer.shared_encoding import SharedEncoder, Throughput
from tierd.spool.file_io import write_file
from tierd.spool.spool import Spool
from tierd.stores.base import Store
from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.memory_store import MemoryStore

SECRET = bytes(range(32))
RUN, OTHER = "run", "other"
TIERS = ("near", "far")
WORLD = 2  # ranks
CHUNK = 4096  # bytes, at most
# (run, launch, step): the second launch of the first run resumed from its step 2, and saved step 3 again.
CHECKPOINTS = ((RUN, 1, 1), (RUN, 1, 2), (RUN, 1, 3), (RUN, 2, 3), (RUN, 2, 4), (OTHER, 1, 4))
ORIGIN = {attempt(1): None, attempt(2): (attempt(1), 2)}


class Plain(Throughput):
    """An encoder that never finds packing worth it."""

    def should_compress(self) -> bool:
        return False


def contents(run: str, launch: int, step: int, rank: int) -> dict[str, bytes]:
    """What a part holds: numbers that change, some that never do, noise, text, and nothing."""
    mine = np.random.default_rng([len(run), launch, step, rank])
    still = np.random.default_rng([len(run), rank])
    table = np.random.default_rng([len(run), rank, 1]).integers(0, 256, (100, 64), np.uint8)
    for number in range(2 * step + launch):  # few rows change at each step, so it is stored as patches
        table[7 * number % 100] = np.random.default_rng([rank, number]).integers(0, 256, 64, np.uint8)
    return {
        "deep/table.bin": table.tobytes()[:-11],
        "tensors.bin": mine.normal(size=2500).astype("<f4").tobytes() + mine.bytes(300),
        "deep/frozen.bin": still.normal(size=1500).astype("<f4").tobytes(),
        "deep/noise.bin": mine.bytes(700),
        "state.json": b'{"step": %d, "rank": %d, "text": "%s"}' % (step, rank, b"again and " * 20),
        "empty": b"",
    }


@dataclass
class Places:
    """The world as it is now, and as it was. Stores are dicts, and the spool is small: putting it back is cheap."""

    spool: Spool
    memory: dict[str, MemoryStore]
    pristine: dict[str, dict[str, bytes]]  # tier -> key -> content
    objects: dict[str, dict[str, bytes]]  # tier -> name as it lies there -> bytes, as they were
    files: dict[str, bytes]  # path in the spool -> content
    parts: list[PartId]
    held: dict[PartId, dict[str, bytes]]
    forms: dict[str, dict[str, bytes]] = field(default_factory=dict)  # raw digest -> codec -> the encoded bytes
    sizes: dict[str, int] = field(default_factory=dict)  # raw digest -> raw size of the chunk
    gone: set[PartId] = field(default_factory=set)  # parts that the spool was relieved of in this trial
    cipher: Cipher | None = None  # of the tier `near`, where that is encrypted
    stores: dict[str, Store] = field(default_factory=dict)  # as tierd gets them

    def __post_init__(self) -> None:
        self._root = f"{self.spool.root}/"
        self._wanted = {part: {path for path in self.files if path.startswith(f"{part.path}/")} for part in self.parts}

    def contents(self, tier: str) -> Iterator[tuple[str, bytes]]:
        """Every object by its key, and what it holds; of what nobody can decrypt, `UNREADABLE`."""
        cipher = self._cipher(tier)
        for key, (data, _) in self.memory[tier].objects.items():
            if cipher is None:
                yield key, data
            else:
                shown = cipher.shown(key)
                yield shown, cipher.opened(shown, data)

    def _cipher(self, tier: str) -> Cipher | None:
        return self.cipher if tier == "near" else None

    def _hidden(self, tier: str, key: str) -> str:
        cipher = self._cipher(tier)
        return cipher.hidden(key) if cipher else key

    def get(self, tier: str, key: str) -> bytes | None:
        """What an object holds."""
        data, cipher = self.raw(tier, key), self._cipher(tier)
        return data if cipher is None or data is None else cipher.opened(key, data)

    def put(self, tier: str, key: str, content: bytes | None) -> None:
        """As one who has the tier's key does."""
        cipher = self._cipher(tier)
        self.put_raw(tier, key, content if cipher is None or content is None else cipher.closed(key, content))

    def raw(self, tier: str, key: str) -> bytes | None:
        """The bytes of an object as they lie there."""
        found = self.memory[tier].objects.get(self._hidden(tier, key))
        return found[0] if found else None

    def put_raw(self, tier: str, key: str, data: bytes | None) -> None:
        store, name = self.memory[tier], self._hidden(tier, key)
        if data is not None:
            store.sequence += 1
            store.objects[name] = data, store.sequence
        else:
            store.objects.pop(name, None)
        store.keys = sorted(store.objects)

    def read(self, path: str) -> bytes | None:
        try:
            with open(self._root + path, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, path: str, data: bytes | None) -> None:
        whole = self.spool.root / path
        if data is None:
            whole.unlink(missing_ok=True)
        else:
            whole.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(data)

    def drop(self, part: PartId) -> None:
        """Take a part from the spool, as retention does once tiers have it."""
        shutil.rmtree(self.spool.path(part))
        if not any(self.spool.path(part).parent.iterdir()):
            self.spool.path(part).parent.rmdir()
        self.gone.add(part)

    def reset(self) -> None:
        """Everything as it was."""
        for tier, objects in self.objects.items():
            store = self.memory[tier] = MemoryStore()
            store.objects = {key: (data, number) for number, (key, data) in enumerate(objects.items())}
            store.keys, store.sequence = sorted(objects), len(objects)
            self.stores[tier] = EncryptedStore(store, EncryptionKey(SECRET)) if self._cipher(tier) else store
        self.gone.clear()
        (self.spool.control / "scrubbed.json").unlink(missing_ok=True)
        for room in ("fetch", "quarantine", "trash", "stage", "recycle"):
            home = self.spool.control / room
            if any(home.iterdir()):
                shutil.rmtree(home)
                home.mkdir()
        for part in self.parts:
            home = self.spool.path(part)
            wanted = self._wanted[part]
            there = {path.removeprefix(self._root) for path in walk(home)}
            if there - wanted:
                shutil.rmtree(home)
            for path in wanted:
                if self.read(path) != self.files[path]:
                    self.write(path, self.files[path])


def walk(home: Path) -> Iterator[str]:
    """Every file below a directory, and whatever else lies there in a file's place."""
    for directory, _, names in os.walk(home):
        yield from (f"{directory}/{name}" for name in names)


def commit(spool: Spool, part: PartId, files: Mapping[str, bytes], origin: tuple[str, int] | None) -> None:
    with spool.stage(part) as stage:
        described = []
        for name, data in sorted(files.items()):
            (stage.path / name).parent.mkdir(parents=True, exist_ok=True)
            described.append(write_file(stage.path / name, name, data, CHUNK))
        stage.commit(
            Manifest(
                version=VERSION,
                run=part.checkpoint.run,
                step=part.checkpoint.step,
                attempt=part.checkpoint.attempt,
                resumed_from=Origin(step=origin[1], attempt=origin[0]) if origin else None,
                rank=part.rank,
                world_size=part.world,
                created=f"2026-01-01T00:{part.checkpoint.step:02}:00+00:00",
                writer="test",
                metrics={"loss": 1.0 / part.checkpoint.step},
                files=tuple(described),
            )
        )


def build(root: Path, *, encrypted: bool) -> Places:
    """The world, right everywhere; `encrypted` says whether `near` is."""
    spool = Spool(root / "spool")
    memory = {tier: MemoryStore() for tier in TIERS}
    stores: dict[str, Store] = dict(memory)
    cipher = Cipher(SECRET) if encrypted else None
    if encrypted:
        stores["near"] = EncryptedStore(memory["near"], EncryptionKey(SECRET))
    parts = [
        PartId(CheckpointId(run, attempt(n), step), rank, WORLD) for run, n, step in CHECKPOINTS for rank in (0, 1)
    ]
    held = {}

    async def work() -> None:
        base_copies: dict[tuple[str, str, int], Manifest] = {}
        for (run, launch, step), rank in ((one, rank) for one in CHECKPOINTS for rank in range(WORLD)):
            part = PartId(CheckpointId(run, attempt(launch), step), rank, WORLD)
            held[part] = contents(run, launch, step, rank)
            commit(spool, part, held[part], ORIGIN[part.checkpoint.attempt] if run == RUN else None)
            for tier, store in stores.items():
                way = TierUploadContext(
                    store, tier=tier, encoding=SharedEncoder(Throughput() if tier == "near" else Plain())
                )
                await flush(spool, part, way, base=base_copies.get((tier, run, rank)))
                base_copies[tier, run, rank] = decode(bytes(await store.get(part.manifest_key)))

    asyncio.run(work())
    objects = {tier: {key: one[0] for key, one in store.objects.items()} for tier, store in memory.items()}
    pristine = {tier: dict(found) for tier, found in objects.items()}
    if cipher:
        named = {cipher.shown(key): data for key, data in objects["near"].items()}
        pristine["near"] = {key: cipher.opened(key, data) for key, data in named.items()}
        assert UNREADABLE not in pristine["near"].values(), "tierd does not encrypt as FORMAT.md says"
        assert all(data != objects["near"][cipher.hidden(key)] for key, data in pristine["near"].items() if "/" in key)
    files = {
        path.removeprefix(f"{spool.root}/"): Path(path).read_bytes()
        for part in parts
        for path in walk(spool.path(part))
    }
    found = Places(spool, memory, pristine, objects, files, parts, held, cipher=cipher, stores=stores)
    for contained in pristine.values():
        for key, data in contained.items():
            if "/manifests/" in key:
                files = msgspec.json.decode(data)["files"]
                found.sizes |= {chunk["xxh3_128"]: chunk["size"] for file in files for chunk in file["chunks"]}
            if "/chunks/" in key:
                digest, _, form = key.rpartition("/")[2].partition(".")
                found.forms.setdefault(digest, {})[form] = data
    codecs = {form for forms in found.forms.values() for form in forms}
    assert {codec[:5] for codec in codecs} - {"delta"} == {"raw", "zst", "plane", "patch"}, codecs
    shared = [part for part in parts if _shares(pristine["near"][part.manifest_key])]
    assert shared, "nothing is shared between checkpoints"
    return found


def _shares(manifest: bytes) -> bool:
    said = msgspec.json.decode(manifest)
    own = f"{said['step']:012}.{said['attempt']}"
    return any(chunk["stored"]["key"].split("/")[-3] != own for file in said["files"] for chunk in file["chunks"])


def noise_of(seed: int) -> random.Random:
    return random.Random(f"corruption {seed}")
