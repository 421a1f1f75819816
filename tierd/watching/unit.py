"""One checkpoint of another program, the table of known programs, and the listing in which a checkpoint is found.

A listing is a directory tree as data: names, kinds, sizes and times, and the content of a few small marker files. Each
layout of a program names the source code that was read for it, at the named version or commit.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

if TYPE_CHECKING:
    from tierd.watching.loose_units import UserLayout  # which reads listings


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The layout of a program's checkpoints."""

    program: str
    unit: str
    complete: str
    source: str


TRAINER = UnitLayout(
    "HF Trainer",
    "`checkpoint-N/`",
    "`trainer_state.json` is there (rank 0 writes it last, not atomically; no other program writes it), "
    "`checkpoint-is-incomplete.txt` is not",
    "transformers 5.23, trainer.py `_save_checkpoint`, `_save_rng_state`; trainer_jit_checkpoint.py",
)
ACCELERATE = UnitLayout(
    "Accelerate",
    "a directory with `random_states_R.pkl`",
    "`random_states_R.pkl` of every rank, and as many `custom_checkpoint_N.pkl` as in the checkpoint before it; "
    "there is no marker, and these are written last",
    "accelerate 1.15, checkpointing.py `save_accelerator_state`; custom objects follow in accelerator.py `save_state`",
)
LIGHTNING = UnitLayout(
    "Lightning, Fabric",
    "`*.ckpt`, a file or a directory",
    "the file is whole; of a directory `.metadata` and, written after it, `meta.pt`",
    "lightning 2.6, fabric/utilities/cloud_io.py `_atomic_save` (moved across file systems, it is no rename); "
    "pytorch/strategies/fsdp.py `save_checkpoint`",
)
DCP = UnitLayout(
    "DCP",
    "a directory with `.metadata` (Composer's sharded ones as well)",
    "`.metadata` was renamed into place; without collectives, `__R.metadata` of every rank",
    "torch 2.13, distributed/checkpoint/filesystem.py `finish`",
)
TORCHTITAN = UnitLayout(
    "torchtitan",
    "`step-N/`",
    "`.metadata` or `model.safetensors.index.json`",
    "torchtitan b5bcd76, components/checkpointer/dcp.py `_find_load_step`",
)
TORCH_CHECKPOINTING = UnitLayout(
    "torch_checkpointing",
    "a directory with `metadata.pkl` and `<item>_<rank>.pt`; of one rank, of `<item>_0.pt` alone",
    "it was renamed from its temporary name, after a barrier",
    "torch_checkpointing 0.1, checkpoint_writer.py `_temp_dir_path`, `write`; metadata_serialization.py",
)
DEEPSPEED = UnitLayout(
    "DeepSpeed",
    "`global_stepN/`",
    "`latest` beside it names it or a later one, and no rank's file is left out; rank 0 writes `latest` before the "
    "last barrier, so it proves rank 0 only",
    "DeepSpeed edaa722, runtime/engine.py `save_checkpoint`, `_get_rank_zero_ckpt_name`, `_get_ckpt_name`",
)
MEGATRON = UnitLayout(
    "Megatron-LM",
    "`iter_NNNNNNN/`",
    "`latest_checkpointed_iteration.txt` beside it names it or a later one; `.metadata` and `metadata.json`, or "
    "`model_optim_rng.pt` of every model-parallel rank",
    "Megatron-LM d98e8a6, training/checkpointing.py `save_checkpoint`, `get_checkpoint_name`; "
    "core/dist_checkpointing/serialization.py `save`",
)
NEMO = UnitLayout(
    "NeMo",
    "a directory with `weights/` and `context/`",
    "`<name>-unfinished` is not beside it, and `weights/.metadata` is there",
    "NeMo d73511f, lightning/pytorch/callbacks/model_checkpoint.py `UNFINISHED_CHECKPOINT_SUFFIX`",
)
ORBAX = UnitLayout(
    "Orbax",
    "a directory with `_CHECKPOINT_METADATA` or an item with `manifest.ocdbt`",
    "its name has no `.orbax-checkpoint-tmp`, and `_CHECKPOINT_METADATA` names when it was committed",
    "orbax 3ff7b24, _src/path/atomicity.py `finalize`, atomicity_types.py `TMP_DIR_SUFFIX`",
)
TENSORFLOW = UnitLayout(
    "TensorFlow",
    "`<prefix>.index` and `<prefix>.data-R-of-N`",
    "the index, which is renamed into place last, and all N shards",
    "tensorflow/core/util/tensor_bundle/tensor_bundle.cc `BundleWriter::Finish`, `MergeBundles`",
)
SAVED_MODEL = UnitLayout(
    "TensorFlow SavedModel",
    "a directory with `saved_model.pb`",
    "`saved_model.pb` is there, which is written last",
    "tensorflow/python/saved_model/save.py `save_and_return_nodes`",
)
KERAS = UnitLayout(
    "Keras",
    "`*.keras`, `*.h5`",
    "the file is whole and closed; it is written in place",
    "keras 3.15, src/saving/saving_lib.py `_save_model_to_fileobj`",
)
SHARDED_LAYOUT = UnitLayout(
    "HF model",
    "a directory with `config.json` and weights; `*.index.json` and its shards",
    "every shard that the index names; there is no marker",
    "transformers 5.23, modeling_utils.py `save_pretrained`",
)
HUB = UnitLayout(
    "Hugging Face Hub",
    "a snapshot in the Hub's cache, `models--ORG--NAME/snapshots/COMMIT/`",
    "each of its links leads to a file; a file is renamed into place before its link is made",
    "huggingface_hub 1.0, file_download.py `_get_pointer_path`, `_create_symlink`",
)
COMPOSER = UnitLayout(
    "Composer",
    "`*-rankR.pt`, one file a rank",
    "every rank's file, in place of `latest-rankR.pt` links",
    "composer 6405188, callbacks/checkpoint_saver.py `CheckpointSaver`; utils/checkpoint.py `torch.save`",
)
FILE_LAYOUT = UnitLayout(
    "torch.save, safetensors",
    "`*.pt`, `*.pth`, `*.bin`, `*.pkl`, `*.npz`, `*.safetensors` and other endings of weights; all of one step in one "
    "directory; without a step, all of one directory",
    "each file is whole; it is written in place",
    "torch 2.13, serialization.py `save`; safetensors 0.5 `serialize_file`",
)
DIRECTORY_LAYOUT = UnitLayout(
    "directory",
    "a directory of no program above, with weights below it and a step in its name, or without checkpoints of several "
    "steps in it",
    "each file with a known format is whole, and no file is missing that all others of its series have",
    "-",
)
USER_LAYOUT = UnitLayout(
    "own layout",
    "a path that a `--unit` or `[[watch]] unit` matches",
    "the file of `complete_when` is there, if that is given, and each file with a known format is whole",
    "-",
)
LAYOUTS = (
    *(TRAINER, ACCELERATE, LIGHTNING, DCP, TORCHTITAN, TORCH_CHECKPOINTING, DEEPSPEED, MEGATRON, NEMO),
    *(ORBAX, KERAS, TENSORFLOW, SAVED_MODEL, HUB, COMPOSER, SHARDED_LAYOUT, FILE_LAYOUT, DIRECTORY_LAYOUT),
)


EntryKind: TypeAlias = Literal["file", "directory", "link", "other"]
MARKERS = ("latest", "latest_checkpointed_iteration.txt")  # their text names the complete unit
MAX_MARKER = 4096  # bytes of a marker's text


class ListedEntry(NamedTuple):
    """One entry of a directory. If two entries of a file are equal, no writer changed it in between."""

    kind: EntryKind
    size: int = 0
    mtime_ns: int = 0  # when its content last changed, in ns, by the file system's clock
    inode: tuple[int, int] = (0, 0)  # device and inode, so that a replaced file is distinguishable


@dataclass(frozen=True, slots=True)
class Listing:
    """All names below a directory, and the texts of the markers among them."""

    entries: Mapping[str, ListedEntry]  # by path from the directory
    texts: Mapping[str, str] = field(default_factory=dict)
    user_layout: UserLayout | None = None  # a person's own rules about which paths are checkpoints

    def tree(self) -> dict[str, dict[str, ListedEntry]]:
        tree: dict[str, dict[str, ListedEntry]] = {"": {}}
        for path, entry in self.entries.items():
            directory, _, name = path.rpartition("/")
            tree.setdefault(directory, {})[name] = entry
            if entry.kind == "directory":
                tree.setdefault(path, {})
        return tree


def join_path(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name


def files_below(tree: Mapping[str, Mapping[str, ListedEntry]], directory: str) -> Iterator[tuple[str, ListedEntry]]:
    """Yield all paths below a directory that are no directories, in order."""
    for name, entry in sorted(tree.get(directory, {}).items()):
        path = join_path(directory, name)
        if entry.kind == "directory":
            yield from files_below(tree, path)
        else:
            yield path, entry


def first_missing_number(numbers: Iterable[int], first: int | None = None) -> int | None:
    """Return the smallest missing number between `first`, by default the smallest, and the largest; None if none is."""
    distinct = set(numbers)
    begin = min(distinct, default=0) if first is None else first
    return next((number for number in range(begin, max(distinct, default=0)) if number not in distinct), None)


_BY_MODE: dict[int, EntryKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
_KINDS = {kind: ListedEntry(kind) for kind in get_args(EntryKind)}
DescribeEntry: TypeAlias = Callable[[os.DirEntry[str], int], ListedEntry]
"""Describes an entry of the open directory of this descriptor. It raises `OSError`."""


def entry_by_status(name: str | os.DirEntry[str], directory: int) -> ListedEntry:
    entry_name = name if isinstance(name, str) else name.name
    return entry_of(os.stat(entry_name, dir_fd=directory, follow_symlinks=False))


def entry_by_kind(entry: os.DirEntry[str], directory: int) -> ListedEntry:
    """Describe an entry of an open directory by its kind alone, which most file systems give with the name."""
    if entry.is_file(follow_symlinks=False):
        return _KINDS["file"]
    if entry.is_dir(follow_symlinks=False):
        return _KINDS["directory"]
    return _KINDS["link" if entry.is_symlink() else "other"]


def entry_of(stat_result: os.stat_result) -> ListedEntry:
    mode = _BY_MODE.get(stat.S_IFMT(stat_result.st_mode), "other")
    return ListedEntry(mode, stat_result.st_size, stat_result.st_mtime_ns, (stat_result.st_dev, stat_result.st_ino))


def printable_name(name: str) -> str:
    """Return a name as valid UTF-8, with other bytes escaped."""
    return os.fsencode(name).decode(errors="backslashreplace")


WITHOUT_STEP = "*"  # in the place of a name, the path of all that has no step in one directory


@dataclass(frozen=True, slots=True)
class Unit:
    """One checkpoint of a program, as found in a listing."""

    layout: UnitLayout
    # the directory or file, from the listing's directory; for several files, the prefix of their names, or the first of
    # them; for all files and directories without a step that lie in one directory, `<directory>/*`
    path: str
    step: int | None
    files: tuple[str, ...]  # its regular files, as sorted paths from the listing's directory
    special_files: tuple[str, ...]  # its links and special files, in the same form
    missing_reason: str | None  # the reason why it is not complete; None if the listing shows it complete
    # the files that its program writes last, also outside of its directory. If there is no such file, all of its files.
    markers: tuple[str, ...]
    # whether the program itself left the proof that it began the save and did not finish it
    is_unfinished: bool = False

    @property
    def is_joint(self) -> bool:
        """Whether it is all that has no step in one directory, which is not of one save."""
        return self.path.rpartition("/")[2] == WITHOUT_STEP

    @property
    def is_directory(self) -> bool:
        return not self.files or any(file.startswith(f"{self.path}/") for file in (*self.files, *self.special_files))
