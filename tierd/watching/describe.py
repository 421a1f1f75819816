"""Read a unit's step, metrics and number of ranks from its files; reads only through its `Opener`.

Invariant: what is read is untrusted and only describes. Nothing is loaded or unpickled, and a file that cannot be read
so leaves a gap, never an error. The unit was inspected before, so that no error here hides damage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from posixpath import basename
from typing import Any

from tierd.core.ids import MAX_STEP
from tierd.core.manifest import MAX_METRICS, is_metric_name
from tierd.formats.byte_source import DamagedFile, UncheckedFile
from tierd.formats.pickles import find_int
from tierd.formats.texts import read_json
from tierd.formats.zips import read_record
from tierd.watching.inspect import ChangedFile, Opener
from tierd.watching.programs import LIGHTNING, OWN
from tierd.watching.unit import Unit

_TRAINER_STATE = "trainer_state.json"
_MAX_PICKLE = 16 << 20  # bytes of a pickle in which a step is looked for
# The rank in names of files that each rank writes: HF, Accelerate, DCP, DeepSpeed, torch_checkpointing, Composer.
_RANK_FILE = re.compile(
    r"(?:rng_state_|random_states_|(?:bf16_)?zero_pp_rank_|.+-rank|__)(\d{1,5})(?:\.pth|\.pkl|_mp_rank_.*|\.pt|_\d+\.distcp)"
)
_METRIC = re.compile(r"([A-Za-z][\w/.]*?)=(-?\d+\.\d+(?:e[+-]?\d+)?)(?=[-_.]|$)")  # Lightning's `val_loss=0.25`


@dataclass(frozen=True, slots=True)
class UnitDescription:
    """What a unit's files say about it.

    Attributes:
        step: the step at which it was saved; None if nothing says it.
        metrics: the last value of each metric.
        ranks: how many ranks wrote it, as far as names of files show it.
    """

    step: int | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    ranks: int = 1


def describe(unit: Unit, opener: Opener) -> UnitDescription:
    """Describe a unit."""
    step, metrics = unit.step, _metrics_in_name(basename(unit.path))
    state = next((path for path in unit.files if basename(path) == _TRAINER_STATE), None)
    if state is not None and isinstance(trainer_state := _read_file(opener, state, read_json), dict):
        step = step if unit.layout is OWN else _valid_step(trainer_state.get("global_step"), step)
        metrics |= _logged_metrics(trainer_state.get("log_history"))
    elif unit.layout is LIGHTNING and len(unit.files) == 1 and "step=" not in basename(unit.path):
        data = _read_file(opener, unit.files[0], lambda source: read_record(source, "/data.pkl", _MAX_PICKLE))
        step = _valid_step(find_int(data, "global_step") if data else None, step)
    matches = (_RANK_FILE.fullmatch(basename(path)) for path in unit.files)
    ranks = max((int(match[1]) + 1 for match in matches if match), default=1)
    kept_metrics = dict(list(metrics.items())[:MAX_METRICS])
    return UnitDescription(_valid_step(step, None), kept_metrics, ranks)


def _read_file(opener: Opener, path: str, read: Any) -> Any:
    try:
        with opener(path) as source:
            return read(source)
    except (ChangedFile, OSError, DamagedFile, UncheckedFile):
        return None


def _valid_step(number: object, otherwise: int | None) -> int | None:
    is_step = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= MAX_STEP
    return number if is_step else otherwise  # type: ignore[return-value]  # `is_step` says that it is an int


def _metrics_in_name(name: str) -> dict[str, float]:
    return {match[1]: float(match[2]) for match in _METRIC.finditer(name)}


def _logged_metrics(history: object) -> dict[str, float]:
    """Return the last value of each number in a Trainer's log; its step and epoch are no metrics."""
    metrics: dict[str, float] = {}
    for entry in history if isinstance(history, list) else ():
        for name, value in entry.items() if isinstance(entry, dict) else ():
            number = _finite_number(value)
            if number is not None and is_metric_name(name) and name not in ("step", "epoch"):
                metrics[name] = number
    return metrics


def _finite_number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's integers have no bound
        return None
    return number if math.isfinite(number) else None
