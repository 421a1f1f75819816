"""Find the units in a listing, for the programs in `programs`, and decide whether each is complete.

Pure: units are a function of a listing. A listing cannot show whether a file is whole (see `inspect`). It cannot show
whether ranks are missing at the end if no file records their number. Nor can it show whether a writer is still at work:
a watcher compares successive listings for that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from tierd.watching.listing import ListedEntry, Listing, below, gap, joined
from tierd.watching.programs import (
    ACCELERATE,
    COMPOSER,
    DCP,
    DEEPSPEED,
    FILE,
    KERAS,
    LIGHTNING,
    MEGATRON,
    NEMO,
    ORBAX,
    SHARDED,
    TENSORFLOW,
    TORCH_CHECKPOINTING,
    TORCHTITAN,
    TRAINER,
    UnitLayout,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """One checkpoint of a program, as found in a listing.

    Attributes:
        layout: the layout of its program.
        path: the directory or file, from the listing's directory; for several files, the prefix of their names, or the
            first of them.
        step: the step in its name; None if the name has none.
        files: its regular files, as sorted paths from the listing's directory.
        strange: its links and special files, in the same form.
        missing: the reason why it is not complete; None if the listing shows it complete.
        markers: the files that its program writes last, also outside of its directory. If there is no such file, all of
            its files.
    """

    layout: UnitLayout
    path: str
    step: int | None
    files: tuple[str, ...]
    strange: tuple[str, ...]
    missing: str | None
    markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory that may be a unit."""

    path: str
    names: Mapping[str, ListedEntry]
    listing: Listing
    tree: Mapping[str, Mapping[str, ListedEntry]]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> str:
        return self.path.rpartition("/")[0]

    def files(self, pattern: str) -> list[re.Match[str]]:
        """Match the names of the regular files in this directory against the whole pattern."""
        compiled = re.compile(pattern)
        matches = (compiled.fullmatch(name) for name, entry in self.names.items() if entry.kind == "file")
        return [match for match in matches if match]

    def has(self, *names: str) -> bool:
        """Return whether any of these names is a regular file in this directory."""
        return any(name in self.names and self.names[name].kind == "file" for name in names)

    def child(self, name: str) -> _Directory | None:
        path = joined(self.path, name)
        return _Directory(path, self.tree[path], self.listing, self.tree) if path in self.tree else None


_Found = tuple[UnitLayout, str | None]


def units(listing: Listing) -> list[Unit]:
    """Return the units in a listing, sorted by path."""
    tree = listing.tree()
    found: list[Unit] = []
    pending = [""]
    while pending:
        path = pending.pop()
        here = _Directory(path, tree[path], listing, tree)
        claimed = _claim(here) if path else None
        if claimed is not None:
            found.append(_whole(here, *claimed))
            continue
        found += _groups(here)
        pending += [joined(path, name) for name, entry in here.names.items() if entry.kind == "directory"]
    return sorted(found, key=lambda unit: unit.path)


def _whole(here: _Directory, layout: UnitLayout, missing: str | None) -> Unit:
    inside = list(below(here.tree, here.path))
    files = tuple(path for path, entry in inside if entry.kind == "file")
    strange = tuple(path for path, entry in inside if entry.kind != "file")
    missing = missing or _nested(here) or _counted(files) or _unfinished(here.tree[here.parent], here.name)
    return Unit(layout, here.path, _step(here.name), files, strange, missing, _markers(here, layout, files))


_MARKERS: dict[UnitLayout, str] = {
    TRAINER: r"trainer_state\.json",
    ACCELERATE: r"random_states_\d+\.pkl",
    LIGHTNING: r"meta\.pt",
    DCP: r"(__\d+)?\.metadata",
    TORCHTITAN: r"\.metadata|model\.safetensors\.index\.json",
    TORCH_CHECKPOINTING: r"metadata\.pkl",
    MEGATRON: r"metadata\.json",
    NEMO: r"weights/\.metadata",
    ORBAX: r"_CHECKPOINT_METADATA",
}
_BESIDE = {DEEPSPEED: "latest", MEGATRON: "latest_checkpointed_iteration.txt"}


def _markers(here: _Directory, layout: UnitLayout, files: tuple[str, ...]) -> tuple[str, ...]:
    pattern = re.compile(_MARKERS.get(layout, r"(?!)"))
    found = [path for path in files if pattern.fullmatch(path[len(here.path) + 1 :])]
    beside = joined(here.parent, _BESIDE.get(layout, ""))
    return (*found, *([beside] if beside in here.listing.entries and layout in _BESIDE else [])) or files


def _claim(here: _Directory) -> _Found | None:
    return next((found for claim in _CLAIMS if (found := claim(here)) is not None), None)


def _nested(here: _Directory) -> str | None:
    """Return the reason why a directory within a unit is not complete; None if all are.

    DeepSpeed's and DCP's directories are nested in those of HF Trainer and Accelerate.
    """
    for name, entry in sorted(here.names.items()):
        inner = here.child(name) if entry.kind == "directory" else None
        if inner is not None:
            claimed = _claim(inner)
            missing = (claimed and claimed[1]) or _nested(inner)
            if missing:
                return f"{name}: {missing}"
    return None


# -- directories ------------------------------------------------------------------------------------------------------


def _orbax_temporary(here: _Directory) -> _Found | None:
    return (ORBAX, "its name says that it is being written") if ".orbax-checkpoint-tmp" in here.name else None


def _trainer(here: _Directory) -> _Found | None:
    known = here.has(*_OF_TRAINER) or here.files(_WEIGHTS) or here.files(r"rng_state(_\d+)?\.pth") or _is_begun(here)
    if not (re.fullmatch(r"checkpoint-\d+", here.name) and known):
        return None
    if here.has("checkpoint-is-incomplete.txt"):
        return TRAINER, "checkpoint-is-incomplete.txt is there"
    if not here.has("trainer_state.json"):
        return TRAINER, "trainer_state.json is not there, which is written last"
    return TRAINER, _ranks(here, r"rng_state_(\d+)\.pth") or _indexed(here)


_OF_TRAINER = (
    *("trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("config.json", "adapter_config.json"),
)
_WEIGHTS = r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)"


def _accelerate(here: _Directory) -> _Found | None:
    if here.files(r"random_states_\d+\.pkl"):
        return ACCELERATE, _ranks(here, r"random_states_(\d+)\.pkl", 0) or _indexed(here) or _registered(here)
    begun = here.has("optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt") or here.files(_WEIGHTS)
    if re.fullmatch(r"checkpoint_\d+", here.name) and (begun or _is_begun(here)):
        return ACCELERATE, "random_states_0.pkl is not there, which is written last"
    return None


def _registered(here: _Directory) -> str | None:
    """Return a reason if Accelerate's checkpoint lacks registered objects, which are written after the generators.

    Only the checkpoint before it says how many there are.
    """
    number = re.fullmatch(r"checkpoint_(\d{1,18})", here.name)
    names = here.tree.get(joined(here.parent, f"checkpoint_{int(number[1]) - 1}")) if number else None
    objects = r"custom_checkpoint_\d+\.pkl"
    before = [name for name in names or () if re.fullmatch(objects, name)]
    there = len(here.files(objects))
    return f"{there} of {len(before)} custom_checkpoint_N.pkl, which are written last" if there < len(before) else None


def _deepspeed(here: _Directory) -> _Found | None:
    optimizers = here.files(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
    sharded = here.files(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
    models = here.files(r"mp_rank_(\d+)_model_states\.pt")
    layers = here.files(r"layer_(\d+)-model_(\d+)-model_states\.pt")
    if not (optimizers or sharded or models or layers):
        return None
    for found in (optimizers, sharded, models):
        if missing := _grid(found):
            return DEEPSPEED, missing
    return DEEPSPEED, _tracked(here, "latest")


def _megatron(here: _Directory) -> _Found | None:
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
    missing = _grid(ranks) if ranks else _named(here, ".metadata", "metadata.json")
    return MEGATRON, missing or _tracked(here, "latest_checkpointed_iteration.txt")


def _nemo(here: _Directory) -> _Found | None:
    weights = here.child("weights")
    if unfinished := _unfinished(here.tree[here.parent], here.name):
        return NEMO, unfinished
    if weights is None or here.child("context") is None:
        return None
    return NEMO, _named(weights, ".metadata")


def _orbax(here: _Directory) -> _Found | None:
    items = [here, *(inner for name in here.names if (inner := here.child(name)) is not None)]
    if here.has("_CHECKPOINT_METADATA", "commit_success.txt"):
        return ORBAX, None
    return (ORBAX, None) if any(one.has("manifest.ocdbt", "_METADATA") for one in items) else None


def _lightning(here: _Directory) -> _Found | None:
    sharded = here.has(".metadata") or bool(here.files(_DISTCP))
    if not ((here.has("meta.pt") and sharded) or (here.name.endswith(".ckpt") and (sharded or _is_begun(here)))):
        return None
    return LIGHTNING, _named(here, ".metadata", "meta.pt")


_DISTCP = r"__\d+_\d+\.distcp"


def _dcp(here: _Directory) -> _Found | None:
    apart = here.files(r"__(\d+)\.metadata")
    titan = re.fullmatch(r"step-\d+", here.name)
    if not (here.has(".metadata", ".metadata.tmp") or apart or here.files(_DISTCP)):
        if titan and here.has("model.safetensors.index.json"):
            return TORCHTITAN, None
        return None
    missing = _ranks(here, r"__(\d+)\.metadata", 0) if apart else _named(here, ".metadata")
    return TORCHTITAN if titan else DCP, missing


def _torch_checkpointing(here: _Directory) -> _Found | None:
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

_CLAIMS: tuple[Callable[[_Directory], _Found | None], ...] = (
    *(_orbax_temporary, _trainer, _accelerate, _deepspeed, _megatron, _lightning, _nemo, _orbax, _dcp),
    _torch_checkpointing,
)


def _is_begun(here: _Directory) -> bool:
    """Whether a directory has nothing but temporary files, or not even those.

    A program that was killed at the first file of its save left it, and resumes from it by its name alone. safetensors
    writes to `.tmp*` and renames.
    """
    return all(entry.kind == "file" and name.startswith(".") for name, entry in here.names.items())


def _named(here: _Directory, *names: str) -> str | None:
    return next((f"{name} is not there" for name in names if not here.has(name)), None)


def _indexed(here: _Directory) -> str | None:
    """Return the missing index of a sharded model, if any."""
    return _named(here, *sorted({f"{match[1]}.{match[2]}.index.json" for match in here.files(_SHARD.pattern)}))


def _ranks(here: _Directory, pattern: str, first: int | None = None) -> str | None:
    """Return a message about a rank whose file is missing; None if no file is.

    `first` is the lowest rank that must exist. It is None if a marker already proves that this rank saved, because a
    node's own disk holds only the files of its own ranks.
    """
    found = here.files(pattern)
    missing = gap((int(match[1]) for match in found), first)
    return None if missing is None else f"the file of rank {missing} is not there, and {found[0][0]} is"


def _grid(found: Sequence[re.Match[str]]) -> str | None:
    """Find the missing combination among names with several numbers, and return a message; None if there is none."""
    seen = {tuple(int(one) for one in match.groups() if one is not None) for match in found}
    axes = [range(min(one), max(one) + 1) for one in zip(*seen, strict=False)]
    missing = _first_missing(seen, axes, ()) if found else None
    if missing is None:
        return None
    return f"the file of rank {' '.join(map(str, missing))} is not there, and {found[0][0]} is"


def _first_missing(seen: Set[tuple[int, ...]], axes: Sequence[range], head: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the first combination that is not in `seen`.

    The search visits at most one combination more than `seen` has, however large the numbers in names are.
    """
    if not axes:
        return None if head in seen else head
    inner = (_first_missing(seen, axes[1:], (*head, one)) for one in axes[0])
    return next((missing for missing in inner if missing is not None), None)


def _tracked(here: _Directory, tracker: str) -> str | None:
    """Check that the tracker file next to a directory names this directory or one that was written later."""
    path = joined(here.parent, tracker)
    text = here.listing.texts.get(path)
    if text is None:
        return f"{tracker} is not there"
    name = text.strip()
    own, named = _step(here.name), _step(name)
    if name == here.name or (own is not None and (name == "release" or (named is not None and named >= own))):
        return None
    if own is None or named is None:
        newest = max((entry.mtime_ns for _, entry in below(here.tree, here.path)), default=0)
        if newest <= here.listing.entries[path].mtime_ns:
            return None
    return f"{tracker} names {name[:100]!a}"


def _unfinished(siblings: Mapping[str, ListedEntry], name: str) -> str | None:
    """Check for NeMo's marker next to one of its own or Lightning's checkpoints."""
    for ending in (".nemo", ".ckpt", "-EMA"):
        name = name.removesuffix(ending)
    marker = f"{name}-unfinished"
    return f"{marker} is there" if marker in siblings else None


_OF = re.compile(r"(?<!\d)(\d+)-of-(\d+)")


def _counted(files: Sequence[str]) -> str | None:
    """Check that all eight files exist if a name says "3 of 8"."""
    groups: dict[tuple[str, int, str], set[int]] = {}
    for path in files:
        if match := _OF.search(path):
            head, tail = path[: match.start()], path[match.end() :]
            groups.setdefault((head, int(match[2]), tail), set()).add(int(match[1]))
    for (head, count, tail), numbers in sorted(groups.items()):
        if len(numbers) < count:
            return f"{head.rpartition('/')[2]}*-of-*{tail}: {len(numbers)} of {count} are there"
    return None


_ENDING = re.compile(r"(\.weights)?\.(h5|hdf5|keras|ckpt|pt|pth|bin|pkl|npz|safetensors)$|-rank\*\.\w+$")
_STEP = (r"step[=_-]?(\d+)", r"ba(\d+)", r"iter_(\d+)")
_LAST = re.compile(r"(?:[-_=]|(?<!\d)\.|^)(\d+)$")
_DATE = re.compile(r"(?<!\d)(?:19|20)\d\d(?:-\d\d-\d\d|_\d\d_\d\d|(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01]))(?!\d)")


def _step(name: str) -> int | None:
    """Return the step in a name: the number after the word, or at the name's end. A date or a fraction is none."""
    name = _ENDING.sub("", name)
    for pattern in _STEP:
        if match := re.search(pattern, name):
            return int(match[1]) if len(match[1]) < 19 else None
    match = _LAST.search(_DATE.sub("", name).rstrip("-_."))
    return int(match[1]) if match and len(match[1]) < 19 else None


# -- files ------------------------------------------------------------------------------------------------------------

_BUNDLE = re.compile(r"(.+)\.(?:index|data-\d{5,}-of-\d{5,})")
_INDEXED = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")
_SHARD = re.compile(r"(.+)-\d{5,}-of-\d{5,}\.(safetensors|bin)")
_RANKED = re.compile(r"(.+)-rank(\d+)(\.pt|\.tar)?")
_SINGLE = (
    ((".ckpt",), LIGHTNING),
    ((".keras", ".h5", ".hdf5"), KERAS),
    ((".pt", ".pth", ".bin", ".pkl", ".npz", ".safetensors"), FILE),
)


def _groups(here: _Directory) -> list[Unit]:
    """Return the units among the files of a directory that is no unit itself."""
    if here.path and here.has("config.json", "adapter_config.json") and here.files(_WEIGHTS):
        return [_model(here)]
    bundles = {match[1] for match in here.files(r"(.+)\.data-\d{5,}-of-\d{5,}")}
    groups: dict[tuple[UnitLayout, str], list[str]] = {}
    for name, entry in sorted(here.names.items()):
        if entry.kind != "file":
            continue
        if (match := _BUNDLE.fullmatch(name)) and match[1] in bundles:
            key = TENSORFLOW, match[1]
        elif match := _INDEXED.fullmatch(name) or _SHARD.fullmatch(name):
            key = SHARDED, f"{match[1]}.{match[2]}"
        elif (match := _RANKED.fullmatch(name)) and match[3]:
            key = COMPOSER, f"{match[1]}-rank*{match[3]}"
        elif layout := next((layout for endings, layout in _SINGLE if name.endswith(endings)), None):
            key = layout, name
        else:
            continue
        groups.setdefault(key, []).append(name)
    return [_group(here, layout, name, names) for (layout, name), names in _joined_by_step(groups).items()]


def _joined_by_step(groups: Mapping[tuple[UnitLayout, str], list[str]]) -> dict[tuple[UnitLayout, str], list[str]]:
    """Join the files of one step that a program writes side by side, such as `model_10.pt` and `opt_10.pt`."""
    found: dict[tuple[UnitLayout, str], list[str]] = {}
    first: dict[int, str] = {}  # by step, the name of its first file
    for (layout, name), names in groups.items():
        step = _step(name) if layout is FILE else None
        key = name if step is None else first.setdefault(step, name)
        found.setdefault((layout, key), []).extend(names)
    return found


def _model(here: _Directory) -> Unit:
    """Return the unit of a model's directory.

    It has only the directory's own files, because a Trainer saves checkpoints in subdirectories.
    """
    files = tuple(joined(here.path, name) for name, entry in sorted(here.names.items()) if entry.kind == "file")
    strange = tuple(
        joined(here.path, name) for name, entry in sorted(here.names.items()) if entry.kind in ("link", "other")
    )
    missing = _counted(files) or _indexed(here)
    return Unit(SHARDED, here.path, _step(here.name), files, strange, missing, files)


def _group(here: _Directory, layout: UnitLayout, name: str, names: list[str]) -> Unit:
    missing = _counted(names) or _unfinished(here.names, name)
    if layout is TENSORFLOW:
        temporary = here.name.endswith("_temp")
        missing = "it lies where TensorFlow gathers a save's shards" if temporary else missing
        missing = missing or _named(here, f"{name}.index")
    elif layout is SHARDED:
        missing = missing or _named(here, f"{name}.index.json")
    elif layout is COMPOSER:
        ranks = [match for one in names if (match := _RANKED.fullmatch(one))]
        absent = gap((int(match[2]) for match in ranks), 0)
        missing = missing if absent is None else f"the file of rank {absent} is not there, and {ranks[0][0]} is"
    files = tuple(joined(here.path, one) for one in names)
    markers = tuple(one for one in files if layout is TENSORFLOW and one.endswith(".index")) or files
    return Unit(layout, joined(here.path, name), _step(name), files, (), missing, markers)


def lone_file(name: str) -> Unit:
    """Return a unit for a file that no layout matches."""
    return Unit(FILE, name, None, (name,), (), None, (name,))
