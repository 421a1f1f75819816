"""A bit that flips in one read of the spool is no corruption: it is read again, and nothing is quarantined."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.world import RUN, commit, content, corrupt, part

from tierd.client.restoring.part_source import NodeSource
from tierd.client.restoring.ranged_reader import PartFiles
from tierd.core.errors import CorruptChunk
from tierd.core.manifest import MANIFEST_NAME
from tierd.spool import local_parts, verified_reads
from tierd.spool.spool import Spool

PART = part(7)


class WrongReads:
    """The first reads of a part are wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, of: str, times: int = 1) -> None:
        self.left = times
        if of == "bytes":
            digest = verified_reads.digest
            monkeypatch.setattr(verified_reads, "digest", lambda data: digest(b"" if self._is_wrong() else data))
        else:
            decode = local_parts.decode
            monkeypatch.setattr(local_parts, "decode", lambda data, *of: decode(b"" if self._is_wrong() else data, *of))

    def _is_wrong(self) -> bool:
        self.left -= 1
        return self.left >= 0


def ranges(spool: Spool) -> bytes:
    files = PartFiles(spool, PART.checkpoint, PART.world, None, "")
    return b"".join(bytes(data) for _, data in files.read([files.span(PART, "weights.bin")]))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("of", ["bytes", "manifest"])
def test_a_restore_without_a_daemon_reads_again(tmp_path: Path, monkeypatch, of, keep):
    spool = Spool(tmp_path)
    commit(spool, PART)
    wrong = WrongReads(monkeypatch, of)
    _, files, _ = NodeSource(spool, RUN, tiers=False, line=None, keep=keep).obtain(PART)
    assert wrong.left <= 0 and spool.has(PART) and not spool.quarantined()
    if keep:
        assert {name: bytes(data) for name, data in files.items()} == content(7)


@pytest.mark.parametrize("of", ["bytes", "manifest"])
def test_a_reader_of_ranges_without_a_daemon_reads_again(tmp_path: Path, monkeypatch, of):
    spool = Spool(tmp_path)
    commit(spool, PART)
    wrong = WrongReads(monkeypatch, of)
    assert ranges(spool) == content(7)["weights.bin"]
    assert wrong.left <= 0 and spool.has(PART) and not spool.quarantined()


@pytest.mark.parametrize("victim", ["weights.bin", MANIFEST_NAME])
@pytest.mark.parametrize("way", ["restore", "ranges"])
def test_part_that_reads_wrong_twice_is_quarantined(tmp_path: Path, way, victim):
    spool = Spool(tmp_path)
    commit(spool, PART)
    corrupt(spool.path(PART) / victim)
    with pytest.raises(CorruptChunk, match="local: "):
        ranges(spool) if way == "ranges" else NodeSource(spool, RUN, tiers=False, line=None, keep=True).obtain(PART)
    assert not spool.has(PART) and set(spool.quarantined()) == {PART}
