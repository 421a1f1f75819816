"""A few seeds of each layout of `python -m faults watched`, whose judge is in support/watched_trials.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.watched import Files, write_saves
from support.watched_trials import LAYOUTS, layout_of, play

_ROUNDS = 4


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Files]]:
    return write_saves(tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_taken_unit_is_whole_and_each_whole_unit_is_taken(
    name: str, saves: dict[str, list[Files]], tmp_path: Path
) -> None:
    notes: list[str] = []
    for seed in (LAYOUTS.index(name) + number * len(LAYOUTS) for number in range(_ROUNDS)):
        assert layout_of(seed) == name
        (tmp_path / str(seed)).mkdir()
        notes += play(seed, saves, tmp_path / str(seed))
    assert f"{name}: whole and taken" in notes
