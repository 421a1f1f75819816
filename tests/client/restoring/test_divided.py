"""Parts whose tensors lie in other ranks' files: the one step that a reader follows, and headers that lie about it."""

from __future__ import annotations

import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from support.divided import DividedPart, divided, divided_state, elsewhere_of, header_of, with_elsewhere, write_divided
from support.state_files import files_of
from support.world import described

from tierd.cli import run
from tierd.client.restoring.ranged_reader import PartFiles
from tierd.client.restoring.saved_entries import read_elsewhere, read_entries, read_header
from tierd.client.restoring.tensor_locations import TensorComparison, TensorLocator, read_layout, read_tensor
from tierd.core.errors import CorruptChunk, ManifestError, ObjectNotFound, StateMismatch, StepRefused
from tierd.core.manifest import TENSORS, TREE
from tierd.dcp.load_sources import SavedState
from tierd.spool.commit import write_part
from tierd.spool.spool import Spool
from tierd.state.state_loading import unflatten

STATES = [divided_state(rank) for rank in range(4)]
LARGE = "model/large"  # lies in the part of rank 0


class CountingFiles(PartFiles):
    """Counts the reads of each range."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.reads: list[tuple[int, str, int]] = []

    def fill(self, memory, spans, base=0):
        self.reads += [(span.part.rank, span.path, span.offset) for span in spans]
        super().fill(memory, spans, base)


@pytest.fixture
def parts():
    return divided(STATES)


def written(spool, parts) -> CountingFiles:
    named = write_divided(spool, 1, parts)
    return CountingFiles(spool, named[0].checkpoint, len(parts), None, "")


def test_ranks_store_each_replicated_tensor_once(parts):
    names = Counter(name for part in parts for name in header_of(part.files[TENSORS]))
    every_rank = {"__metadata__", "model/bias", "own"}  # a tensor of few bytes is not worth naming
    assert names == {name: 4 if name in every_rank else 1 for name in names} and len(names) > 10
    assert len({part.division for part in parts}) == 1 and parts[0].division


def test_locator_finds_tensors_of_every_rank_and_reads_each_header_once(spool, parts):
    files = written(spool, parts)
    locator = TensorLocator(files)
    for rank, state in enumerate(STATES):
        tensors = locator.tensors_of(files.part(rank))
        for name, tensor in state["model"].items():
            stored = read_tensor(files, tensors.locate(f"model/{name}"))
            assert torch.equal(stored, torch.view_as_real(tensor) if tensor.is_complex() else tensor)
        assert tensors.locate(LARGE).part == files.part(0)
        assert tensors.locate(LARGE) is tensors.locate(LARGE)
        assert tensors.locate("own").part == files.part(rank)
        assert tensors.locate_if_known("none") is None
        with pytest.raises(KeyError):
            tensors.locate("none")
        assert set(tensors.replicated) == {"model", "optimizer", "list", "array"}
    assert [files.reads.count((rank, TENSORS, 0)) for rank in range(4)] == [1, 1, 1, 1]


def test_siblings_outside_the_spool_are_asked_for_in_turn(spool, tmp_path, parts):
    """Two threads read siblings, and a connection that carried two requests at once gave neither its answer."""
    whole, under_way, most = Spool(tmp_path / "whole"), set(), []
    named = write_divided(whole, 1, parts)

    class Link:
        def ask(self, request, on_progress):
            under_way.add(request.part)
            most.append(len(under_way))
            time.sleep(0.05)
            with suppress(StepRefused):
                write_part(spool, described(request.part, division=parts[0].division), parts[request.part.rank].files)
            under_way.discard(request.part)
            return {"tiers": ["file"]}

    files = PartFiles(spool, named[0].checkpoint, len(parts), Link(), "")
    layout = read_layout(files, files.part(0))
    contents = read_elsewhere(files, files.part(0), layout)
    assert len(contents) == 3 and max(most) == 1


def test_threads_share_one_read_of_a_header(spool, parts):
    files = written(spool, parts)
    locator = TensorLocator(files)
    with ThreadPoolExecutor(8) as pool:
        locations = list(pool.map(lambda rank: locator.tensors_of(files.part(rank % 4)).locate(LARGE), range(64)))
    assert {location.part.rank for location in locations} == {0}
    assert [files.reads.count((rank, TENSORS, 0)) for rank in range(4)] == [1, 1, 1, 1]


def test_tensor_that_two_ranks_name_in_one_file_is_equal_without_a_read(spool, parts):
    files = written(spool, parts)
    locator, comparison = TensorLocator(files), TensorComparison(files)
    first, second = (locator.tensors_of(files.part(rank)).locate(LARGE) for rank in (1, 2))
    files.reads.clear()
    assert comparison.are_equal(first, second) and not files.reads


def test_tensors_of_two_nodes_are_compared_and_read_once(spool):
    files = written(spool, divided(STATES, nodes=[(0, 1), (2, 3)]))
    locator, comparison = TensorLocator(files), TensorComparison(files)
    tensors = [locator.tensors_of(files.part(rank)) for rank in range(4)]
    files.reads.clear()
    for name in STATES[0]["model"]:
        locations = [of_rank.locate(f"model/{name}") for of_rank in tensors]
        assert all(comparison.are_equal(locations[0], location) for location in locations)
    assert not comparison.are_equal(tensors[0].locate("own"), tensors[2].locate("own"))
    assert len(files.reads) == len(set(files.reads))


@pytest.mark.parametrize("only", [["model"], ["own", "list"], ["array", "rank"]])
def test_read_entries_brings_the_files_of_other_ranks(spool, parts, only):
    files = written(spool, parts)
    for rank, state in enumerate(STATES):
        _, contents = read_entries(files, files.part(rank), only)
        loaded = unflatten(contents[TREE], contents[TENSORS], siblings=contents)
        assert files_of(loaded) == files_of({name: state[name] for name in only})


# -- headers that lie -------------------------------------------------------------------------------------------------


def refusals(spool, parts, rank: int = 3) -> list[Exception]:
    """How each reader refuses the part of `rank`: an error with one line."""
    files = written(spool, parts)

    def all_entries():
        _, layout = read_header(files, files.part(rank))
        return read_elsewhere(files, files.part(rank), layout)

    errors = []
    for read in (
        all_entries,
        lambda: read_entries(files, files.part(rank), ["model"]),
        lambda: TensorLocator(files).tensors_of(files.part(rank)).locate(LARGE),
        lambda: SavedState(files, 0, 1),
    ):
        with pytest.raises((ManifestError, StateMismatch, ObjectNotFound)) as caught:
            read()
        errors.append(caught.value)
    return errors


def lying(parts: list[DividedPart], by_rank) -> list[DividedPart]:
    """The parts, of which that of rank 3 says `by_rank` of the tensors that lie elsewhere."""
    return [*parts[:3], with_elsewhere(parts[3], by_rank)]


@pytest.mark.parametrize("rank", ["3", "4", "99999"])
def test_header_that_names_its_own_rank_or_none_is_refused(spool, parts, rank):
    errors = refusals(spool, lying(parts, {rank: [LARGE]}))
    assert all(f"lie in the part of rank {rank}" in str(error) for error in errors[:3])
    assert isinstance(errors[0], ManifestError)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"0": [LARGE], "1": [LARGE]}),
        json.dumps({"0": [LARGE, LARGE]}),
        '{"0":["a"],"0":["b"]}',
        json.dumps({"0": ["own"]}),
        json.dumps({"0": [1]}),
        json.dumps({"-1": [LARGE]}),
        json.dumps({"100000": [LARGE]}),
        json.dumps({"0": LARGE}),
        json.dumps([LARGE]),
        "NaN",
        "",
        "[" * 100_000,
    ],
)
def test_header_that_tierd_cannot_have_written_is_refused(spool, parts, text):
    for error in refusals(spool, lying(parts, text)):
        assert isinstance(error, StateMismatch) and len(str(error)) < 600


def test_tensor_that_the_other_rank_does_not_have_is_refused(spool, parts):
    parts[0] = divided([{**state, "model": {}} for state in STATES])[0]
    parts[0].division = parts[3].division
    for error in refusals(spool, parts):
        assert isinstance(error, ManifestError) and "not in the part of rank" in str(error)


def test_no_reader_follows_a_second_step(spool, parts):
    """Rank 3 says that rank 1 has the tensor, and rank 1 that rank 0 does: true, but not of one division."""
    by_rank = elsewhere_of(parts[3].files[TENSORS])
    by_rank["1"] += by_rank.pop("0")
    for error in refusals(spool, lying(parts, by_rank)):
        assert isinstance(error, ManifestError) and str(error).endswith("which says that rank 0 has it")


def test_headers_that_refer_to_each_other_are_refused(spool, parts):
    circle = [with_elsewhere(part, {(rank + 1) % 4: ["circle"]}) for rank, part in enumerate(parts)]
    files = written(spool, circle)
    for rank in range(4):
        with pytest.raises(ManifestError, match=f"'circle' is not in the part of rank {(rank + 1) % 4}, which says"):
            TensorLocator(files).tensors_of(files.part(rank)).locate("circle")


def test_part_of_another_division_is_refused(spool, parts):
    other = divided([{**state, "model": {**state["model"], "new": torch.ones(9000)}} for state in STATES])
    for error in refusals(spool, [other[0], *parts[1:]]):
        assert isinstance(error, ManifestError) and "divided another state" in str(error)


def test_missing_part_is_no_corruption(spool, parts):
    for error in refusals(spool, [None, *parts[1:]]):
        assert isinstance(error, ObjectNotFound)


def test_part_of_another_checkpoint_is_refused(spool, parts):
    files = written(spool, parts)
    other, *_ = write_divided(spool, 2, divided([divided_state(rank, 2) for rank in range(4)]))
    manifest = spool.path(other) / "manifest.json"
    (spool.path(files.part(0)) / "manifest.json").write_bytes(manifest.read_bytes())
    with pytest.raises(CorruptChunk, match="step 2"):
        TensorLocator(files).tensors_of(files.part(3)).locate(LARGE)


def test_many_names_cost_no_more_than_their_header(spool, parts):
    names = [f"absent {number}" for number in range(200_000)]
    files = written(spool, lying(parts, {**elsewhere_of(parts[3].files[TENSORS]), "1": names}))
    tensors = TensorLocator(files).tensors_of(files.part(3))
    assert tensors.locate(LARGE).part == files.part(0)
    with pytest.raises(ManifestError, match="'absent 7' is not in the part of rank 1"):
        tensors.locate("absent 7")
    with pytest.raises(ManifestError, match="and 199999 more tensors are not in the part of rank 1") as caught:
        read_elsewhere(files, files.part(3), read_layout(files, files.part(3)))
    assert len(str(caught.value)) < 300


def test_header_longer_than_any_of_tierds_is_not_read(spool, parts):
    tensors = bytearray(parts[0].files[TENSORS])
    tensors[:8] = (200 << 20).to_bytes(8, "little")
    files = written(spool, [DividedPart({**parts[0].files, TENSORS: bytes(tensors)}, parts[0].division), *parts[1:]])
    with pytest.raises(StateMismatch, match="a header of"):
        read_layout(files, files.part(0))


def test_verify_promises_no_repair_of_a_division_that_differs(spool, parts, capsys):
    write_divided(spool, 1, [*parts[:3], replace(parts[3], division=parts[3].division[:16] + "5e" * 8)])
    assert run(["verify", "--spool", str(spool.root)]) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "without that entry in `replicated`" in said and "repairs" not in said
