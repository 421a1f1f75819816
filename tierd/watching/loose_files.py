"""Find the units among the files of one directory that is no unit itself. Pure."""

from __future__ import annotations

import re

from tierd.watching.completeness import (
    SHARD,
    WEIGHTS,
    Directory,
    absent_index,
    absent_name,
    absent_of_count,
    is_temporary,
    needs_index,
    temporary_name,
    unfinished,
)
from tierd.watching.listing import MAX_MARKER, gap, joined
from tierd.watching.programs import COMPOSER, FILE, KERAS, LIGHTNING, SHARDED, TENSORFLOW, UnitLayout
from tierd.watching.step_in_name import is_log, is_weights, step_in, without_ending
from tierd.watching.unit import Unit
from tierd.watching.unknown_names import POINTERS, is_usual, may_hold_state

# What diffusers and sentence-transformers write beside the directories of a model's parts, which it lists.
LISTS_OF_PARTS = ("model_index.json", "modules.json")
_CONFIG = re.compile(r"(\w+_)?config(_\w+)?\.json")
_OF_MODEL = re.compile(
    r"(tokenizer|vocab|added_tokens|special_tokens_map|chat_template)\.(json|txt|jinja)|merges\.txt|spiece\.model"
)
_NUMBER = re.compile(r"\d{1,18}")
_BUNDLE = re.compile(r"(.+)\.(?:index|data-\d{5,}-of-\d{5,})")
_SHARD_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")
_RANK_FILE = re.compile(r"(.+)-rank(\d+)(\.pt|\.tar)?")
_SINGLE_FILE_LAYOUTS = (
    ((".ckpt",), LIGHTNING),
    ((".keras", ".h5", ".hdf5"), KERAS),
)


def is_config(name: str) -> bool:
    """Return whether a file's name is one of a model's or a part's configuration, as `scheduler_config.json`."""
    return _CONFIG.fullmatch(name) is not None


def _is_of_model(name: str) -> bool:
    return is_config(name) or _OF_MODEL.fullmatch(name) is not None


def file_units(directory: Directory) -> list[Unit]:
    """Return the units among the files of a directory that is no unit itself."""
    if directory.path and directory.has("config.json", "adapter_config.json") and directory.files(WEIGHTS):
        return [_model_unit(directory)]
    bundles = {match[1] for match in directory.files(r"(.+)\.data-\d{5,}-of-\d{5,}")}
    groups: dict[tuple[UnitLayout, str], list[str]] = {}
    # RotatE's `checkpoint` is no text.
    large = (name for name in POINTERS if directory.has(name) and directory.names[name].size > MAX_MARKER)
    for name in (*directory.candidates, *large):
        if name.startswith("."):
            continue
        if (match := _BUNDLE.fullmatch(name)) and match[1] in bundles:
            key = TENSORFLOW, match[1]
        elif match := _SHARD_INDEX.fullmatch(name) or SHARD.fullmatch(name):
            key = (SHARDED if needs_index(directory, match[1], match[2]) else FILE), f"{match[1]}.{match[2]}"
        elif (match := _RANK_FILE.fullmatch(name)) and match[3]:
            key = COMPOSER, f"{match[1]}-rank*{match[3]}"
        elif is_weights(name) or name in POINTERS:
            key = next((layout for endings, layout in _SINGLE_FILE_LAYOUTS if name.endswith(endings)), FILE), name
        else:
            continue
        groups.setdefault(key, []).append(name)
    _add_companions(directory, groups)
    return [_group_unit(directory, layout, name, sorted(names)) for (layout, name), names in groups.items()]


def _add_companions(directory: Directory, groups: dict[tuple[UnitLayout, str], list[str]]) -> None:
    """Add the files that belong to one of weights by their names.

    These are `model.pt.yml` beside `model.pt`, `epoch_3.json` beside `epoch_3.pt`, and of files of no known kind those
    with the same step, as `DONE_3`, and `meta_001000.json` beside `model_001000.pt`.
    """
    owners: dict[str, tuple[UnitLayout, str]] = {}
    stepless: dict[str, tuple[UnitLayout, str]] = {}
    steps: dict[int, tuple[UnitLayout, str]] = {}
    padded: dict[str, tuple[UnitLayout, str]] = {}  # steps of four digits and more, as they are written
    for key, names in groups.items():
        for name in names:
            owners[name] = key
            if (step := step_in(name)) is not None:
                owners.setdefault(without_ending(name), key)
                steps.setdefault(step, key)
                padded |= {digits: key for digits in _NUMBER.findall(name) if len(digits) > 3 and int(digits) == step}
            else:
                stepless.setdefault(name.rpartition(".")[0], key)
    if model := next((owners[match[0]] for match in directory.files(WEIGHTS) if match[0] in owners), None):
        # `save_pretrained` into the watched directory itself, where other files lie, too.
        groups[model] += [name for name in directory.names if name not in owners and _is_of_model(name)]
        owners |= dict.fromkeys(groups[model], model)
    heads = {name.partition(".")[0] for name in owners}
    for name, entry in directory.names.items() if owners else ():
        if entry.kind != "file" or name in owners or name.startswith("."):
            continue
        owner = None
        if name.partition(".")[0] in heads:  # this alone rules most names out, where there are very many
            stems = (name[: match.start()] for match in re.finditer(r"\.|$", name))
            owner = next((owners[stem] for stem in stems if stem in owners), None)
        if owner is None and not steps.keys().isdisjoint(map(int, _NUMBER.findall(name))) and not is_usual(name):
            owner = steps.get(-1 if (step := step_in(name)) is None else step)
        if owner is None and name.endswith(".json"):
            owner = next((padded[digits] for digits in _NUMBER.findall(name) if digits in padded), None)
        if owner is None and may_hold_state(name):
            owner = stepless.get(name.rpartition(".")[0])
        if owner is not None and not (is_log(name) or is_temporary(name)):
            groups[owner].append(name)


def _model_unit(directory: Directory) -> Unit:
    """Return the unit of a model's directory.

    It has only the directory's own files, because a Trainer saves checkpoints in subdirectories.
    """
    files = tuple(
        joined(directory.path, name) for name, entry in sorted(directory.names.items()) if entry.kind == "file"
    )
    strange = tuple(
        joined(directory.path, name)
        for name, entry in sorted(directory.names.items())
        if entry.kind in ("link", "other")
    )
    missing = absent_of_count(files) or absent_index(directory)
    return Unit(SHARDED, directory.path, step_in(directory.name), files, strange, missing, files)


def _group_unit(directory: Directory, layout: UnitLayout, name: str, names: list[str]) -> Unit:
    counted = None if layout is FILE else absent_of_count(names)  # of these, several names make a unit
    missing = counted or temporary_name(name) or unfinished(directory.names, name)
    if layout is TENSORFLOW:
        temporary = directory.name.endswith("_temp")
        missing = "it lies where TensorFlow gathers a save's shards" if temporary else missing
        missing = missing or absent_name(directory, f"{name}.index")
    elif layout is SHARDED:
        missing = missing or absent_name(directory, f"{name}.index.json")
    elif layout is COMPOSER:
        ranks = [match for file_name in names if (match := _RANK_FILE.fullmatch(file_name))]
        absent = gap((int(match[2]) for match in ranks), 0)
        missing = missing if absent is None else f"the file of rank {absent} is not there, and {ranks[0][0]} is"
    files = tuple(joined(directory.path, file_name) for file_name in names)
    markers = tuple(path for path in files if layout is TENSORFLOW and path.endswith(".index")) or files
    return Unit(layout, joined(directory.path, name), step_in(name), files, (), missing, markers)


def lone_file(name: str) -> Unit:
    """Return a unit for a file that no layout matches."""
    return Unit(FILE, name, None, (name,), (), None, (name,))
