"""Read what decides the shards of a torch-dataloader-utils dataset, so that it is compared before a load.

The reason is that the library's own comparison is late and partial. `load_state_dict()` compares only the shards that
were read to their end. Until one is, it takes any seed and any list of files, and continues with other shards. Its
state names the seed, but `load_state_dict()` does not restore it.

Source: torch-dataloader-utils 0.2.0, `dataset/base.py` (`BaseDataset`: `state_dict`, `load_state_dict`, `_match_shard`,
`_generate_splits`) and `splits/target_size.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import weakref
from typing import Any

_BASE = "torch_dataloader_utils.dataset.base"
_files: dict[int, str] = {}  # by the dataset's id, while it lives: a save runs in the training thread


def is_shard_dataset(part: object) -> bool:
    """Return whether `part` is a `StructuredDataset`, an `IcebergDataset` or another of the library's datasets."""
    return any(kind.__module__ == _BASE and kind.__name__ == "BaseDataset" for kind in type(part).__mro__)


def shard_facts(part: Any) -> dict[str, object]:
    """Return the seed if the dataset shuffles, how it splits files, and the number and a digest of its files.

    The digest covers the files' order, paths and sizes, because shards are cut from the ordered list.
    """
    facts: dict[str, object] = {}
    if getattr(part, "_shuffle", False):
        facts["shuffle_seed"] = part._shuffle_seed
    if id(part) not in _files:
        weakref.finalize(part, _files.pop, id(part), None)
        _files[id(part)] = _files_digest(part._files)
    return {**facts, "files": _files[id(part)], "split": _strategy_text(part)}


def saved_facts(saved: Any) -> dict[str, object]:
    """Return what a state alone names of these, also if it was saved without a record."""
    seed = saved.get("_shuffle_seed") if isinstance(saved, dict) else None
    return {} if seed is None else {"shuffle_seed": seed}


def mismatch_error(part: object) -> type[Exception] | None:
    """Return the error that the library's documents say to catch, if `part` is one of its datasets."""
    error_class = getattr(sys.modules.get(_BASE), "CheckpointMismatchError", None) if is_shard_dataset(part) else None
    return error_class if isinstance(error_class, type) and issubclass(error_class, Exception) else None


def _files_digest(files: list[Any]) -> str:
    lines = "\n".join(f"{file.path}\t{file.file_size}" for file in files)
    return f"{len(files)} ({hashlib.sha256(lines.encode(errors='surrogateescape')).hexdigest()[:12]})"


def _strategy_text(part: Any) -> str:
    """Return the strategy's class and arguments, without a seed that is the dataset's or is not used."""
    kind = type(part._strategy)
    values = {name.strip("_"): value for name, value in vars(part._strategy).items()}
    if not values.get("shuffle") or values.get("seed") == getattr(part, "_shuffle_seed", None):
        values.pop("seed", None)
    arguments = [name for name in inspect.signature(kind).parameters if type(values.get(name)) in (int, bool, str)]
    return f"{kind.__name__}({', '.join(f'{name}={values[name]!r}' for name in arguments)})"
