"""Where hostile input comes in at a running daemon, and from directories: for `faults.hostile`.

Each is given a seeded `Random`, a room of its own and a canary directory that nothing may touch; it answers how many
inputs it made.
"""

from __future__ import annotations

import array
import asyncio
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from faults.hostile.mutation import dumped, mutated, spoiled, text
from faults.hostile.readers import HANDED, MANIFEST, RAW, REQUESTS
from faults.rounds import Lost
from support.by_hand import seal
from support.world import Daemon, commit, part, read

from tierd.core.errors import TierdError
from tierd.core.ids import chunk_key
from tierd.daemon.scrub.scrub_history import ScrubHistory
from tierd.daemon.tiers.tier_observer import observe_places
from tierd.daemon.tiers.tier_pauses import TierPause
from tierd.ipc.daemon_connection import DaemonConnection
from tierd.ipc.messages import StatusRequest
from tierd.spool.spool import Spool
from tierd.stores.file_store import FileStore
from tierd.stores.memory_store import MemoryStore


def control(noise: random.Random, room: Path, canary: Path) -> int:
    """Frames to a real daemon's two sockets; whatever they hold, it answers the next caller."""
    home = room / "spool"
    done = 0
    try:
        with Daemon(home, {"near": MemoryStore()}) as daemon:
            for _ in range(12):
                _frames(noise, home / ".tierd" / "control.sock", socket.SOCK_STREAM, REQUESTS)
                _packets(noise, home / ".tierd" / "handoff.sock")
                done += 2
            with DaemonConnection(daemon.spool) as link:
                if "status" not in link.ask(StatusRequest(), 60):
                    raise Lost("the daemon answers no more")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return done


def _frames(noise: random.Random, path: Path, kind: int, honest: list[dict]) -> None:
    lines = [socket.socket(socket.AF_UNIX, kind) for _ in range(noise.choice([1, 1, 5]))]
    try:
        for line in lines:
            line.settimeout(60)
            line.connect(str(path))
            data = dumped(mutated(noise.choice(honest), noise, noise.randrange(1, 3)), noise) + b"\n"
            match noise.randrange(5):
                case 0:
                    data = data[:-1] * noise.choice([1, 2])  # half a frame
                case 1:
                    data = bytes([noise.randrange(256)]) * (noise.choice([1, 3]) << 16)  # too long
                case 2:
                    data = b'{"x":' + b"[" * 30_000 + b',"op":"status"}\n'
                case 3:
                    data = spoiled(data, noise)
            try:
                line.sendall(data)
            except OSError:
                continue  # it hung up: its right
    finally:
        for line in lines:
            line.close()


def _packets(noise: random.Random, path: Path) -> None:
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(60)
        line.connect(str(path))
        for _ in range(noise.randrange(1, 4)):
            data = dumped(mutated(noise.choice(HANDED), noise, noise.randrange(3)), noise)[: 15 << 10]
            for _ in range(noise.randrange(4)):
                fds.append(_descriptor(noise))
            given = array.array("i", noise.sample(fds, min(len(fds), noise.randrange(9))))
            try:
                line.sendmsg([data or b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)] if given else [])
            except OSError:
                break
    for fd in fds:
        os.close(fd)


def _descriptor(noise: random.Random) -> int:
    match noise.randrange(4):
        case 0:
            return os.open("/dev/null", os.O_RDONLY)
        case 1:
            fd, other = os.pipe()
            os.close(other)
            return fd
        case 2:
            fd = os.memfd_create("hostile")
            os.ftruncate(fd, noise.choice([0, 1, 4096, 1 << 40]))
            return fd
    import fcntl

    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, noise.choice([4096, 1 << 20, 8192, 4097]))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def entries(noise: random.Random, room: Path, canary: Path) -> int:
    """Directory entries that no writer leaves, in a spool and on a tier of files."""
    home, tier = room / "spool", room / "tier"
    done = 0
    try:
        tier.mkdir()
        spool, store = Spool(home), FileStore(tier)
        for step in (1, 2):
            commit(spool, part(step))

        async def put() -> None:
            await store.put(part(1).manifest_key, (spool.path(part(1)) / "manifest.json").read_bytes())
            await store.put(f"run/{chunk_key(part(1), '0' * 32, 'raw')}", RAW)

        asyncio.run(put())
        for _ in range(noise.randrange(3, 12)):
            done += _plant(noise, noise.choice([home, home / ".tierd", tier]), canary)
        try:
            asyncio.run(_observe(spool, store))
        except (TierdError, OSError):
            pass
        for which in (part(1), part(2)):
            try:
                read(spool, which)
            except (TierdError, OSError):
                pass
        for call in (
            spool.pins,
            spool.leftovers,
            spool.quarantined,
            lambda: spool.attempts("run"),
            lambda: TierPause(spool),
        ):
            try:
                call()
            except (TierdError, OSError):
                pass
        ScrubHistory(spool.control / "scrubbed.json").load()
        for remove in (
            lambda: [spool.discard(name) for name in spool.leftovers()],
            lambda: spool.remove([part(1), part(2)]),
        ):
            try:
                remove()
            except (TierdError, OSError):
                pass
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(tier, ignore_errors=True)
    return done


async def _observe(spool: Spool, store: FileStore) -> None:
    try:
        await observe_places(spool, {"tier": store}, None)
        keys = [info.key async for info in store.scan("")]
        for key in keys:
            try:
                await store.get(key)
            except TierdError:
                pass
        await store.delete(keys)
    finally:
        await store.aclose()


def _plant(noise: random.Random, home: Path, canary: Path) -> int:
    """One entry, in the place of something or beside it."""
    places = [Path(directory, name) for directory, names, files in os.walk(home) for name in (*names, *files)]
    places = [place for place in places if ".sock" not in place.name]
    path = noise.choice(places) if places else home / "x"
    if noise.random() < 0.5:
        path = path.parent / noise.choice(
            [
                text(noise).replace("/", "_").replace("\x00", "_")[:100] or "x",
                "paused",
                "scrubbed.json",
                "pins",
                "lock",
                "manifests",
                "000000000009.001800000001-00000001",
                "00000-of-00001",
                "00000-of-00001.json",
                "..x",
                "a\nb",
            ]
        )
        if path.name in (".", ".."):
            return 0
    try:
        name = os.fsencode(path) if noise.random() < 0.9 else os.fsencode(path.parent) + b"/\xff\xfe"
    except UnicodeEncodeError:
        return 0
    try:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        elif os.path.lexists(name):
            os.unlink(name)
        match noise.randrange(6):
            case 0:
                os.mkfifo(name)
            case 1:
                os.symlink(canary, name)
            case 2:
                os.symlink(canary / "mine", name)
            case 3:
                os.mkdir(name)
            case 4:
                with open(name, "wb") as file:
                    file.write(
                        noise.choice([b"", b"\xff" * 100, seal(dumped(MANIFEST, noise)), b"9999-99-99", b"[" * 10**5])
                    )
            case 5:
                os.symlink(b"/dev/zero", name)
    except OSError:
        return 0
    return 1


DOORS: dict[str, Callable[[random.Random, Path, Path], int]] = {
    "control": control,
    "entries": entries,
}
