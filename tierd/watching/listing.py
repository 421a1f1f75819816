"""A directory tree as data: names, kinds, sizes and times, and the content of a few small marker files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from tierd.watching.own_layout import OwnLayout  # which reads listings

Kind: TypeAlias = Literal["file", "directory", "link", "other"]
MARKERS = ("latest", "latest_checkpointed_iteration.txt")  # their text names the complete unit
MAX_MARKER = 4096  # bytes of a marker's text


class ListedEntry(NamedTuple):
    """One entry of a directory. If two entries of a file are equal, no writer changed it in between.

    Attributes:
        size: bytes.
        mtime_ns: when its content last changed, in ns, by the file system's clock.
        inode: device and inode, so that a replaced file is distinguishable.
    """

    kind: Kind
    size: int = 0
    mtime_ns: int = 0
    inode: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Listing:
    """All names below a directory, and the texts of the markers among them.

    Attributes:
        entries: by path from the directory, with components separated by "/".
        texts: the markers' texts, by path.
        own: a person's own rules about which of its paths are checkpoints; None: the rules of `layouts`.
    """

    entries: Mapping[str, ListedEntry]
    texts: Mapping[str, str] = field(default_factory=dict)
    own: OwnLayout | None = None

    def tree(self) -> dict[str, dict[str, ListedEntry]]:
        """Return each directory's own entries by its path; the listing's directory is ""."""
        tree: dict[str, dict[str, ListedEntry]] = {"": {}}
        for path, entry in self.entries.items():
            directory, _, name = path.rpartition("/")
            tree.setdefault(directory, {})[name] = entry
            if entry.kind == "directory":
                tree.setdefault(path, {})
        return tree


def joined(directory: str, name: str) -> str:
    """Join a path below the listing's directory."""
    return f"{directory}/{name}" if directory else name


def below(tree: Mapping[str, Mapping[str, ListedEntry]], directory: str) -> Iterator[tuple[str, ListedEntry]]:
    """Yield all paths below a directory that are no directories, in order."""
    for name, entry in sorted(tree.get(directory, {}).items()):
        path = joined(directory, name)
        if entry.kind == "directory":
            yield from below(tree, path)
        else:
            yield path, entry


def gap(numbers: Iterable[int], first: int | None = None) -> int | None:
    """Return the smallest missing number between `first` and the largest number; None if none is missing.

    `first` defaults to the smallest number.
    """
    distinct = set(numbers)
    begin = min(distinct, default=0) if first is None else first
    return next((number for number in range(begin, max(distinct, default=0)) if number not in distinct), None)
