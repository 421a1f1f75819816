"""`.tierd/last-verified.json`: what each tier holds, verified, for schedulers and scripts."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from support.inventories import checkpoint, facts, part, remade, solo
from support.world import RUN, commit
from support.world import part as part_of

from tierd.cli import run
from tierd.core.planning.inventory import Inventory
from tierd.core.planning.place import Place
from tierd.daemon.last_verified import LAST_VERIFIED, LastVerified
from tierd.spool.spool import Spool


def content(control: Path) -> list[dict[str, Any]]:
    return json.loads((control / LAST_VERIFIED).read_bytes())["checkpoints"]


def test_daemon_names_newest_checkpoint_that_a_tier_has_verified(spool: Spool, tmp_path: Path) -> None:
    for step in (3, 7):
        commit(spool, part_of(step))
    (tmp_path / "tier").mkdir()
    assert run(["run", "--spool", str(spool.root), "--to", (tmp_path / "tier").as_uri(), "--until-idle"]) == 0
    (entry,) = content(spool.control)
    assert entry.pop("created").endswith("+00:00")
    assert entry == {"run": RUN, "tier": "file", "step": 7, "attempt": part_of(7).checkpoint.attempt}
    assert stat.S_IMODE((spool.control / LAST_VERIFIED).stat().st_mode) == 0o600


@pytest.fixture
def inventories() -> list[Inventory]:
    """What the daemon has observed last is the last of the list."""
    return []


def test_file_names_latest_launch_and_only_complete_checkpoints(spool: Spool, inventories: list[Inventory]) -> None:
    older, newer, half = checkpoint(1, 90), checkpoint(2, 50), checkpoint(2, 60)
    tier = solo(Place(), older, newer)
    tier = remade(tier, {**{part(one): facts() for one in (older, newer)}, part(half, 0, 2): facts()})
    file = LastVerified(spool.control, lambda: inventories[-1])
    inventories.append(Inventory(solo(Place(), older, newer, half), {"a": tier, "b": None}))
    file.write()
    assert [(entry["tier"], entry["step"]) for entry in content(spool.control)] == [("a", 50)]


def test_tier_that_stops_answering_keeps_its_entry_and_a_run_without_copies_loses_it(
    spool: Spool, inventories: list[Inventory]
) -> None:
    saved = checkpoint(1, 5)
    place = solo(Place(), saved)
    file = LastVerified(spool.control, lambda: inventories[-1])
    inventories.append(Inventory(Place(), {"a": Place()}))
    file.write()
    assert not (spool.control / LAST_VERIFIED).exists(), "there is nothing to say"
    inventories.append(Inventory(place, {"a": place}))
    file.write()
    written = (spool.control / LAST_VERIFIED).stat().st_ino
    inventories.append(Inventory(place, {"a": None}))
    file.write()
    assert (spool.control / LAST_VERIFIED).stat().st_ino == written and content(spool.control)[0]["step"] == 5
    inventories.append(Inventory(Place(), {"a": Place()}))
    file.write()
    assert content(spool.control) == []


def test_next_daemon_keeps_entries_of_a_tier_until_it_has_observed_it(
    spool: Spool, inventories: list[Inventory]
) -> None:
    place = solo(Place(), checkpoint(1, 5))
    inventories.append(Inventory(place, {"a": place, "b": place}))
    LastVerified(spool.control, lambda: inventories[-1]).write()
    newer = solo(place, checkpoint(1, 6))
    inventories.append(Inventory(newer, {"a": newer, "b": None}))
    LastVerified(spool.control, lambda: inventories[-1]).write()
    assert [(entry["tier"], entry["step"]) for entry in content(spool.control)] == [("a", 6), ("b", 5)]
    inventories.append(Inventory(newer, {"a": newer}))  # the configuration names the other one no more
    (spool.control / LAST_VERIFIED).write_bytes(b"damaged")
    LastVerified(spool.control, lambda: inventories[-1]).write()
    assert [entry["tier"] for entry in content(spool.control)] == ["a"]


def test_full_disk_changes_nothing_else(
    spool: Spool, inventories: list[Inventory], caplog: pytest.LogCaptureFixture
) -> None:
    (spool.control / f"{LAST_VERIFIED}.new").mkdir()
    place = solo(Place(), checkpoint(1, 5))
    inventories.append(Inventory(place, {"a": place}))
    caplog.set_level("INFO", "tierd.daemon")
    LastVerified(spool.control, lambda: inventories[-1]).write()
    assert "last-verified.json is not written" in caplog.text and not (spool.control / LAST_VERIFIED).exists()
