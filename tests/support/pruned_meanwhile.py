"""A directory tier whose checkpoints are deleted, and newer ones put there, before any one request of a reader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.doubles import is_manifest

from tierd.stores.file_store import FileStore


def lay(tier: Path, objects: dict[str, bytes]) -> None:
    """Have a directory hold these objects, changed in the order in which a flush and a prune do it."""
    present = {str(path.relative_to(tier)) for path in tier.rglob("*") if path.is_file()}
    for key in sorted(objects.keys() - present, key=is_manifest):
        (tier / key).parent.mkdir(parents=True, exist_ok=True)
        (tier / key).write_bytes(objects[key])
    for key in sorted(present - objects.keys(), key=is_manifest, reverse=True):
        (tier / key).unlink()
        if not any((tier / key).parent.iterdir()):
            (tier / key).parent.rmdir()


def moments(home: Path, before: dict[str, bytes], after: dict[str, bytes], patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a new directory with a `tier` for each request of the command that the loop's body runs: right before this
    request the tier changes from `before` to `after`. It ends after a run that made no such request.
    """
    asked, moment, tier = 0, 0, home
    get, get_small, scan_pages = FileStore.get, FileStore.get_small, FileStore.scan_pages

    def enter(store: FileStore) -> None:
        nonlocal asked
        if repr(store) == f"FileStore({str(tier)!r})":
            asked += 1
            if asked == moment:
                lay(tier, after)

    async def entered_get(self, key, into=None):  # type: ignore[no-untyped-def]
        enter(self)
        return await get(self, key, into)

    async def entered_get_small(self, keys):  # type: ignore[no-untyped-def]
        enter(self)
        return await get_small(self, keys)

    async def entered_pages(self, prefix, after=""):  # type: ignore[no-untyped-def]
        enter(self)
        async for page in scan_pages(self, prefix, after):
            yield page

    patch.setattr(FileStore, "get", entered_get)
    patch.setattr(FileStore, "get_small", entered_get_small)
    patch.setattr(FileStore, "scan_pages", entered_pages)
    while asked >= moment:
        asked, moment = 0, moment + 1
        tier = home / f"{moment}" / "tier"
        tier.mkdir(parents=True)
        lay(tier, before)
        yield tier.parent
    assert moment > 3, "the command read nothing"
