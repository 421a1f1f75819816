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


class Claim(NamedTuple):
    """The layout of a directory.

    Attributes:
        layout: the layout of its program.
        missing: the reason why it is not complete; None if it is.
        begun: whether the program itself left the proof that it began the save and did not finish it.
    """

    layout: UnitLayout
    missing: str | None
    begun: bool = False


def claim(here: Directory) -> Claim | None:
    """Return the first layout that a directory has, and the reason why it is not complete; None if it has none."""
    return next((found for layout in _LAYOUTS if (found := layout(here)) is not None), None)


def _orbax_temporary(here: Directory) -> Claim | None:
    temporary = ".orbax-checkpoint-tmp" in here.name
    return Claim(ORBAX, "its name says that it is being written", begun=True) if temporary else None


def _trainer(here: Directory) -> Claim | None:
    if here.has("checkpoint-is-incomplete.txt"):
        return Claim(TRAINER, "checkpoint-is-incomplete.txt is there", begun=True)
    if here.has("trainer_state.json"):
        return Claim(TRAINER, absent_rank(here, r"rng_state_(\d+)\.pth") or absent_index(here))
    return None


def _accelerate(here: Directory) -> Claim | None:
    if not here.files(r"random_states_\d+\.pkl"):
        return None
    missing = absent_rank(here, r"random_states_(\d+)\.pkl", 0) or absent_index(here) or _registered(here)
    return Claim(ACCELERATE, missing)


def _registered(here: Directory) -> str | None:
    """Return a reason if Accelerate's checkpoint lacks registered objects, which are written after the generators.

    Only the checkpoint before it says how many there are.
    """
    number = re.fullmatch(r"checkpoint_(\d{1,18})", here.name)
    names = here.tree.get(joined(here.parent, f"checkpoint_{int(number[1]) - 1}")) if number else None
    objects = r"custom_checkpoint_\d+\.pkl"
    before = [name for name in names or () if re.fullmatch(objects, name)]
    there = len(here.files(objects))
    return f"{there} of {len(before)} custom_checkpoint_N.pkl, which are written last" if there < len(before) else None


def _deepspeed(here: Directory) -> Claim | None:
    optimizers = here.files(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
    sharded = here.files(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
    models = here.files(r"mp_rank_(\d+)_model_states\.pt")
    layers = here.files(r"layer_(\d+)-model_(\d+)-model_states\.pt")
    if not (optimizers or sharded or models or layers):
        return None
    for found in (optimizers, sharded, models):
        if missing := absent_combination(found):
            return Claim(DEEPSPEED, missing)
    return Claim(DEEPSPEED, not_tracked(here, "latest"))


def _megatron(here: Directory) -> Claim | None:
    if not re.fullmatch(r"iter_\d{7,}|release", here.name):
        return None
    ranks = [match for name in here.names if (match := re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?", name))]
    sharded = here.has(".metadata", "metadata.json") or bool(here.files(_DISTCP))
    if not ranks and not sharded and not (here.name != "release" and here.has("common.pt")):
        return None
    for match in ranks:
        inner = here.child(match[0])
        if inner is None or not inner.has("model_optim_rng.pt", "model_rng.pt"):
            return Claim(MEGATRON, f"{match[0]} has no model_optim_rng.pt")
    missing = absent_combination(ranks) if ranks else absent_name(here, ".metadata", "metadata.json")
    return Claim(MEGATRON, missing or not_tracked(here, "latest_checkpointed_iteration.txt"))


def _nemo(here: Directory) -> Claim | None:
    weights = here.child("weights")
    if marked := unfinished(here.tree[here.parent], here.name):
        return Claim(NEMO, marked, begun=True)
    if weights is None or here.child("context") is None:
        return None
    missing = absent_name(weights, ".metadata")
    return Claim(NEMO, missing, _is_begun_dcp(weights)) if _is_dcp(weights) else None


def _orbax(here: Directory) -> Claim | None:
    items = [here, *(inner for name in here.directories if (inner := here.child(name)) is not None)]
    if here.has("_CHECKPOINT_METADATA", "commit_success.txt"):
        return Claim(ORBAX, None)
    return Claim(ORBAX, None) if any(one.has("manifest.ocdbt", "_METADATA") for one in items) else None


def _lightning(here: Directory) -> Claim | None:
    if not (_is_dcp(here) and (here.has("meta.pt") or here.name.endswith(".ckpt"))):
        return None
    return Claim(LIGHTNING, absent_name(here, ".metadata", "meta.pt"), _is_begun_dcp(here))


_DISTCP = r"__\d+_\d+\.distcp"


def _is_dcp(here: Directory) -> bool:
    """Whether DCP wrote here: it alone names files so."""
    return here.has(".metadata", ".metadata.tmp") or bool(here.files(_DISTCP))


def _is_begun_dcp(here: Directory) -> bool:
    """Whether rank 0, which writes `.metadata` last, began a save here and did not finish it."""
    return not here.has(".metadata") and bool(here.has(".metadata.tmp") or here.files(r"__0_\d+\.distcp"))


def _dcp(here: Directory) -> Claim | None:
    apart = here.files(r"__(\d+)\.metadata")
    titan = re.fullmatch(r"step-\d+", here.name)
    if not (_is_dcp(here) or apart):
        return Claim(TORCHTITAN, None) if titan and here.has("model.safetensors.index.json") else None
    missing = absent_rank(here, r"__(\d+)\.metadata", 0) if apart else absent_name(here, ".metadata")
    return Claim(TORCHTITAN if titan else DCP, missing, not apart and _is_begun_dcp(here))


def _torch_checkpointing(here: Directory) -> Claim | None:
    found = here.files(r"(.+)_(\d+)\.pt")
    if found and here.name.startswith(_TEMPORARY):
        return Claim(TORCH_CHECKPOINTING, "its name says that it is being written", begun=True)
    alone = len(found) > 1 and len(found) == len(here.names) and all(match[2] == "0" for match in found)
    if not alone and not (found and here.has("metadata.pkl")):  # a single rank without DTensors writes no metadata
        return None
    for item in sorted({match[1] for match in found}):
        missing = gap((int(match[2]) for match in found if match[1] == item), 0)
        if missing is not None:
            return Claim(TORCH_CHECKPOINTING, f"{item}_{missing}.pt is not there, and files of later ranks are")
    return Claim(TORCH_CHECKPOINTING, None)


def _saved_model(here: Directory) -> Claim | None:
    if not here.has("saved_model.pb"):
        return None
    inner = here.child("variables")
    missing = inner and inner.files(r"variables\.data-\d+-of-\d+") and absent_name(inner, "variables.index")
    return Claim(SAVED_MODEL, missing or None)


_SNAPSHOT = re.compile(r"(.*/)?(models|datasets|spaces)--[^/]+/snapshots/[^/]+")


def _hub_snapshot(here: Directory) -> Claim | None:
    """A revision in a cache of the Hugging Face Hub: two of them beside each other are no shards of one model."""
    if not _SNAPSHOT.fullmatch(here.path):
        return None
    inside = ((path.rpartition("/")[2], entry.kind) for path, entry in below(here.tree, here.path))
    return Claim(HUB, None) if any(kind == "file" and is_weights(name) for name, kind in inside) else None


def _empty(here: Directory) -> Claim | None:
    """A directory with the name of a checkpoint in which a killed program left nothing, or temporary files alone."""
    named = directory_step(here.name) is not None or here.name.endswith(".ckpt")
    return Claim(DIRECTORY, "it has no file yet", begun=True) if named and is_begun(here) else None


_TEMPORARY = "tmp_"  # torch_checkpointing's DEFAULT_TEMP_DIR_PREFIX

_LAYOUTS: tuple[Callable[[Directory], Claim | None], ...] = (
    *(_orbax_temporary, _trainer, _accelerate, _deepspeed, _megatron, _lightning, _nemo, _orbax, _dcp),
    *(_torch_checkpointing, _saved_model, _hub_snapshot, _empty),
)
