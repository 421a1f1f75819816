"""Tier -> any directory: what `tierd restore` does, with no spool, no daemon and no configuration.

Law: the same as a restore's: newest first down the timeline, proven-bad checkpoints are passed over and named, and what
stands in the directory at the end was verified. Until then it stands beside it, under another name.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tierd.core.errors import ConfigError, CorruptChunk, StoreUnavailable
from tierd.core.ids import PartId
from tierd.core.manifest import MANIFEST_NAME, Manifest
from tierd.core.manifest import encode as encode_manifest
from tierd.core.resume import Candidate, not_found, restore_candidates
from tierd.daemon.fetch import Copies, download
from tierd.daemon.observe import look_around
from tierd.persist import sync_directory, write_file
from tierd.stores.base import Store


@dataclass(frozen=True, slots=True)
class Exported:
    """What was restored where: one directory a rank. `skipped` names newer checkpoints that were passed over."""

    run: str
    step: int
    attempt: str
    directories: tuple[str, ...]
    size: int
    tiers: tuple[str, ...]
    skipped: tuple[str, ...]


async def export(
    stores: Mapping[str, Store],
    run: str,
    target: Path,
    step: int | None,
    attempt: str | None,
    moved: Callable[[int, int], None],
) -> Exported:
    """Restore every rank's files of the newest verified checkpoint under `target`, which is empty or absent.

    Args:
        moved: told `(bytes done, bytes in all)` as files arrive.

    Raises:
        CheckpointNotFound: none could be verified, or not the one asked for.
        StoreUnavailable: a tier did not answer, so that a newer or the right copy may lie there.
        ConfigError: `target` is in the way.
    """
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {target}: it exists and is not an empty directory; nothing was touched")
    world = await look_around(None, stores, run)
    resume = restore_candidates(world, run, step, attempt)
    if resume.unreached:
        raise StoreUnavailable(f"not every tier could be asked: {', '.join(resume.unreached)}")
    skipped: list[str] = []
    for candidate in resume.candidates:
        aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            parts, tiers = await _all_ranks(stores, candidate, aside, moved)
            aside.replace(target)
        except CorruptChunk as error:
            skipped.append(f"step {candidate.checkpoint.step} (attempt {candidate.checkpoint.attempt}): {error}")
            continue
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        sync_directory(target.parent)
        return Exported(
            run,
            candidate.checkpoint.step,
            candidate.checkpoint.attempt,
            tuple(str(target / manifest.part.name) for manifest in parts),
            sum(manifest.size for manifest in parts),
            tiers,
            tuple(skipped),
        )
    raise not_found(resume, run, step, skipped)


async def _all_ranks(
    stores: Mapping[str, Store], candidate: Candidate, aside: Path, moved: Callable[[int, int], None]
) -> tuple[list[Manifest], tuple[str, ...]]:
    found = [await _ask(stores, PartId(candidate.checkpoint, rank, candidate.world)) for rank in range(candidate.world)]
    total, done = sum(manifest.size for _, manifest in found), 0

    def arrived(size: int) -> None:
        nonlocal done
        done += size
        moved(done, total)

    used: set[str] = set()
    for copies, manifest in found:
        home = aside / manifest.part.name
        home.mkdir(parents=True)
        await download(home, manifest, copies, arrived)
        write_file(home / MANIFEST_NAME, MANIFEST_NAME, encode_manifest(manifest))
        sync_directory(home)
        used |= copies.used
    return [manifest for _, manifest in found], tuple(name for name in stores if name in used)


async def _ask(stores: Mapping[str, Store], part: PartId) -> tuple[Copies, Manifest]:
    copies = Copies(part, stores)
    await copies.ask()
    manifest = next(iter(copies.manifests.values()), None)
    if manifest is None:
        copies.give_up("its manifest", copies.unavailable)
        raise AssertionError
    copies.agree(manifest)
    return copies, manifest
