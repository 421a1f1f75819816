"""Writes the golden fixture of an encrypted tier: `python tests/format/make_v1_encrypted.py DIRECTORY`.

Invariant: run once, for `tests/format/v1-encrypted/`; what lies there is never edited and never written again. It is
the tier of `tests/format/v1/`, encrypted with `SECRET`; nonces are random. `tests/test_format.py` reads it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tierd.stores.encrypted_store import EncryptedStore
from tierd.stores.encryption_keys import EncryptionKey
from tierd.stores.file_store import FileStore

SECRET = bytes(range(0, 96, 3))


async def build(root: Path) -> None:
    """Write the tier."""
    plain = FileStore(Path(__file__).parent / "v1" / "tier")
    encrypted = EncryptedStore(FileStore(root), EncryptionKey(SECRET))
    async for info in plain.scan(""):
        await encrypted.put(info.key, await plain.get(info.key))
    (root / ".tmp").rmdir()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    if any(target.glob("*")):
        sys.exit(f"{target} is not empty: fixtures are written once")
    asyncio.run(build(target))
