"""Decide which program wrote a directory as its checkpoint, whether the directory is complete, and whether it is one
checkpoint or a run's, a seed's or a job's, which holds several. Pure.

Invariant: a program is named only by a file that it alone writes. That such a file is absent proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from tierd.watching.loose_units import is_usual
from tierd.watching.missing_files import (
    Directory,
    absent_combination,
    absent_index,
    absent_name,
    absent_rank,
    has_only_temporary_files,
    is_temporary,
    tracker_mismatch,
    unfinished_reason,
)
from tierd.watching.step_in_name import (
    are_ends_of_run,
    are_saves,
    directory_step,
    is_place_of_saves,
    is_weights,
    step_in,
)
from tierd.watching.unit import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    DIRECTORY_LAYOUT,
    HUB,
    LIGHTNING,
    MEGATRON,
    NEMO,
    ORBAX,
    SAVED_MODEL,
    TORCH_CHECKPOINTING,
    TORCHTITAN,
    TRAINER,
    UnitLayout,
    files_below,
    first_missing_number,
    join_path,
)


class DirectoryLayout(NamedTuple):
    """The layout of a directory. `is_unfinished`: the program itself proves that it did not finish the save."""

    layout: UnitLayout
    missing_reason: str | None
    is_unfinished: bool = False


def match_layout(directory: Directory) -> DirectoryLayout | None:
    """Return the first layout that a directory has; None if it has none."""
    return next((claimed for layout in _LAYOUTS if (claimed := layout(directory)) is not None), None)


def _orbax_temporary(directory: Directory) -> DirectoryLayout | None:
    temporary = ".orbax-checkpoint-tmp" in directory.name
    return DirectoryLayout(ORBAX, "its name says that it is being written", is_unfinished=True) if temporary else None


def _trainer(directory: Directory) -> DirectoryLayout | None:
    if directory.has_file("checkpoint-is-incomplete.txt"):
        return DirectoryLayout(TRAINER, "checkpoint-is-incomplete.txt is there", is_unfinished=True)
    if directory.has_file("trainer_state.json"):
        return DirectoryLayout(TRAINER, absent_rank(directory, r"rng_state_(\d+)\.pth") or absent_index(directory))
    return None


def _accelerate(directory: Directory) -> DirectoryLayout | None:
    if not directory.matching_files(r"random_states_\d+\.pkl"):
        return None
    missing_rank = absent_rank(directory, r"random_states_(\d+)\.pkl", 0)
    return DirectoryLayout(ACCELERATE, missing_rank or absent_index(directory) or _absent_objects(directory))


def _absent_objects(directory: Directory) -> str | None:
    """Return a reason if Accelerate's checkpoint lacks registered objects, which are written after the generators.

    Only the checkpoint before it says how many there are.
    """
    number = re.fullmatch(r"checkpoint_(\d{1,18})", directory.name)
    names = directory.tree.get(join_path(directory.parent, f"checkpoint_{int(number[1]) - 1}")) if number else None
    objects = r"custom_checkpoint_\d+\.pkl"
    before = [name for name in names or () if re.fullmatch(objects, name)]
    count = len(directory.matching_files(objects))
    return f"{count} of {len(before)} custom_checkpoint_N.pkl, which are written last" if count < len(before) else None


def _deepspeed(directory: Directory) -> DirectoryLayout | None:
    optimizers = directory.matching_files(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
    sharded = directory.matching_files(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
    models = directory.matching_files(r"mp_rank_(\d+)_model_states\.pt")
    layers = directory.matching_files(r"layer_(\d+)-model_(\d+)-model_states\.pt")
    if not (optimizers or sharded or models or layers):
        return None
    for matches in (optimizers, sharded, models):
        if missing := absent_combination(matches):
            return DirectoryLayout(DEEPSPEED, missing)
    return DirectoryLayout(DEEPSPEED, tracker_mismatch(directory, "latest"))


def _megatron(directory: Directory) -> DirectoryLayout | None:
    if not re.fullmatch(r"iter_\d{7,}|release", directory.name):
        return None
    ranks = [match for name in directory.names if (match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?", name))]
    sharded = directory.has_file(".metadata", "metadata.json") or bool(directory.matching_files(_DISTCP))
    if not ranks and not sharded and not (directory.name != "release" and directory.has_file("common.pt")):
        return None
    for match in ranks:
        inner = directory.child(match[0])
        if inner is None or not inner.has_file("model_optim_rng.pt", "model_rng.pt"):
            return DirectoryLayout(MEGATRON, f"{match[0]} has no model_optim_rng.pt")
    missing = absent_combination(ranks) if ranks else absent_name(directory, ".metadata", "metadata.json")
    return DirectoryLayout(MEGATRON, missing or tracker_mismatch(directory, "latest_checkpointed_iteration.txt"))


def _nemo(directory: Directory) -> DirectoryLayout | None:
    weights = directory.child("weights")
    if marked := unfinished_reason(directory.tree[directory.parent], directory.name):
        return DirectoryLayout(NEMO, marked, is_unfinished=True)
    if weights is None or directory.child("context") is None:
        return None
    missing = absent_name(weights, ".metadata")
    return DirectoryLayout(NEMO, missing, _is_begun_dcp(weights)) if _is_dcp(weights) else None


def _orbax(directory: Directory) -> DirectoryLayout | None:
    items = [directory, *(inner for name in directory.directories if (inner := directory.child(name)) is not None)]
    if directory.has_file("_CHECKPOINT_METADATA", "commit_success.txt"):
        return DirectoryLayout(ORBAX, None)
    return DirectoryLayout(ORBAX, None) if any(item.has_file("manifest.ocdbt", "_METADATA") for item in items) else None


def _lightning(directory: Directory) -> DirectoryLayout | None:
    if not (_is_dcp(directory) and (directory.has_file("meta.pt") or directory.name.endswith(".ckpt"))):
        return None
    return DirectoryLayout(LIGHTNING, absent_name(directory, ".metadata", "meta.pt"), _is_begun_dcp(directory))


_DISTCP = r"__\d+_\d+\.distcp"


def _is_dcp(directory: Directory) -> bool:
    """Whether DCP wrote here: it alone names files so."""
    return directory.has_file(".metadata", ".metadata.tmp") or bool(directory.matching_files(_DISTCP))


def _is_begun_dcp(directory: Directory) -> bool:
    """Whether rank 0, which writes `.metadata` last, began a save here and did not finish it."""
    return not directory.has_file(".metadata") and bool(
        directory.has_file(".metadata.tmp") or directory.matching_files(r"__0_\d+\.distcp")
    )


def _dcp(directory: Directory) -> DirectoryLayout | None:
    rank_metadata = directory.matching_files(r"__(\d+)\.metadata")
    titan = re.fullmatch(r"step-\d+", directory.name)
    if not (_is_dcp(directory) or rank_metadata):
        has_index = titan and directory.has_file("model.safetensors.index.json")
        return DirectoryLayout(TORCHTITAN, None) if has_index else None
    missing = absent_rank(directory, r"__(\d+)\.metadata", 0) if rank_metadata else absent_name(directory, ".metadata")
    return DirectoryLayout(TORCHTITAN if titan else DCP, missing, not rank_metadata and _is_begun_dcp(directory))


def _torch_checkpointing(directory: Directory) -> DirectoryLayout | None:
    matches = directory.matching_files(r"(.+)_(\d+)\.pt")
    if matches and directory.name.startswith(_TEMPORARY):
        return DirectoryLayout(TORCH_CHECKPOINTING, "its name says that it is being written", is_unfinished=True)
    alone = len(matches) > 1 and len(matches) == len(directory.names) and all(match[2] == "0" for match in matches)
    # A single rank without DTensors writes no metadata.
    if not alone and not (matches and directory.has_file("metadata.pkl")):
        return None
    for item in sorted({match[1] for match in matches}):
        missing = first_missing_number((int(match[2]) for match in matches if match[1] == item), 0)
        if missing is not None:
            why = f"{item}_{missing}.pt is not there, and files of later ranks are"
            return DirectoryLayout(TORCH_CHECKPOINTING, why)
    return DirectoryLayout(TORCH_CHECKPOINTING, None)


def _saved_model(directory: Directory) -> DirectoryLayout | None:
    if not directory.has_file("saved_model.pb"):
        return None
    inner = directory.child("variables")
    missing = inner and inner.matching_files(r"variables\.data-\d+-of-\d+") and absent_name(inner, "variables.index")
    return DirectoryLayout(SAVED_MODEL, missing or None)


_SNAPSHOT = re.compile(r"(.*/)?(models|datasets|spaces)--[^/]+/snapshots/[^/]+")


def _hub_snapshot(directory: Directory) -> DirectoryLayout | None:
    """A revision in a cache of the Hugging Face Hub: two of them beside each other are no shards of one model."""
    if not _SNAPSHOT.fullmatch(directory.path):
        return None
    inside = ((path.rpartition("/")[2], entry.kind) for path, entry in files_below(directory.tree, directory.path))
    return DirectoryLayout(HUB, None) if any(kind == "file" and is_weights(name) for name, kind in inside) else None


def _empty_directory(directory: Directory) -> DirectoryLayout | None:
    """A directory with the name of a checkpoint in which a killed program left nothing, or temporary files alone."""
    if directory_step(directory.name) is None and not directory.name.endswith(".ckpt"):
        return None
    is_empty = has_only_temporary_files(directory)
    return DirectoryLayout(DIRECTORY_LAYOUT, "it has no file yet", is_unfinished=True) if is_empty else None


_TEMPORARY = "tmp_"  # torch_checkpointing's DEFAULT_TEMP_DIR_PREFIX

_LAYOUTS: tuple[Callable[[Directory], DirectoryLayout | None], ...] = (
    *(_orbax_temporary, _trainer, _accelerate, _deepspeed, _megatron, _lightning, _nemo, _orbax, _dcp),
    *(_torch_checkpointing, _saved_model, _hub_snapshot, _empty_directory),
)


def is_checkpoint(directory: Directory) -> bool:
    """Whether a directory whose name has a step is a checkpoint, and not a place of checkpoints of other steps."""
    step = directory_step(directory.name)
    if step is None or is_of_run(directory):
        return False
    inside, outside = _steps_below(directory, step)
    return bool(outside) or (not inside and has_weights(directory))


def is_of_run(directory: Directory) -> bool:
    """Whether a directory whose name is nothing but a number is of a run, as its seed or job, and holds its saves."""
    if not directory.name.isdecimal():
        return False
    has_ends = are_ends_of_run(directory.names_below(), directory.name)
    return has_ends or holds_several_saves(directory) or _is_of_seed(directory)


def _is_of_seed(candidate: Directory) -> bool:
    """Whether a directory and those with a number beside it have one save each, whose steps do not grow with it.

    GraphGym's are `0/ckpt/399.ckpt` and `1/ckpt/399.ckpt`.
    """
    if _step_inside(candidate) is None:
        return False
    names = candidate.tree[candidate.parent]
    numbers = sorted((name for name in names if name.isdecimal() and names[name].kind == "directory"), key=int)
    at = numbers.index(candidate.name)
    neighbours = numbers[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS]
    siblings = (candidate.directory_at(join_path(candidate.parent, name)) for name in neighbours)
    steps = [_step_inside(directory) for directory in siblings if has_weights(directory)]
    saved_steps = [step for step in steps if step is not None]
    return len(saved_steps) == len(steps) > 1 and any(first >= second for first, second in pairwise(saved_steps))


def _step_inside(directory: Directory) -> int | None:
    """Return the only step of the files of weights below a directory, if it is larger than the directory's number."""
    steps = {step for name in directory.names_below() if is_weights(name) and (step := step_in(name)) is not None}
    return next((step for step in steps if step > int(directory.name)), None) if len(steps) == 1 else None


_NEIGHBOURS = 4  # directories beside one that are compared with it


def holds_several_saves(directory: Directory) -> bool:
    """Whether several checkpoints lie below a directory, by the names of what has weights."""
    inner = [child for name in directory.directories if (child := directory.child(name)) and has_weights(child)]
    stepped = {child.name: step for child in inner if (step := directory_step(child.name)) is not None}
    if len({step for name, step in stepped.items() if not name.isdecimal()}) > 1:
        return True
    if are_saves(filter(is_weights, directory.candidates)) or are_saves(child.name for child in inner):
        return True
    return any(
        is_place_of_saves(child.name) or (match_layout(child) is None and holds_several_saves(child)) for child in inner
    )


def _steps_below(directory: Directory, step: int) -> tuple[bool, bool]:
    """Return whether directories of other steps lie below, and whether weights lie below outside of them."""
    inside = outside = False
    for name, entry in directory.names.items():
        if is_temporary(name):
            continue
        child = directory.child(name) if entry.kind == "directory" else None
        if child is None:
            outside = outside or (entry.kind == "file" and is_weights(name))
        elif directory_step(name) not in (None, step) and has_weights(child):
            inside = True
        else:
            deeper = _steps_below(child, step)
            inside, outside = inside or deeper[0], outside or deeper[1]
    return inside, outside


def has_weights(directory: Directory) -> bool:
    """Whether weights lie below a directory, or its name says that it is a checkpoint and its files may hold some."""
    inside = (path[len(directory.path) + 1 :].split("/") for path, _ in files_below(directory.tree, directory.path))
    names = [pieces[-1] for pieces in inside if not any(map(is_temporary, pieces))]
    # A word such as "step" says that it is a checkpoint, whatever its program writes.
    return any(map(is_weights, names)) or not (directory.name.isdecimal() or all(is_usual(name) for name in names))
