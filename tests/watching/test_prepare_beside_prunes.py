"""`prepare` and `restore --into` while retention deletes what they read: the newest checkpoint is put in place."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from support import layouts, pruned_meanwhile
from support.doubles import contents
from support.watched_run import RUN, Home

from tierd.cli import run
from tierd.daemon.tiers.tier_observer import TierObserver
from tierd.daemon.tiers.tier_prune import prune
from tierd.stores.file_store import FileStore


async def pruned(tier: Path) -> None:
    """Delete all checkpoints but the newest."""
    store = FileStore(tier)
    await prune(store, sorted((await TierObserver(store).observe({RUN})).checkpoints)[:-1])
    await store.aclose()


@pytest.mark.parametrize("command", ["prepare", "restore"])
def test_the_newest_checkpoint_is_put_in_place(home: Home, tmp_path, monkeypatch, capsys, command: str) -> None:
    layouts.deepspeed(home.root).rename(home.root / "global_step10")
    home.taken()
    before = asyncio.run(contents(FileStore(home.tier), policies=True))
    layouts.version = 1.0
    layouts.deepspeed(home.root)
    home.taken()
    asyncio.run(pruned(home.tier))
    after = asyncio.run(contents(FileStore(home.tier), policies=True))
    newest = {"global_step10", "global_step20"}
    for at in pruned_meanwhile.moments(tmp_path / "moments", before, after, monkeypatch):
        tier, directory = str(at / "tier"), str(at / "out")
        options = [directory, "--run", RUN, "--to", tier]
        options = options if command == "prepare" else [tier, "--run", RUN, "--into", directory]
        assert run([command, *options]) == 0
        found = {path.name for path in (at / "out").iterdir() if path.is_dir()}
        assert len(found & newest) == 1 and found <= newest
        shutil.rmtree(at)
        capsys.readouterr()
