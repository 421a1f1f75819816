"""Tiers in directories that bind mounts make look apart. Needs root."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tierd.core.config import from_urls
from tierd.core.errors import ConfigError
from tierd.stores.mounted_directories import check_no_overlap

pytestmark = pytest.mark.system


@contextmanager
def bound(source: Path, target: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", source, target], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.parametrize(("inside", "relation"), [("", "is"), ("inner", "lies in"), ("inner/deeper", "lies in")])
def test_a_bind_mount_of_a_tier_or_of_a_directory_in_it_is_no_other_place(tmp_path, inside, relation):
    tier, alias = tmp_path / "tier", tmp_path / "alias"
    (tier / inside).mkdir(parents=True)
    alias.mkdir()
    tiers = from_urls(str(tmp_path / "spool"), [str(tier), str(alias)])
    asyncio.run(check_no_overlap(tiers))
    with bound(tier / inside, alias), pytest.raises(ConfigError, match=f"{relation} the directory of tier 'file'"):
        asyncio.run(check_no_overlap(tiers))


def test_directories_beside_each_other_below_two_mounts_are_apart(tmp_path):
    for name in ("disk/a", "disk/ab", "alias"):
        (tmp_path / name).mkdir(parents=True)
    with bound(tmp_path / "disk", tmp_path / "alias"):
        asyncio.run(
            check_no_overlap(from_urls(str(tmp_path / "s"), [str(tmp_path / "disk/a"), str(tmp_path / "alias/ab")]))
        )
