"""Watched: a writer of each layout that `tierd watch` knows is killed, deletes, renames or rewrites at any point.

Files and the spool are real; times are simulated, so that a seed is a history (`support/watched.py`). Required, by the
judge of `support/watched_trials.py`: no torn checkpoint is taken, no sound one that was left alone is lost or taken
twice, also by two nodes of which one may be killed, and nothing in the watched directory is written.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from faults import hands
from faults.rounds import Mutant, Round

UNIT, SHORT, GATE = "lives of a writer", 40, 2_000
_LAYOUTS = (
    *("trainer", "trainer_on_deepspeed", "accelerate", "lightning", "lightning_sharded", "plain_dcp", "torchtitan"),
    *("torch_checkpointing", "deepspeed", "megatron", "megatron_by_ranks", "nemo", "orbax", "tensorflow", "composer"),
    *("hf_model", "shards_alone", "torch_save", "safetensors"),
)
MET = (
    *(f"{name}: whole and taken" for name in _LAYOUTS),
    *("killed", "again", "delete", "delete and save", "rename", "overtaken while it is taken", "ends torn or deleted"),
    *("two nodes", "left to the other node", "a node killed"),
)
_TAKER = "tierd/daemon/intake/taker.py"
_ALIVE = "        return any(now_s - since_s < self._timings.silent_s for since_s in self._seen.values())\n"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "units are left for ever to a node that was killed",
        _TAKER,
        _ALIVE,
        "        return bool(self._seen)\n",
        "watched --trials 400",
        "lost",
    ),
    Mutant(
        "a node takes beside another one that announces",
        _TAKER,
        _ALIVE,
        "        return False\n",
        "watched --trials 400",
        "read by both nodes",
    ),
)


def missing() -> str | None:
    return None


def run(work: Round) -> None:
    room = hands.room(work)

    def prepare() -> hands.Trial:
        from support.watched import write_saves
        from support.watched_trials import LAYOUTS, play

        assert set(_LAYOUTS) == set(LAYOUTS)
        logging.disable(logging.WARNING)  # a line for each unit, in a process of this kind's own
        written = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=room))
        saves = write_saves(written)

        def trial(seed: int) -> tuple[int, list[str]]:
            home = written / str(seed)
            home.mkdir()
            try:
                return 1, play(seed, saves, home)
            finally:
                shutil.rmtree(home, ignore_errors=True)

        return trial

    try:
        hands.spread(work, prepare, batch=4)
    finally:
        shutil.rmtree(room, ignore_errors=True)
