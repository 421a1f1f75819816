"""Names: attempts sort by launch whatever the clock says; names and keys are each other's inverse; garbage is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunk_keys import old_chunk_key

from tierd.core import ids
from tierd.core.errors import ConfigError, StepRefused
from tierd.core.ids import MAX_STEP, MAX_WORLD, CheckpointId, PartId, next_attempt

A = "0123456789ab-01234567"
ARABIC = "\u0660"  # a zero to int() and to \\d
runs = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True).filter(lambda run: run != "README.md")
attempts = st.from_regex(r"0[0-3][0-9a-f]{10}-[0-9a-f]{8}", fullmatch=True)  # until the year 2109
tokens = st.from_regex(r"[0-9a-f]{8}", fullmatch=True)
checkpoints = st.builds(CheckpointId, runs, attempts, st.integers(0, MAX_STEP))


@st.composite
def parts(draw):
    world = draw(st.integers(1, MAX_WORLD))
    return PartId(draw(checkpoints), draw(st.integers(0, world - 1)), world)


# -- attempts ---------------------------------------------------------------------------------------------------------


@given(st.integers(-(10**6), 2**41), st.lists(attempts.map(lambda a: f"01{a[2:]}"), max_size=5), tokens)
def test_attempt_sorts_after_all_known_attempts_at_any_clock(now_ms, seen, token):
    made = next_attempt(now_ms, seen, token)
    assert all(made > other for other in seen)
    assert ids.check_attempt(made) == made
    assert int(made[:12], 16) >= now_ms


def test_launches_sort_in_order_while_the_clock_runs_backwards():
    seen: list[str] = []
    for now_ms in (5_000, 4_000, 3_000, 0, -1):
        seen.append(next_attempt(now_ms, seen, "ffffffff"))
    assert seen == sorted(seen)
    assert len(set(seen)) == 5


@pytest.mark.parametrize("name", ["ffffffffffff-00000000", "fffffffffff0-00000000", "038000000000-00000000"])
def test_no_name_uses_up_the_clock(name):
    """A planted name that nobody can have made does not push launches to the end of what twelve digits can say."""
    now_ms = 1_790_000_000_000
    made = next_attempt(now_ms, [name, A.replace("0123", "019f")], "00000000")
    assert A.replace("0123", "019f") < made < name
    for _ in range(20):
        made = next_attempt(now_ms, [name, made], "00000000")
    assert int(made[:12], 16) < now_ms + 60_000
    with pytest.raises(ConfigError):
        next_attempt(1 << 48, (), "00000000")


@pytest.mark.parametrize("name", ["ffffffffffff-00000000", "fffffffffff0-00000000"])
def test_a_name_that_lies_a_century_ahead_is_no_checkpoints(name):
    assert CheckpointId.parse("run", f"000000000001.{name}") is None
    assert PartId.parse("run", f"000000000001.{name}", "00000-of-00001") is None
    assert PartId.parse_key(f"run/manifests/000000000001.{name}/00000-of-00001.json") is None


@pytest.mark.parametrize("attempt", ["", "x", A.upper(), A + "\n", A[:-1], A + "0", "0123456789ab_01234567", None, 7])
def test_an_attempt_of_any_other_form_is_refused(attempt):
    with pytest.raises(ConfigError, match="attempt"):
        ids.check_attempt(attempt)


# -- names and keys ---------------------------------------------------------------------------------------------------


@given(parts())
def test_names_and_keys_are_each_others_inverse(part):
    own = part.checkpoint
    assert CheckpointId.parse(own.run, own.name) == own
    assert PartId.parse(own.run, own.name, part.name) == part
    assert PartId.parse_key(part.manifest_key) == PartId.parse_key(part.quarantine_key) == part
    assert part.path == f"{own.run}/{own.name}/{part.name}"
    assert part.manifest_key.startswith(ids.manifests_prefix(own.run))
    assert part.quarantine_key.startswith(ids.quarantine_prefix(own.run))
    assert ids.pin_key(own) == ids.pins_prefix(own.run) + own.name
    key = ids.chunk_key(part, "0" * 32, "zst")
    assert f"{own.run}/{key}".startswith(ids.chunks_prefix(own.run))
    assert key == f"chunks/{part.rank % 16:x}/{own.name}/{part.rank:05}/{'0' * 32}.zst"
    for form in (key, ids.chunk_key(part, "0" * 32, "zst", 17), old_chunk_key(part, "0" * 32, "zst")):
        name = ids.ChunkName.parse(form)
        assert (name.checkpoint, name.digest, name.codec) == (own.name, "0" * 32, "zst")
        assert ids.chunk_owner(own.run, form) == own
        group = ids.chunk_group(own.run, f"{own.run}/{form}")
        assert group in ids.chunk_groups(own) and ids.group_owner(own.run, group) == own
    assert ids.chunk_groups(own) == sorted(ids.chunk_groups(own))
    assert ids.ChunkName.parse(key).rank == part.rank and not ids.ChunkName.parse(key).is_old


@pytest.mark.parametrize(
    "key", ["chunks", f"chunks/00/000000000001.{A}/00000/x", f"chunks/g/000000000001.{A}/0/x", "x"]
)
def test_a_key_that_is_no_chunks_has_no_owner(key):
    assert ids.chunk_owner("r", key) is None and ids.ChunkName.parse(key) is None


@given(st.lists(st.builds(CheckpointId, st.just("r"), attempts, st.integers(0, MAX_STEP)), max_size=8))
def test_checkpoints_order_by_attempt_then_step(found):
    assert sorted(found) == sorted(found, key=lambda c: (c.attempt, c.step))


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_parsed_names_are_written_back_the_same(run, checkpoint, name):
    """Otherwise a listing could name one object and be acted on as another."""
    found = PartId.parse(run, checkpoint, name)
    assert found is None or (found.checkpoint.run, found.checkpoint.name, found.name) == (run, checkpoint, name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        f"1.{A}",
        f"0000000000001.{A}",
        f"000000000001.{A}\n",
        f"000000000001.{A.upper()}",
        f"000000000001-{A}",
        f"../000000000001.{A}",
        f"{ARABIC * 12}.{A}",
        f"-00000000001.{A}",
    ],
)
def test_a_name_that_is_no_checkpoint_parses_to_none(name):
    assert CheckpointId.parse("r", name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0-of-1",
        "00001-of-00001",
        "00000-of-00000",
        "00000-of-00001.json",
        "00000-of-00001\n",
        f"{ARABIC * 5}-of-00001",
    ],
)
def test_a_name_that_is_no_part_parses_to_none(name):
    assert PartId.parse("r", f"000000000001.{A}", name) is None


@pytest.mark.parametrize(
    "key",
    [
        "",
        "README.md",
        f"r/manifests/000000000001.{A}/00000-of-00001",
        f"r/chunks/000000000001.{A}/00000-of-00001.json",
        f"r/manifests/000000000001.{A}/x/00000-of-00001.json",
        f"../manifests/000000000001.{A}/00000-of-00001.json",
        f"/manifests/000000000001.{A}/00000-of-00001.json",
        f".r/manifests/000000000001.{A}/00000-of-00001.json",
        f"a/b/manifests/000000000001.{A}/00000-of-00001.json",
    ],
)
def test_a_key_that_is_no_manifests_parses_to_none(key):
    assert PartId.parse_key(key) is None


# -- what a user gives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["a", "7", "llama-7b_v2.1", "A" * 128])
def test_a_good_run_name_is_taken(run):
    assert ids.check_run(run) == run


@pytest.mark.parametrize(
    "run", ["", ".", "..", ".tierd", "-a", "_a", "a/b", "a b", "a\n", "ü", "a" * 129, "README.md", None, 7, b"a"]
)
def test_a_bad_run_name_is_refused(run):
    with pytest.raises(ConfigError, match="run "):
        ids.check_run(run)


@pytest.mark.parametrize("step", [0, 7, MAX_STEP, np.int64(7), np.uint8(7), np.array(7)])
def test_an_integer_of_any_kind_is_a_step(step):
    assert ids.check_step(step) == int(step)
    assert type(ids.check_step(step)) is int


class Refuses:
    def __index__(self):
        raise TypeError("as a float tensor does")


@pytest.mark.parametrize(
    "step", [-1, MAX_STEP + 1, True, 1.0, "1", None, np.float32(1), np.bool_(True), np.array([1, 2]), Refuses()]
)
def test_anything_else_is_no_step(step):
    with pytest.raises(StepRefused, match="a step"):
        ids.check_step(step)


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (3, 4), (MAX_WORLD - 1, MAX_WORLD)])
def test_ranks_count_from_zero_to_world_size(rank, world):
    assert ids.check_rank(rank, world) == (rank, world)


@pytest.mark.parametrize(
    ("rank", "world"),
    [(1, 1), (-1, 1), (0, 0), (0, MAX_WORLD + 1), (True, 2), (0, True), ("0", 1), (0.0, 1), (0, None)],
)
def test_other_ranks_are_refused(rank, world):
    with pytest.raises(ConfigError, match="rank"):
        ids.check_rank(rank, world)
