"""What is read at once, and what goes into one request."""

from __future__ import annotations

import pytest
from support.world import CHUNK, commit, part

from tierd.client.restoring.ranged_reader import PartFiles, _batches, _portions, _runs
from tierd.core.errors import ManifestError, ObjectNotFound, StoreUnavailable
from tierd.ipc.messages import MAX_REQUEST, Fetch, encode_line

PART = part(7)
DATA = bytes(range(256)) * 39  # 9984 bytes, 10 chunks


@pytest.fixture
def source(spool):
    commit(spool, PART, {"file": DATA, "other": DATA[:50]})
    return PartFiles(spool, PART.checkpoint, 1, None, "")


def test_every_range_is_read_and_verified(source):
    spans = [source.span(PART, "file", *one) for one in ((0, 1), (999, 2), (1000, 1000), (2500, 5000), (9983, 1))]
    spans += [source.span(PART, "file"), source.span(PART, "other", 10, 40)]
    found = {(span.file.path, span.offset): bytes(data) for span, data in source.read(spans)}
    assert found == {
        (span.file.path, span.offset): (DATA if span.file.path == "file" else DATA[:50])[
            span.offset : span.offset + span.length
        ]
        for span in spans
    }


@pytest.mark.parametrize(
    "asked", [("file", 9984, 1), ("file", -1, 5), ("file", 0, 0), ("none", 0, 1), ("file", "0", 1)]
)
def test_a_range_that_there_is_not_is_the_manifests_fault(source, asked):
    with pytest.raises(ManifestError, match=r"run step 7"):
        source.span(PART, *asked)


def test_part_that_another_process_quarantined_is_missing_and_no_failure(spool):
    commit(spool, PART, {"file": DATA})
    files = PartFiles(spool, PART.checkpoint, 1, None, "")
    span = files.span(PART, "file")
    spool.quarantine(PART)
    with pytest.raises(ObjectNotFound, match="not in the spool any more"):
        list(files.read([span]))


def test_neighbours_are_read_at_once_and_a_gap_is_not(source):
    spans = [source.span(PART, "file", offset, 500) for offset in (0, 600, 1200, 3900, 8000, 8600)]
    groups = [[span.offset for span in batch] for batch in _batches(spans, 4 * CHUNK)]
    assert groups == [[0, 600, 1200], [3900], [8000, 8600]]


def test_missing_part_without_a_daemon_is_no_corruption(spool):
    with pytest.raises((StoreUnavailable, ObjectNotFound)):
        PartFiles(spool, PART.checkpoint, 1, None, "").manifest(PART)


@pytest.mark.parametrize(("files", "runs"), [(1, 100_000), (3000, 2), (1, 1), (0, 0)])
def test_long_list_of_ranges_is_split_into_several_requests(files, runs):
    name = "ä" * 300
    wanted = {f"{name}{number}": [(3 * at, 3 * at + 2) for at in range(runs)] for number in range(files)}
    found: dict[str, list] = {}
    for portion in _portions(wanted):
        assert len(encode_line(Fetch(part=PART, wanted=portion))) < MAX_REQUEST
        for path, some in portion.items():
            found.setdefault(path, []).extend(some)
    assert found == wanted


def test_chunk_numbers_become_runs():
    assert _runs({5, 1, 2, 3, 9}) == [(1, 4), (5, 6), (9, 10)]
