"""Watched: a writer of a layout is killed, deletes, renames or rewrites at any point, beside `tierd watch`.

Files and the spool are real; times are simulated, so that a seed is a history (`support/watched.py`). Required, by the
judge of `support/watched_trials.py`: no torn checkpoint is taken, no sound one that was left alone is lost or taken
twice, also by two nodes of which one may be killed, and nothing in the watched directory is written.

Every other life has a layout that no table knows (`support/unknown_layouts.py`), between whose launches `prepare` runs,
bits flip, and the directory is lost. Required, by the judge of `support/unknown_trials.py`, beside that: no part is
taken for the whole, no good file is moved, the newest comes back byte for byte, and nothing is passed over without a
report.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

from faults import hands
from faults.rounds import Round

UNIT, SHORT, GATE = "lives of a writer", 80, 4_000
_LAYOUTS = (
    *("trainer", "trainer_on_deepspeed", "accelerate", "lightning", "lightning_sharded", "plain_dcp", "torchtitan"),
    *("torch_checkpointing", "deepspeed", "megatron", "megatron_by_ranks", "nemo", "orbax", "tensorflow", "composer"),
    *("hf_model", "shards_alone", "torch_save", "safetensors"),
)
_SHAPES = ("directory", "nested", "beside", "state beside", "wordless", "stepless")
_UNKNOWN = ("killed", "daemon killed", "no daemon for a life", "overtaken while it is taken", "slow between two files")
_UNKNOWN += ("rotated", "prepare", "flip", "lose", "lose and restore")
MET = (
    *(f"{name}: whole and taken" for name in _LAYOUTS),
    *("killed", "again", "delete", "delete and save", "rename", "overtaken while it is taken", "ends torn or deleted"),
    *("two nodes", "left to the other node", "a node killed"),
    *(f"unknown: {name}" for name in (*_SHAPES, *_UNKNOWN)),
)


def run(work: Round) -> None:
    def prepare(room: Path) -> hands.Trial:
        from support import unknown_trials
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
                if seed % 2:
                    return 1, [f"unknown: {note}" for note in unknown_trials.play(seed // 2, home)]
                return 1, play(seed // 2, saves, home)
            finally:
                shutil.rmtree(home, ignore_errors=True)

        return trial

    with hands.room(work) as room:
        hands.spread(work, lambda: prepare(room), batch=4)
