"""The example pipeline: its state is whole at every step, and two ranks of it resume exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("torch")

from check.bed.forked import check_forked
from support.training import through

from examples.pipeline.stages import LENGTHS, SHARDS, Documents, ShuffleBuffer, make_pipeline, tokens_of

LENGTH = 64


def items(pipeline, count):
    return [next(pipeline) for _ in range(count)]


@pytest.mark.parametrize("rank", [0, 1])
def test_state_of_the_pipeline_holds_all_that_decides_its_next_items(rank):
    whole = items(make_pipeline(rank, 2, 7, LENGTH), 40)
    running = make_pipeline(rank, 2, 7, LENGTH)
    for step in range(40):
        state = through({"data": running.state_dict()})["data"]  # as a checkpoint brings it back
        resumed = make_pipeline(rank, 2, 7, LENGTH)
        resumed.load_state_dict(state)
        assert items(resumed, 5) == whole[step : step + 5] or step > 35
        assert next(running) == whole[step]


def test_every_rank_reads_its_documents_once_an_epoch_in_another_order_each_time():
    seen = []
    for rank in (0, 1):
        documents = Documents(rank, 2, 7)
        first = [next(documents) for _ in range(len(documents._mine))]
        second = [next(documents) for _ in range(len(documents._mine))]
        assert documents.epoch == 1 and sorted(first) == sorted(second) and first != second
        seen.append(first)
    assert sorted(seen[0] + seen[1]) == list(range(sum(SHARDS)))
    assert len(seen[0]) > 1.5 * len(seen[1])  # ranks are skewed, as shards are


def test_packing_loses_no_token():
    sequences = items(make_pipeline(0, 1, 7, LENGTH), 30)
    assert {sum(end - start for _, start, end in one) for one in sequences} == {LENGTH}
    pieces = [piece for one in sequences for piece in one]
    for before, after in pairwise(pieces):
        cut = before[2] < tokens_of(before[0])
        assert after[:2] == ((before[0], before[2]) if cut else (after[0], 0))
    assert min(LENGTHS) <= min(tokens_of(number) for number in range(50))


def test_the_buffer_mixes_and_a_loaded_queue_is_refused_too_late():
    buffer = ShuffleBuffer(Documents(0, 1, 7), 12, 0)
    plain = Documents(0, 1, 7)
    assert [next(buffer) for _ in range(20)] != [next(plain) for _ in range(20)]
    pipeline = make_pipeline(0, 1, 7, LENGTH)
    state = pipeline.state_dict()
    next(pipeline)
    with pytest.raises(RuntimeError, match="before its first item"):
        pipeline.load_state_dict(state)


@pytest.mark.timeout(400)
def test_two_ranks_resume_exactly():
    """Resumed from the middle of rank 0's first epoch (step 6) and, a save having been cut short, from its edge (step
    9), where its buffer holds documents of both epochs; rank 1 is an epoch ahead."""
    stood = {}
    for rank in (0, 1):
        packing = make_pipeline(rank, 2, 7, LENGTH)._source  # what is trained on, without what is read ahead
        for step in range(1, 10):
            items(packing, 2)
            stood[rank, step] = packing.state_dict()["source"]["source"]
    assert stood[0, 6]["epoch"] == 0 and stood[1, 6]["epoch"] == 1
    assert stood[0, 9]["epoch"] == 1 and stood[0, 9]["position"] < 12
    unseeded = (
        'state["rng"]["python"]',
        'state["rng"]["numpy"]',
    )  # nobody draws from them there
    loop, kills = "examples.pipeline.train:train", (8, "10+save")
    report, _ = check_forked(loop, steps=13, kill_at=kills, ranks=2, ignore=unseeded)
    assert report.ok and report.exact and [one.began for one in report.launches] == [1, 7, 10]
