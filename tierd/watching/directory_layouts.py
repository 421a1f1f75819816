"""Decide which program wrote a directory as its checkpoint, and whether the directory is complete.

Invariant: a program is named only by a file that it alone writes. That such a file is absent proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tierd.watching.completeness import (
    Directory,
    absent_combination,
    absent_index,
    absent_name,
    absent_rank,
    is_begun,
    not_tracked,
    unfinished,
)
from tierd.watching.listing import below, gap, joined
from tierd.watching.programs import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    DIRECTORY,
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
)
from tierd.watching.step_in_name import directory_step, is_weights


class DirectoryLayout(NamedTuple):
    """The layout of a directory.

    Attributes:
        layout: the layout of its program.
        missing: the reason why it is not complete; None if it is.
        begun: whether the program itself left the proof that it began the save and did not finish it.
    """

    layout: UnitLayout
    missing: str | None
    begun: bool = False


def claim(directory: Directory) -> DirectoryLayout | None:
    """Return the first layout that a directory has, and the reason why it is not complete; None if it has none."""
    return next((claimed for layout in _LAYOUTS if (claimed := layout(directory)) is not None), None)


def _orbax_temporary(directory: Directory) -> DirectoryLayout | None:
    temporary = ".orbax-checkpoint-tmp" in directory.name
    return DirectoryLayout(ORBAX, "its name says that it is being written", begun=True) if temporary else None


def _trainer(directory: Directory) -> DirectoryLayout | None:
    if directory.has("checkpoint-is-incomplete.txt"):
        return DirectoryLayout(TRAINER, "checkpoint-is-incomplete.txt is there", begun=True)
    if directory.has("trainer_state.json"):
        return DirectoryLayout(TRAINER, absent_rank(directory, r"rng_state_(\d+)\.pth") or absent_index(directory))
    return None


def _accelerate(directory: Directory) -> DirectoryLayout | None:
    if not directory.files(r"random_states_\d+\.pkl"):
        return None
    missing = (
        absent_rank(directory, r"random_states_(\d+)\.pkl", 0) or absent_index(directory) or _absent_objects(directory)
    )
    return DirectoryLayout(ACCELERATE, missing)


def _absent_objects(directory: Directory) -> str | None:
    """Return a reason if Accelerate's checkpoint lacks registered objects, which are written after the generators.

    Only the checkpoint before it says how many there are.
    """
    number = re.fullmatch(r"checkpoint_(\d{1,18})", directory.name)
    names = directory.tree.get(joined(directory.parent, f"checkpoint_{int(number[1]) - 1}")) if number else None
    objects = r"custom_checkpoint_\d+\.pkl"
    before = [name for name in names or () if re.fullmatch(objects, name)]
    count = len(directory.files(objects))
    return f"{count} of {len(before)} custom_checkpoint_N.pkl, which are written last" if count < len(before) else None


def _deepspeed(directory: Directory) -> DirectoryLayout | None:
    optimizers = directory.files(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
    sharded = directory.files(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
    models = directory.files(r"mp_rank_(\d+)_model_states\.pt")
    layers = directory.files(r"layer_(\d+)-model_(\d+)-model_states\.pt")
    if not (optimizers or sharded or models or layers):
        return None
    for matches in (optimizers, sharded, models):
        if missing := absent_combination(matches):
            return DirectoryLayout(DEEPSPEED, missing)
    return DirectoryLayout(DEEPSPEED, not_tracked(directory, "latest"))


def _megatron(directory: Directory) -> DirectoryLayout | None:
    if not re.fullmatch(r"iter_\d{7,}|release", directory.name):
        return None
    ranks = [match for name in directory.names if (match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?", name))]
    sharded = directory.has(".metadata", "metadata.json") or bool(directory.files(_DISTCP))
    if not ranks and not sharded and not (directory.name != "release" and directory.has("common.pt")):
        return None
    for match in ranks:
        inner = directory.child(match[0])
        if inner is None or not inner.has("model_optim_rng.pt", "model_rng.pt"):
            return DirectoryLayout(MEGATRON, f"{match[0]} has no model_optim_rng.pt")
    missing = absent_combination(ranks) if ranks else absent_name(directory, ".metadata", "metadata.json")
    return DirectoryLayout(MEGATRON, missing or not_tracked(directory, "latest_checkpointed_iteration.txt"))


def _nemo(directory: Directory) -> DirectoryLayout | None:
    weights = directory.child("weights")
    if marked := unfinished(directory.tree[directory.parent], directory.name):
        return DirectoryLayout(NEMO, marked, begun=True)
    if weights is None or directory.child("context") is None:
        return None
    missing = absent_name(weights, ".metadata")
    return DirectoryLayout(NEMO, missing, _is_begun_dcp(weights)) if _is_dcp(weights) else None


def _orbax(directory: Directory) -> DirectoryLayout | None:
    items = [directory, *(inner for name in directory.directories if (inner := directory.child(name)) is not None)]
    if directory.has("_CHECKPOINT_METADATA", "commit_success.txt"):
        return DirectoryLayout(ORBAX, None)
    return DirectoryLayout(ORBAX, None) if any(item.has("manifest.ocdbt", "_METADATA") for item in items) else None


def _lightning(directory: Directory) -> DirectoryLayout | None:
    if not (_is_dcp(directory) and (directory.has("meta.pt") or directory.name.endswith(".ckpt"))):
        return None
    return DirectoryLayout(LIGHTNING, absent_name(directory, ".metadata", "meta.pt"), _is_begun_dcp(directory))


_DISTCP = r"__\d+_\d+\.distcp"


def _is_dcp(directory: Directory) -> bool:
    """Whether DCP wrote here: it alone names files so."""
    return directory.has(".metadata", ".metadata.tmp") or bool(directory.files(_DISTCP))


def _is_begun_dcp(directory: Directory) -> bool:
    """Whether rank 0, which writes `.metadata` last, began a save here and did not finish it."""
    return not directory.has(".metadata") and bool(
        directory.has(".metadata.tmp") or directory.files(r"__0_\d+\.distcp")
    )


def _dcp(directory: Directory) -> DirectoryLayout | None:
    rank_metadata = directory.files(r"__(\d+)\.metadata")
    titan = re.fullmatch(r"step-\d+", directory.name)
    if not (_is_dcp(directory) or rank_metadata):
        return DirectoryLayout(TORCHTITAN, None) if titan and directory.has("model.safetensors.index.json") else None
    missing = absent_rank(directory, r"__(\d+)\.metadata", 0) if rank_metadata else absent_name(directory, ".metadata")
    return DirectoryLayout(TORCHTITAN if titan else DCP, missing, not rank_metadata and _is_begun_dcp(directory))


def _torch_checkpointing(directory: Directory) -> DirectoryLayout | None:
    matches = directory.files(r"(.+)_(\d+)\.pt")
    if matches and directory.name.startswith(_TEMPORARY):
        return DirectoryLayout(TORCH_CHECKPOINTING, "its name says that it is being written", begun=True)
    alone = len(matches) > 1 and len(matches) == len(directory.names) and all(match[2] == "0" for match in matches)
    if not alone and not (
        matches and directory.has("metadata.pkl")
    ):  # a single rank without DTensors writes no metadata
        return None
    for item in sorted({match[1] for match in matches}):
        missing = gap((int(match[2]) for match in matches if match[1] == item), 0)
        if missing is not None:
            return DirectoryLayout(
                TORCH_CHECKPOINTING, f"{item}_{missing}.pt is not there, and files of later ranks are"
            )
    return DirectoryLayout(TORCH_CHECKPOINTING, None)


def _saved_model(directory: Directory) -> DirectoryLayout | None:
    if not directory.has("saved_model.pb"):
        return None
    inner = directory.child("variables")
    missing = inner and inner.files(r"variables\.data-\d+-of-\d+") and absent_name(inner, "variables.index")
    return DirectoryLayout(SAVED_MODEL, missing or None)


_SNAPSHOT = re.compile(r"(.*/)?(models|datasets|spaces)--[^/]+/snapshots/[^/]+")


def _hub_snapshot(directory: Directory) -> DirectoryLayout | None:
    """A revision in a cache of the Hugging Face Hub: two of them beside each other are no shards of one model."""
    if not _SNAPSHOT.fullmatch(directory.path):
        return None
    inside = ((path.rpartition("/")[2], entry.kind) for path, entry in below(directory.tree, directory.path))
    return DirectoryLayout(HUB, None) if any(kind == "file" and is_weights(name) for name, kind in inside) else None


def _empty_directory(directory: Directory) -> DirectoryLayout | None:
    """A directory with the name of a checkpoint in which a killed program left nothing, or temporary files alone."""
    is_checkpoint_name = directory_step(directory.name) is not None or directory.name.endswith(".ckpt")
    return (
        DirectoryLayout(DIRECTORY, "it has no file yet", begun=True)
        if is_checkpoint_name and is_begun(directory)
        else None
    )


_TEMPORARY = "tmp_"  # torch_checkpointing's DEFAULT_TEMP_DIR_PREFIX

_LAYOUTS: tuple[Callable[[Directory], DirectoryLayout | None], ...] = (
    *(_orbax_temporary, _trainer, _accelerate, _deepspeed, _megatron, _lightning, _nemo, _orbax, _dcp),
    *(_torch_checkpointing, _saved_model, _hub_snapshot, _empty_directory),
)
