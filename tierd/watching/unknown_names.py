"""Tell a file that may hold state, although no layout knows its name, from those that programs write beside it."""

from __future__ import annotations

import re

from tierd.watching.completeness import is_temporary
from tierd.watching.step_in_name import is_log, is_weights

# The endings of what programs write beside checkpoints.
USUAL = frozenset(
    (
        *(".log", ".out", ".err", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".txt", ".md", ".html", ".py"),
        *(".png", ".jpg", ".jpeg", ".gif", ".svg", ".mp4", ".wav", ".flac", ".pdf", ".tfevents"),
    )
)
# Of these no file is a checkpoint either: programs, settings, locks, data sets, data bases that runs are recorded in.
_OTHER_ENDINGS = frozenset(
    (
        *(".sh", ".ipynb", ".toml", ".ini", ".cfg", ".conf", ".diff", ".patch", ".c", ".cc", ".cpp", ".cu", ".h"),
        *(".lock", ".pid", ".sock", ".swp", ".webp", ".parquet", ".arrow", ".tfrecord", ".tfrecords"),
        *(".mdb", ".db", ".db-wal", ".db-shm", ".db-journal", ".sqlite", ".sqlite3"),
    )
)
POINTERS = frozenset(
    ("latest", "last", "checkpoint", "last_checkpoint", "latest_checkpoint", "latest_checkpointed_iteration.txt")
)
# Also `solver.log.0`, and SGE's and PBS's `job.o4711`.
_LOG = re.compile(
    r"(.*[-_.])?(logs?|metrics|history|std(out|err)|nohup|output)(\.\d+)?|core(\.\d+)?"
    r"|.*\.(log|out|err)[-.]?\d+|.*\.[oe]\d+",
    re.IGNORECASE,
)


def is_usual(name: str) -> bool:
    """Return whether a file's ending is one of what programs write beside checkpoints."""
    return _ending(name) in USUAL


def may_hold_state(name: str) -> bool:
    """Return whether a file's name is none of weights, and none of what programs write beside these."""
    return not (
        name.startswith(".")
        or _ending(name) in USUAL | _OTHER_ENDINGS
        or name in POINTERS
        or is_weights(name)
        or is_log(name)
        or _LOG.fullmatch(name)
        or is_temporary(name)
    )


def _ending(name: str) -> str:
    return "".join(name.rpartition(".")[1:]).lower()
