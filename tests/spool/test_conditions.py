"""What the spool's file system refused, and the way out that the error names."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierd.core.errors import SpoolFull, SpoolUnusable, TierdError
from tierd.core.storage_faults import disk_full_remedy
from tierd.spool.spool_access import spool_errors


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, SpoolFull, "df -i"),
        (errno.EDQUOT, SpoolFull, "quota .* free space"),
        (errno.EFBIG, SpoolUnusable, "ulimit -f"),
    ],
)
def test_error_of_the_file_system_names_the_way_out(number: int, kind: type[TierdError], words: str) -> None:
    with pytest.raises(kind, match=f"spool /s: .*{words}"), spool_errors("spool /s"):
        raise OSError(number, os.strerror(number))


def test_arena_beyond_the_limit_of_a_file_size_names_the_limit() -> None:
    code = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from tierd.spool.arena import Arena\n"
        "Arena(1 << 24)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError: an arena of 16777216 bytes: File too large" in ended.stderr
    assert "ulimit -f" in ended.stderr


@pytest.mark.parametrize(
    ("blocks", "inodes", "words", "absent"),
    [
        ((1000, 500), (40, 1), "inodes are used up", "free space on"),
        ((10**9, 5 * 10**8), (10**8, 2000), "inodes are used up", "free space on"),
        ((1000, 0), (10**6, 9 * 10**5), "free space on", "inodes"),
        ((1000, 0), (0, 0), "free space on", "inodes"),  # Btrfs counts no inodes
        ((1000, 0), (64, 0), "free space on", "inodes"),  # XFS makes inodes of free blocks
        ((1000, 500), (0, 0), "free space on", "inodes"),
    ],
)
def test_full_inodes_are_distinguished_from_full_blocks(
    blocks: tuple[int, int], inodes: tuple[int, int], words: str, absent: str
) -> None:
    room = SimpleNamespace(f_blocks=blocks[0], f_bavail=blocks[1], f_files=inodes[0], f_favail=inodes[1])
    text = disk_full_remedy(errno.ENOSPC, "in the spool", room)
    assert words in text and absent not in text


_ON_A_SMALL_DISK = """
import asyncio, sys
from pathlib import Path
from tierd.core.errors import TierdError
from tierd.spool.spool import Spool
from tierd.spool.spool_access import spool_errors
from tierd.stores.file_store import FileStore

disk = Path(sys.argv[1])
(disk / "tier").mkdir()
spool = Spool(disk / "spool")
for number in range(int(sys.argv[2])):
    (disk / str(number)).touch()
for place in ("spool", "tier"):
    try:
        if place == "tier":
            for number in range(100):
                asyncio.run(FileStore(disk / "tier").put(f"r/{number}", bytes(1 << 18)))
        else:
            with spool_errors("spool", spool.root):
                for number in range(100):
                    (spool.root / str(number)).write_bytes(bytes(1 << 18))
    except TierdError as error:
        print(type(error).__name__, error)
"""


def on_a_small_disk(where: Path, options: str, *args: str) -> list[str]:
    """What a spool and a tier on a file system of its own say when it is full."""
    where.mkdir()
    script = f'mount -t tmpfs -o {options} none "$0" && exec {sys.executable} -c "$1" "$0" "$2"'
    command = ["unshare", "-m", "sh", "-c", script, str(where), _ON_A_SMALL_DISK, *args]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "permitted" in ended.stderr or "denied" in ended.stderr:
        pytest.skip("needs root, to mount a file system")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_spool_and_tier_without_inodes_say_so(tmp_path: Path) -> None:
    spool, tier = on_a_small_disk(tmp_path / "disk", "size=64m,nr_inodes=60", "30")
    assert spool.startswith("SpoolFull") and "inodes are used up" in spool
    assert tier.startswith("StoreFull") and "inodes are used up" in tier


def test_spool_and_tier_without_blocks_say_so(tmp_path: Path) -> None:
    spool, tier = on_a_small_disk(tmp_path / "disk", "size=4m,nr_inodes=100000", "0")
    assert spool.startswith("SpoolFull") and "keep less in the spool" in spool and "inodes" not in spool
    assert tier.startswith("StoreFull") and "keep less on this tier" in tier and "inodes" not in tier


def test_tier_beyond_the_limit_of_a_file_size_names_the_limit(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    code = (
        "import asyncio, resource, sys\n"
        "from pathlib import Path\n"
        "from tierd.stores.file_store import FileStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "asyncio.run(FileStore(Path(sys.argv[1])).put('r/one', bytes(1 << 18)))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tier")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "StoreRefused" in ended.stderr and "File too large" in ended.stderr and "ulimit -f" in ended.stderr
