"""A spool on overlayfs over an older one, as in a container whose image holds it: no directory of a lower layer can be
renamed there, and yet retention and quarantine do their work."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.world import commit, listing, part, read

from tierd.core.errors import TierdError
from tierd.spool.spool import Spool

pytestmark = pytest.mark.system


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    """Steps 1 and 2, and what a removal left half-way, lie in the lower layer."""
    base = tmp_path / "base"
    base.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tierd-test", str(base)], check=True, timeout=60)
    try:
        for name in ("lower", "upper", "work", "nvme"):
            (base / name).mkdir()
        older = Spool(base / "lower" / "spool")
        for step in (1, 2):
            commit(older, part(step))
        (older.control / "trash" / "half" / "deep").mkdir(parents=True)
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", options, "tierd-test", f"{base}/nvme"], check=True, timeout=60)
        yield Spool(base / "nvme" / "spool")
    finally:
        for path in (base / "nvme", base):
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True, timeout=60, check=False)


def test_retention_removes_files_of_a_lower_layer(spool: Spool) -> None:
    files = commit(spool, part(3))
    spool.remove([part(1)], reuse=[part(1).writer])
    assert spool.parts() == [part(2), part(3)] and read(spool, part(3)) == files
    for name in spool.leftovers():
        spool.discard(name)
    assert [name for name in listing(spool) if "trash" in name or part(1).checkpoint.name in name] == [".tierd/trash"]


def test_remove_deletes_the_manifest_first(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that is cut off leaves no manifest over files that have gone."""

    def cut_off(path: Path) -> None:
        raise OSError("cut off")

    monkeypatch.setattr("tierd.spool.leftovers.remove", cut_off)
    with pytest.raises(OSError, match="cut off"):
        spool.remove([part(1)])
    with pytest.raises(TierdError, match="manifest"):
        spool.manifest(part(1))
    monkeypatch.undo()
    spool.remove([part(1)])
    assert spool.parts() == [part(2)]


def test_part_in_a_lower_layer_is_quarantined(spool: Spool) -> None:
    files = read(spool, part(2))
    spool.quarantine(part(2))
    assert spool.parts() == [part(1)] and part(2) in spool.quarantined()
    quarantined = spool.control / "quarantine" / part(2).path
    assert {name: (quarantined / name).read_bytes() for name in files} == files
    assert quarantined.stat().st_mode & 0o777 == 0o700
