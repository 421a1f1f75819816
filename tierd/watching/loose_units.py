"""Find the units that no program's directory is: among the files of a directory, and by a person's own rules. Pure.

Invariant: where a person's rules apply, the other rules apply neither within a unit nor beside it. A path that no glob
matches is then no unit.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tierd.core.ids import MAX_STEP
from tierd.watching.missing_files import (
    SHARD_PATTERN,
    WEIGHTS_PATTERN,
    Directory,
    absent_index,
    absent_name,
    absent_of_count,
    is_temporary,
    needs_index,
    temporary_name_reason,
    unfinished_reason,
)
from tierd.watching.step_in_name import directory_step, is_log, is_weights, step_in, without_ending
from tierd.watching.unit import (
    COMPOSER,
    FILE_LAYOUT,
    KERAS,
    LIGHTNING,
    MAX_MARKER,
    SHARDED_LAYOUT,
    TENSORFLOW,
    USER_LAYOUT,
    ListedEntry,
    Listing,
    Unit,
    UnitLayout,
    files_below,
    first_missing_number,
    join_path,
)

# The endings of what programs write beside checkpoints.
USUAL_ENDINGS = frozenset(
    (
        *(".log", ".out", ".err", ".csv", ".tsv", ".json", ".jsonl", ".yaml", ".yml", ".txt", ".md", ".html", ".py"),
        *(".png", ".jpg", ".jpeg", ".gif", ".svg", ".mp4", ".wav", ".flac", ".pdf", ".tfevents"),
    )
)
# Of these no file is a checkpoint either: programs, settings, locks, data sets, data bases that runs are recorded in.
_OTHER_ENDINGS = frozenset(
    (
        *(".sh", ".ipynb", ".toml", ".ini", ".cfg", ".conf", ".diff", ".patch", ".c", ".cc", ".cpp", ".cu", ".h"),
        *(".lock", ".pid", ".sock", ".swp", ".webp", ".parquet", ".arrow", ".tfrecord", ".tfrecords", ".mdb", ".db"),
        *(".db-wal", ".db-shm", ".db-journal", ".sqlite", ".sqlite3"),
    )
)
POINTER_NAMES = frozenset(
    ("latest", "last", "checkpoint", "last_checkpoint", "latest_checkpoint", "latest_checkpointed_iteration.txt")
)
# Also `solver.log.0`, and SGE's and PBS's `job.o4711`.
_LOG = re.compile(
    r"(.*[-_.])?(logs?|metrics|history|std(out|err)|nohup|output)(\.\d+)?|core(\.\d+)?"
    r"|.*\.(log|out|err)[-.]?\d+|.*\.[oe]\d+",
    re.IGNORECASE,
)


def is_usual(name: str) -> bool:
    return _ending(name) in USUAL_ENDINGS


def may_hold_state(name: str) -> bool:
    return not (
        name.startswith(".")
        or _ending(name) in USUAL_ENDINGS | _OTHER_ENDINGS
        or name in POINTER_NAMES
        or is_weights(name)
        or is_log(name)
        or _LOG.fullmatch(name)
        or is_temporary(name)
    )


def _ending(name: str) -> str:
    return "".join(name.rpartition(".")[1:]).lower()


_NAME = "{name}"  # in `complete_when`, the unit's own name


@dataclass(frozen=True, slots=True)
class UserLayout:
    """Rules that say which paths are checkpoints."""

    # globs of paths from the directory. `*` stands for a part of one name, `**` for any directories; neither stands for
    # a name that begins with a dot.
    unit: tuple[str, ...]
    # a regular expression with one group, whose last match in a unit's path is its step; None: the number in its name,
    # as of other checkpoints
    step: str | None = None
    # a file within a unit, or beside it if the name has `{name}`, without which it is not complete; None: nothing says
    # that
    complete_when: str | None = None


def user_units(listing: Listing, rules: UserLayout) -> list[Unit]:
    """Return the paths that a glob matches, each as one unit with all below it, sorted by path."""
    tree = listing.tree()
    globs = [tuple(glob.split("/")) for glob in rules.unit]
    paths: list[str] = []
    todo = [""]
    while todo:
        directory = todo.pop()
        for name, entry in tree[directory].items():
            path = join_path(directory, name)
            if entry.kind in ("file", "directory") and any(_matches(tuple(path.split("/")), glob) for glob in globs):
                paths.append(path)
            elif entry.kind == "directory":
                todo.append(path)
    markers = {marker for path in paths if _NAME in (rules.complete_when or "") and (marker := _marker(path, rules))}
    return [_unit(path, listing, tree, rules) for path in sorted(paths) if path not in markers]


def _unit(path: str, listing: Listing, tree: Mapping[str, Mapping[str, ListedEntry]], rules: UserLayout) -> Unit:
    entries = listing.entries
    is_directory = entries[path].kind == "directory"
    inside = list(files_below(tree, path)) if is_directory else [(path, entries[path])]
    files = sorted(inner for inner, entry in inside if entry.kind == "file")
    missing = None if files else "it has no file yet"
    markers = tuple(files)
    if (marker := _marker(path, rules)) is not None:
        if marker in entries and entries[marker].kind == "file":
            markers = (marker,)
            files = sorted({*files, marker})
        elif not is_directory and _NAME not in (rules.complete_when or ""):
            missing = f"it is a file, and {rules.complete_when} would lie within a directory; use {_NAME} for its name"
        else:
            missing = missing or f"{marker} is not there"
    strange = tuple(sorted(inner for inner, entry in inside if entry.kind != "file"))
    step = _step(path, rules, is_directory)
    is_unfinished = step is not None and not inside  # as of other checkpoints: a killed program left an empty directory
    return Unit(USER_LAYOUT, path, step, tuple(files), strange, missing, markers, is_unfinished)


def _marker(path: str, rules: UserLayout) -> str | None:
    if rules.complete_when is None:
        return None
    home, _, name = path.rpartition("/")
    if _NAME not in rules.complete_when:
        return f"{path}/{rules.complete_when}"
    return join_path(home, rules.complete_when.replace(_NAME, name))


def _step(path: str, rules: UserLayout, is_directory: bool) -> int | None:
    if rules.step is None:
        name = path.rpartition("/")[2]
        return directory_step(name) if is_directory else step_in(name)
    number = None
    for match in re.finditer(rules.step, path):
        if match[1] is not None and re.fullmatch(r"[0-9]{1,18}", match[1]):
            number = int(match[1])
    return number if number is not None and number <= MAX_STEP else None


def _matches(names: tuple[str, ...], glob: tuple[str, ...]) -> bool:
    if not glob:
        return not names
    if glob[0] == "**":
        inner = bool(names) and not names[0].startswith(".") and _matches(names[1:], glob)
        return inner or _matches(names, glob[1:])
    return bool(names) and _is_named(names[0], glob[0]) and _matches(names[1:], glob[1:])


def _is_named(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))


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
_SINGLE_FILE_LAYOUTS = (((".ckpt",), LIGHTNING), ((".keras", ".h5", ".hdf5"), KERAS))
_GroupKey: TypeAlias = tuple[UnitLayout, str]  # and the name of the unit


def is_config(name: str) -> bool:
    return _CONFIG.fullmatch(name) is not None


def _is_of_model(name: str) -> bool:
    return is_config(name) or _OF_MODEL.fullmatch(name) is not None


def file_units(directory: Directory) -> list[Unit]:
    """Return the units among the files of a directory that is no unit itself."""
    has_config = directory.has_file("config.json", "adapter_config.json")
    if directory.path and has_config and directory.matching_files(WEIGHTS_PATTERN):
        return [_model_unit(directory)]
    bundles = {match[1] for match in directory.matching_files(r"(.+)\.data-\d{5,}-of-\d{5,}")}
    groups: dict[_GroupKey, list[str]] = {}
    # RotatE's `checkpoint` is no text.
    large = (name for name in POINTER_NAMES if directory.has_file(name) and directory.names[name].size > MAX_MARKER)
    for name in (*directory.candidates, *large):
        if name.startswith("."):
            continue
        if (match := _BUNDLE.fullmatch(name)) and match[1] in bundles:
            key = TENSORFLOW, match[1]
        elif match := _SHARD_INDEX.fullmatch(name) or SHARD_PATTERN.fullmatch(name):
            layout = SHARDED_LAYOUT if needs_index(directory, match[1], match[2]) else FILE_LAYOUT
            key = layout, f"{match[1]}.{match[2]}"
        elif (match := _RANK_FILE.fullmatch(name)) and match[3]:
            key = COMPOSER, f"{match[1]}-rank*{match[3]}"
        elif is_weights(name) or name in POINTER_NAMES:
            layouts = (layout for endings, layout in _SINGLE_FILE_LAYOUTS if name.endswith(endings))
            key = next(layouts, FILE_LAYOUT), name
        else:
            continue
        groups.setdefault(key, []).append(name)
    _add_companions(directory, groups)
    return [_group_unit(directory, layout, name, sorted(names)) for (layout, name), names in groups.items()]


def _add_companions(directory: Directory, groups: dict[_GroupKey, list[str]]) -> None:
    """Add the files that belong to one of weights by their names.

    These are `model.pt.yml` beside `model.pt`, `epoch_3.json` beside `epoch_3.pt`, and of files of no known kind those
    with the same step, as `DONE_3`, and `meta_001000.json` beside `model_001000.pt`.
    """
    owners: dict[str, _GroupKey] = {}
    stepless: dict[str, _GroupKey] = {}
    steps: dict[int, _GroupKey] = {}
    padded: dict[str, _GroupKey] = {}  # steps of four digits and more, as they are written
    for key, names in groups.items():
        for name in names:
            owners[name] = key
            if (step := step_in(name)) is not None:
                owners.setdefault(without_ending(name), key)
                steps.setdefault(step, key)
                padded |= {digits: key for digits in _NUMBER.findall(name) if len(digits) > 3 and int(digits) == step}
            else:
                stepless.setdefault(name.rpartition(".")[0], key)
    weights = (match[0] for match in directory.matching_files(WEIGHTS_PATTERN))
    if model := next((owners[name] for name in weights if name in owners), None):
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
    """Return the unit of a model's own files: a Trainer saves checkpoints in its subdirectories."""
    kinds = {join_path(directory.path, name): entry.kind for name, entry in sorted(directory.names.items())}
    files = tuple(path for path, kind in kinds.items() if kind == "file")
    strange = tuple(path for path, kind in kinds.items() if kind in ("link", "other"))
    missing = absent_of_count(files) or absent_index(directory)
    return Unit(SHARDED_LAYOUT, directory.path, step_in(directory.name), files, strange, missing, files)


def _group_unit(directory: Directory, layout: UnitLayout, name: str, names: list[str]) -> Unit:
    counted = None if layout is FILE_LAYOUT else absent_of_count(names)  # of these, several names make a unit
    missing = counted or temporary_name_reason(name) or unfinished_reason(directory.names, name)
    if layout is TENSORFLOW:
        temporary = directory.name.endswith("_temp")
        missing = "it lies where TensorFlow gathers a save's shards" if temporary else missing
        missing = missing or absent_name(directory, f"{name}.index")
    elif layout is SHARDED_LAYOUT:
        missing = missing or absent_name(directory, f"{name}.index.json")
    elif layout is COMPOSER:
        ranks = [match for file_name in names if (match := _RANK_FILE.fullmatch(file_name))]
        absent = first_missing_number((int(match[2]) for match in ranks), 0)
        missing = missing if absent is None else f"the file of rank {absent} is not there, and {ranks[0][0]} is"
    files = tuple(join_path(directory.path, file_name) for file_name in names)
    markers = tuple(path for path in files if layout is TENSORFLOW and path.endswith(".index")) or files
    return Unit(layout, join_path(directory.path, name), step_in(name), files, (), missing, markers)


def lone_file_unit(name: str) -> Unit:
    """Return a unit for a file that no layout matches."""
    return Unit(FILE_LAYOUT, name, None, (name,), (), None, (name,))
