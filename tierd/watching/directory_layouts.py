"""Decide which program wrote a directory as its checkpoint, and whether the directory is complete."""

from __future__ import annotations

import re
from collections.abc import Callable

from tierd.watching.completeness import (
    WEIGHTS,
    Directory,
    absent_combination,
    absent_index,
    absent_name,
    absent_rank,
    is_begun,
    not_tracked,
    unfinished,
)
from tierd.watching.listing import gap, joined
from tierd.watching.programs import (
    ACCELERATE,
    DCP,
    DEEPSPEED,
    LIGHTNING,
    MEGATRON,
    NEMO,
    ORBAX,
    TORCH_CHECKPOINTING,
    TORCHTITAN,
    TRAINER,
    UnitLayout,
)

Claim = tuple[UnitLayout, str | None]


def claim(here: Directory) -> Claim | None:
    """Return the first layout that a directory has, and the reason why it is not complete; None if it has none."""
    return next((found for layout in _LAYOUTS if (found := layout(here)) is not None), None)


def _orbax_temporary(here: Directory) -> Claim | None:
    return (ORBAX, "its name says that it is being written") if ".orbax-checkpoint-tmp" in here.name else None


def _trainer(here: Directory) -> Claim | None:
    known = here.has(*_OF_TRAINER) or here.files(WEIGHTS) or here.files(r"rng_state(_\d+)?\.pth") or is_begun(here)
    if not (re.fullmatch(r"checkpoint-\d+", here.name) and known):
        return None
    if here.has("checkpoint-is-incomplete.txt"):
        return TRAINER, "checkpoint-is-incomplete.txt is there"
    if not here.has("trainer_state.json"):
        return TRAINER, "trainer_state.json is not there, which is written last"
    return TRAINER, absent_rank(here, r"rng_state_(\d+)\.pth") or absent_index(here)


_OF_TRAINER = (
    *("trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("config.json", "adapter_config.json"),
)


def _accelerate(here: Directory) -> Claim | None:
    if here.files(r"random_states_\d+\.pkl"):
        return ACCELERATE, absent_rank(here, r"random_states_(\d+)\.pkl", 0) or absent_index(here) or _registered(here)
    begun = here.has("optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt") or here.files(WEIGHTS)
    if re.fullmatch(r"checkpoint_\d+", here.name) and (begun or is_begun(here)):
        return ACCELERATE, "random_states_0.pkl is not there, which is written last"
    return None


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
            return DEEPSPEED, missing
    return DEEPSPEED, not_tracked(here, "latest")


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
            return MEGATRON, f"{match[0]} has no model_optim_rng.pt"
    missing = absent_combination(ranks) if ranks else absent_name(here, ".metadata", "metadata.json")
    return MEGATRON, missing or not_tracked(here, "latest_checkpointed_iteration.txt")


def _nemo(here: Directory) -> Claim | None:
    weights = here.child("weights")
    if marked := unfinished(here.tree[here.parent], here.name):
        return NEMO, marked
    if weights is None or here.child("context") is None:
        return None
    return NEMO, absent_name(weights, ".metadata")


def _orbax(here: Directory) -> Claim | None:
    items = [here, *(inner for name in here.directories if (inner := here.child(name)) is not None)]
    if here.has("_CHECKPOINT_METADATA", "commit_success.txt"):
        return ORBAX, None
    return (ORBAX, None) if any(one.has("manifest.ocdbt", "_METADATA") for one in items) else None


def _lightning(here: Directory) -> Claim | None:
    sharded = here.has(".metadata") or bool(here.files(_DISTCP))
    if not ((here.has("meta.pt") and sharded) or (here.name.endswith(".ckpt") and (sharded or is_begun(here)))):
        return None
    return LIGHTNING, absent_name(here, ".metadata", "meta.pt")


_DISTCP = r"__\d+_\d+\.distcp"


def _dcp(here: Directory) -> Claim | None:
    apart = here.files(r"__(\d+)\.metadata")
    titan = re.fullmatch(r"step-\d+", here.name)
    if not (here.has(".metadata", ".metadata.tmp") or apart or here.files(_DISTCP)):
        if titan and here.has("model.safetensors.index.json"):
            return TORCHTITAN, None
        return None
    missing = absent_rank(here, r"__(\d+)\.metadata", 0) if apart else absent_name(here, ".metadata")
    return TORCHTITAN if titan else DCP, missing


def _torch_checkpointing(here: Directory) -> Claim | None:
    found = here.files(r"(.+)_(\d+)\.pt")
    if found and here.name.startswith(_TEMPORARY):
        return TORCH_CHECKPOINTING, "its name says that it is being written"
    alone = len(found) > 1 and len(found) == len(here.names) and all(match[2] == "0" for match in found)
    if not alone and not (found and here.has("metadata.pkl")):  # a single rank without DTensors writes no metadata
        return None
    for item in sorted({match[1] for match in found}):
        missing = gap((int(match[2]) for match in found if match[1] == item), 0)
        if missing is not None:
            return TORCH_CHECKPOINTING, f"{item}_{missing}.pt is not there, and files of later ranks are"
    return TORCH_CHECKPOINTING, None


_TEMPORARY = "tmp_"  # torch_checkpointing's DEFAULT_TEMP_DIR_PREFIX

_LAYOUTS: tuple[Callable[[Directory], Claim | None], ...] = (
    *(_orbax_temporary, _trainer, _accelerate, _deepspeed, _megatron, _lightning, _nemo, _orbax, _dcp),
    _torch_checkpointing,
)
