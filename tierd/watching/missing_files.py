"""The checks of a listed directory by which a checkpoint of another program counts as incomplete.

Each check returns the reason as a text for people, or None if it finds nothing missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from tierd.watching.step_in_name import is_weights, step_in
from tierd.watching.unit import ListedEntry, Listing, files_below, first_missing_number, join_path

WEIGHTS_PATTERN = r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)"
# The endings of all names that a pattern of a layout can match. Other files count only by their exact names, so that
# very many unrelated files beside a checkpoint cost next to nothing.
_ENDINGS = (".index.json", ".index", ".metadata")
SHARD_PATTERN = re.compile(r"(.+)-\d{5,}-of-\d{5,}\.(safetensors|bin)")


@dataclass(frozen=True)
class Directory:
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

    def matching_files(self, pattern: str) -> list[re.Match[str]]:
        fullmatch = re.compile(pattern).fullmatch
        return [match for name in self.candidates if (match := fullmatch(name))]

    @cached_property
    def candidates(self) -> list[str]:
        """The names, in order, of the regular files that a pattern of a layout can match."""
        return sorted(
            name
            for name, entry in self.names.items()
            if (name.endswith(_ENDINGS) or ".data-" in name or is_weights(name)) and entry.kind == "file"
        )

    @cached_property
    def directories(self) -> list[str]:
        return [name for name, entry in self.names.items() if entry.kind == "directory"]

    def has_file(self, *names: str) -> bool:
        """Whether any of these names is a regular file in this directory."""
        return any(name in self.names and self.names[name].kind == "file" for name in names)

    def directory_at(self, path: str) -> Directory:
        return Directory(path, self.tree[path], self.listing, self.tree)

    def child(self, name: str) -> Directory | None:
        path = join_path(self.path, name)
        return self.directory_at(path) if path in self.tree else None

    def names_below(self) -> Iterator[str]:
        return (path.rpartition("/")[2] for path, _ in files_below(self.tree, self.path))


def has_only_temporary_files(directory: Directory) -> bool:
    """Whether a directory has nothing but temporary files, or not even those.

    A program that was killed at the first file of its save left it, and resumes from it by its name alone. safetensors
    writes to `.tmp*` and renames.
    """
    return all(entry.kind == "file" and name.startswith(".") for name, entry in directory.names.items())


def absent_name(directory: Directory, *names: str) -> str | None:
    return next((f"{name} is not there" for name in names if not directory.has_file(name)), None)


def absent_index(directory: Directory) -> str | None:
    shards = {(match[1], match[2]) for match in directory.matching_files(SHARD_PATTERN.pattern)}
    index_names = sorted(
        f"{stem}.{ending}.index.json" for stem, ending in shards if needs_index(directory, stem, ending)
    )
    return absent_name(directory, *index_names)


def needs_index(directory: Directory, stem: str, ending: str) -> bool:
    """Return whether an index belongs to shards: it is there, or `save_pretrained` names its shards so.

    Others write one shard for each rank, mostly from 0 on, and no index.
    """
    return directory.has_file(f"{stem}.{ending}.index.json") or _is_of_model(directory, stem)


def _is_of_model(directory: Directory, stem: str) -> bool:
    from_zero = any(
        name.startswith(f"{stem}-") and re.match(r"0+-of-", name[len(stem) + 1 :]) for name in directory.names
    )
    return not from_zero and re.fullmatch(r"(.*[-_])?model([._].+)?", stem) is not None


def absent_rank(directory: Directory, pattern: str, first: int | None = None) -> str | None:
    """Return a message about a rank whose file is missing; None if no file is.

    `first` is the lowest rank that must exist. It is None if a marker already proves that this rank saved, because a
    node's own disk holds only the files of its own ranks.
    """
    matches = directory.matching_files(pattern)
    missing = first_missing_number((int(match[1]) for match in matches), first)
    return None if missing is None else f"the file of rank {missing} is not there, and {matches[0][0]} is"


def absent_combination(matches: Sequence[re.Match[str]]) -> str | None:
    """Return a message about a missing combination among names with several numbers; None if there is none."""
    combinations = {tuple(int(number) for number in match.groups() if number is not None) for match in matches}
    axes = [range(min(numbers), max(numbers) + 1) for numbers in zip(*combinations, strict=False)]
    missing = _first_missing(combinations, axes, ()) if matches else None
    if missing is None:
        return None
    return f"the file of rank {' '.join(map(str, missing))} is not there, and {matches[0][0]} is"


def _first_missing(
    combinations: Set[tuple[int, ...]], axes: Sequence[range], head: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the first combination that is not in `combinations`, visiting at most one more than that has."""
    if not axes:
        return None if head in combinations else head
    inner = (_first_missing(combinations, axes[1:], (*head, number)) for number in axes[0])
    return next((missing for missing in inner if missing is not None), None)


def tracker_mismatch(directory: Directory, tracker: str) -> str | None:
    """Check that the tracker file next to a directory names this directory or one that was written later."""
    path = join_path(directory.parent, tracker)
    text, entry = directory.listing.texts.get(path), directory.listing.entries.get(path)
    if text is None or entry is None:  # it may have been deleted since its text was read
        return f"{tracker} is not there"
    name = text.strip()
    step, tracked_step = step_in(directory.name), step_in(name)
    if name == directory.name or (
        step is not None and (name == "release" or (tracked_step is not None and tracked_step >= step))
    ):
        return None
    if step is None or tracked_step is None:
        newest = max((entry.mtime_ns for _, entry in files_below(directory.tree, directory.path)), default=0)
        if newest <= entry.mtime_ns:
            return None
    return f"{tracker} names {name[:100]!a}"


_TEMPORARY = re.compile(
    r"\.?te?mp[-_.](?P<after>.+)"
    r"|\.?(?P<before>.+?)(?:[-_.](?:tmp|incomplete)|\.(?:temp|part|partial|writing)|\.tmp[-_.]\w+)",
    re.IGNORECASE,
)


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def final_name(name: str) -> str:
    """Return the name that a file or directory with a temporary name would get; another name as it is."""
    match = _TEMPORARY.fullmatch(name)
    return match["after"] or match["before"] if match else name


def temporary_name_reason(name: str) -> str | None:
    return "its name is a temporary one, which its program had yet to change" if is_temporary(name) else None


def leftover_temporary_file(files: Sequence[str]) -> str | None:
    """Return a message about a file that was not renamed from its temporary name; None if there is none.

    A temporary file beside the one whose name it would get is left from an earlier save.
    """
    existing = set(files)
    for path in files:
        directory, _, name = path.rpartition("/")
        if is_temporary(name) and join_path(directory, final_name(name)) not in existing:
            return f"{name} has a temporary name, which its program had yet to change"
    return None


def unfinished_reason(siblings: Mapping[str, ListedEntry], name: str) -> str | None:
    """Check for NeMo's marker next to one of its own or Lightning's checkpoints."""
    marker = unfinished_marker(name)
    return f"{marker} is there" if marker in siblings else None


def unfinished_marker(name: str) -> str:
    for ending in (".nemo", ".ckpt", "-EMA"):
        name = name.removesuffix(ending)
    return f"{name}-unfinished"


_OF_COUNT = re.compile(r"(?<!\d)(\d+)-of-(\d+)")


def absent_of_count(files: Sequence[str]) -> str | None:
    """Check that all eight files exist if a name says "3 of 8"."""
    groups: dict[tuple[str, int, str], set[int]] = {}
    for path in files:
        if match := _OF_COUNT.search(path):
            head, tail = path[: match.start()], path[match.end() :]
            groups.setdefault((head, int(match[2]), tail), set()).add(int(match[1]))
    for (head, count, tail), numbers in sorted(groups.items()):
        if len(numbers) < count:
            return f"{head.rpartition('/')[2]}*-of-*{tail}: {len(numbers)} of {count} are there"
    return None


_RANK = re.compile(r"(?<![A-Za-z])(?:global_|local_)?rank[-_=.]?(\d{1,6})(?!\d)", re.IGNORECASE)
_WORLD_SIZE = re.compile(r"(?<![A-Za-z])world_?size[-_=.]?(\d{1,6})(?!\d)", re.IGNORECASE)


def absent_in_ranks(files: Sequence[str]) -> str | None:
    """Check that no rank is missing between rank 0 and the highest whose file is there, or of those a name counts.

    Names without a rank 0 prove nothing: the number may be that of LoRA's rank, or a node has its own ranks alone.
    Neither do ranks at even distances, because a program may have one rank of each node save.
    """
    groups: dict[tuple[str, str], dict[int, str]] = {}
    for path in files:
        for match in _RANK.finditer(path):
            groups.setdefault((path[: match.start(1)], path[match.end(1) :]), {})[int(match[1])] = path
    for (head, tail), names in sorted(groups.items()):
        counted = _WORLD_SIZE.search(f"{head}#{tail}")
        if 0 not in names or (not counted and _is_evenly_spaced(sorted(names))):
            continue
        count = int(counted[1]) if counted else max(names) + 1
        absent = next((rank for rank in range(min(count, len(names) + 1)) if rank not in names), None)
        if absent is not None:
            return f"the file of rank {absent} is not there, and {names[max(names)]} is"
    return None


def _is_evenly_spaced(ranks: Sequence[int]) -> bool:
    distances = {second - first for first, second in pairwise(ranks)}
    return len(distances) == 1 and (min(distances) > 3 or (min(distances) > 1 and len(ranks) > 2))
