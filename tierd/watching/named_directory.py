"""List and read a directory that a user named, for `tierd inspect` and `import`: its links are followed to files, and
what a unit holds in two forms is found.

Invariant: nothing is read outside of a link's limit. A link leads nowhere out of the repository of the Hugging Face Hub
in whose cache it lies; any other link, nowhere out of the directory that the user named. A link's text is resolved
without the file system. Then its target is opened one component at a time without following links, so a link that is
planted meanwhile leads nowhere.

A cache of the Hub (huggingface_hub 1.2, `file_download.py` `_get_pointer_path`, `_create_symlink`) has each file of a
snapshot as a link: `models--org--name/snapshots/COMMIT/model.safetensors -> ../../blobs/DIGEST`. Two forms are
`model-100.safetensors` and `model-100.bin`, or `step_100/` and `step_100.pt`. Both are taken if both are sound. If one
is not, the unit without it is one of its own, so that nothing hides the other.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename, dirname, join, normpath, relpath

from tierd.core.errors import CheckpointNotFound, ConfigError
from tierd.watching.directory_tree import DIRECTORY_FLAGS, DirectoryTree, opened_below
from tierd.watching.missing_files import SHARD_PATTERN
from tierd.watching.step_in_name import is_weights
from tierd.watching.unit import (
    DIRECTORY_LAYOUT,
    HUB,
    SHARDED_LAYOUT,
    ListedEntry,
    Listing,
    Unit,
    entry_by_status,
    join_path,
)
from tierd.watching.unit_detection import units
from tierd.watching.unit_inspection import UnitStatus

_REPOSITORY = re.compile(r"(?P<repository>.*/(?:models|datasets|spaces)--[^/]+)/(?P<inside>[^/]+)(?:/|$)")


def hub_repository(path: str) -> str | None:
    """Return the directory of a Hub repository's cache if this absolute path lies in its `snapshots` or `refs`."""
    match = _REPOSITORY.match(path)
    return match["repository"] if match and match["inside"] in ("snapshots", "refs") else None


def is_hub_bookkeeping(path: str) -> bool:
    """Whether an absolute path is one of a Hub repository's cache by which only its snapshots are kept.

    `blobs` has their files without names, and `.no_exist` an empty file for each that the repository lacks.
    """
    match = _REPOSITORY.match(path)
    return match is not None and match["inside"] != "snapshots"


def link_limit(path: str, root: str) -> str:
    """Return the directory that a link must not lead out of. Both paths are absolute."""
    return hub_repository(path) or root


def is_within(path: str, directory: str) -> bool:
    return path.startswith(f"{directory.rstrip('/')}/")


_MOST_LINKS = 8  # from a name to its file
_REVISION = re.compile(r"[0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A checkpoint, or a directory of checkpoints, that a user named."""

    given_path: Path
    directory: Path  # the real path of the directory that holds it
    name: str | None  # its name there; None for the root of the file system

    @property
    def path(self) -> Path:
        return self.directory / (self.name or "")

    def tree(self) -> FollowingTree:
        return FollowingTree(self.directory, self.path, self.given_path)

    def whole_tree(self) -> FollowingTree:
        return FollowingTree(self.path, self.path, self.given_path)


def resolve_named_path(path: Path) -> NamedPath:
    """Resolve a path that a user named. It may be a link itself; of the Hub's cache, also the name of a revision.

    Raises:
        CheckpointNotFound: nothing is there, or the named revision has no snapshot.
        ConfigError: it is neither a file nor a directory, or cannot be read.
    """
    try:
        path.stat()  # names a loop of links, of which `resolve` raises a RuntimeError
        real = _snapshot(path.resolve())
        if not (real.is_file() or real.is_dir()):
            raise ConfigError(f"{path}: neither a file nor a directory")
        link_path = path.parent.resolve() / path.name
    except FileNotFoundError:
        raise CheckpointNotFound(f"{path}: no such file or directory") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if (home := hub_repository(str(link_path))) and real.is_file() and is_within(str(real), home):
        real = link_path  # its name says the format, and the others of its checkpoint lie beside it
    return NamedPath(path, real.parent if real.name else real, real.name or None)


def _snapshot(real: Path) -> Path:
    """Return the snapshot that a file of a Hub cache's `refs` names; any other path as it is."""
    home = hub_repository(str(real))
    if home is None or not is_within(str(real), f"{home}/refs") or not real.is_file():
        return real
    with real.open("rb") as file:
        commit = file.read(64).decode("ascii", "replace").strip()
    snapshot = Path(home, "snapshots", commit)
    if not _REVISION.fullmatch(commit) or not snapshot.is_dir():
        raise CheckpointNotFound(f"{real}: it names the snapshot {commit[:64]!a}, which {home}/snapshots does not have")
    return snapshot


class FollowingTree(DirectoryTree):
    """A directory that is listed with its links to files as those files.

    A link beside a checkpoint that leads to one of its files stays a link: it only points to what is listed anyway. A
    directory that may not be read is noted in `unfollowed`, too.

    Args:
        given_path: this path as the user gave it, because absolute links may be written with it.
    """

    def __init__(self, directory: Path, named_path: Path, given_path: Path) -> None:
        super().__init__(directory)
        self._passes_over = True
        self._real_path = str(directory)
        self._named_path = str(named_path if named_path.is_dir() else directory)
        self._given_path = str(given_path.absolute() if named_path.is_dir() else given_path.absolute().parent)
        # May lie above the directory, or be the directory in it that was named.
        top = link_limit(self._named_path, self._named_path)
        self._top = top if f"{self._real_path}/".startswith(f"{top.rstrip('/')}/") else self._real_path
        self._targets: dict[str, str] = {}  # of the followed links, as paths below `_top`
        self._weight_links: set[str] = set()  # links that are not followed, and whose names are those of weights
        try:
            self._top_descriptor = os.open(self._top, DIRECTORY_FLAGS)
            with opened_below(self._top_descriptor, relpath(self._real_path, self._top), DIRECTORY_FLAGS) as descriptor:
                os.dup2(descriptor, self._root, inheritable=False)
        except OSError:
            super().__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        os.close(self._top_descriptor)
        super().__exit__()

    def listing(self, name: str | None = None) -> Listing:
        return self._follow_links(super().listing(name))

    def list_top_files(self) -> Listing:
        return self._follow_links(super().list_top_files())

    def unclaimed_links(self, units: Iterable[Unit]) -> dict[str, tuple[UnitStatus, str]]:
        """Return the last listing's links that are no unit's and would be weights, and what directories may not be
        read.
        """
        inside = {path for unit in units for path in unit.special_files}
        return {path: why for path, why in self.unfollowed.items() if path in self._weight_links - inside}

    def is_followed(self, path: str) -> bool:
        return path in self._targets

    def _placed(self, path: str) -> tuple[int, str]:
        return (self._top_descriptor, self._targets[path]) if path in self._targets else super()._placed(path)

    def _follow_links(self, listing: Listing) -> Listing:
        self.unfollowed, self._targets, self._weight_links = {}, {}, set()
        entries = dict(listing.entries)
        if not is_hub_bookkeeping(self._named_path):
            entries = {
                path: entry for path, entry in entries.items() if not is_hub_bookkeeping(f"{self._real_path}/{path}")
            }
        listed_units = units(listing := Listing(entries, listing.texts))
        inside = {path for unit in listed_units for path in unit.special_files}
        members = {f"{self._real_path}/{path}" for unit in listed_units for path in unit.files}
        followed = dict(entries)
        for path in self.unreadable:
            self.unfollowed[path] = "unreadable", "a directory that may not be listed"
            self._weight_links.add(path)
        for path in [path for path, entry in entries.items() if entry.kind == "link"]:
            try:
                leads_to, entry = self._resolve(path)
            except _UnfollowedLink as error:
                self.unfollowed[path] = error.status, str(error)
                is_content = error.leads_out or hub_repository(f"{self._real_path}/{path}") is not None
                if is_content and is_weights(basename(path)):
                    self._weight_links.add(path)
                continue
            if path in inside or leads_to not in members:
                self._targets[path] = relpath(leads_to, self._top)
                followed[path] = entry
        return Listing(followed, listing.texts)

    def _resolve(self, path: str) -> tuple[str, ListedEntry]:
        at = f"{self._real_path}/{path}"
        within = link_limit(at, self._named_path)
        for _ in range(_MOST_LINKS):
            entry, text = self._entry_at(at)
            if entry.kind == "file":
                return at, entry
            if entry.kind != "link":
                kind = "directory" if entry.kind == "directory" else "special file"
                raise _UnfollowedLink("unknown", f"a link to the {kind} {at}: only links to files are followed")
            if is_within(text, self._given_path):
                text = self._named_path + text[len(self._given_path) :]
            at = normpath(join(dirname(at), text))
            if not is_within(at, within):
                raise _UnfollowedLink("unknown", f"a link to {at}, outside of {within}: {_OUTSIDE_ADVICE}", True)
        raise _UnfollowedLink("unknown", f"a link that leads over more than {_MOST_LINKS} others")

    def _entry_at(self, at: str) -> tuple[ListedEntry, str]:
        try:
            with opened_below(self._top_descriptor, relpath(dirname(at), self._top), DIRECTORY_FLAGS) as descriptor:
                entry = entry_by_status(basename(at), descriptor)
                return entry, os.readlink(basename(at), dir_fd=descriptor) if entry.kind == "link" else ""
        except FileNotFoundError:
            raise _UnfollowedLink("incomplete", f"a link to {at}, which is not there") from None
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                why = "not followed, because a directory on its path is a link, or none"
                raise _UnfollowedLink("unknown", f"a link to {at}: {why}") from None
            raise _UnfollowedLink("unreadable", f"a link to {at}: {error.strerror}") from None


_OUTSIDE_ADVICE = "it is not followed; put a copy in its place, or name a directory that holds both"


class _UnfollowedLink(Exception):
    """A link is not followed, for this reason."""

    def __init__(self, status: UnitStatus, why: str, leads_out: bool = False) -> None:
        super().__init__(why)
        self.status, self.leads_out = status, leads_out


# Forms of a whole model. A Paddle model's `.pdparams` and `.pdopt`, for example, are two parts of one.
_FORM = re.compile(r"(.+?)((?:\.weights)?\.(?:safetensors|bin|pt|pth|ckpt|h5|hdf5|keras|msgpack|onnx|gguf|nemo))")
_UNMARKED = (DIRECTORY_LAYOUT, SHARDED_LAYOUT, HUB)
_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")


def units_without_twins(unit: Unit, listing: Listing) -> Iterator[tuple[tuple[str, ...], Unit]]:
    """Yield the unit without each of its twins, and the paths that are left out then.

    Twins lie beside each other, or at the top of a directory whose program left no mark of its own.
    """
    inside = (*unit.files, *unit.special_files)
    homes = [dirname(unit.path), *([unit.path] if unit.is_directory and unit.layout in _UNMARKED else [])]
    for home in homes:
        start = f"{home}/" if home else ""
        names = {path[len(start) :].partition("/")[0] for path in inside if path.startswith(start)}
        # The unit's own may be a directory without a file.
        entries = sorted({join_path(home, name) for name in names} | ({unit.path} & listing.entries.keys()))
        forms: dict[str, dict[str, list[str]]] = {}
        for entry in entries:
            stem, form = _split_form(entry, listing)
            forms.setdefault(stem, {}).setdefault(form, []).append(entry)
        for twins in forms.values():
            for form, paths in twins.items() if len(twins.keys() - {""}) > 1 else ():
                if form:
                    # `model.pt.yml` belongs to `model.pt`.
                    companions = tuple(f"{path}." for path in paths if form != "/")
                    left_out = tuple(entry for entry in entries if entry in paths or entry.startswith(companions))
                    yield from ((left_out, reduced) for reduced in _reduced_units(left_out, inside, listing))


def _split_form(entry: str, listing: Listing) -> tuple[str, str]:
    """Return an entry's path without its ending, and the ending; an empty one if it has none of a form."""
    if listing.entries[entry].kind == "directory":
        return entry, "/"
    if match := SHARD_PATTERN.fullmatch(entry) or _INDEX.fullmatch(entry):
        stem, form = match[1], f".{match[2]}"
    elif match := _FORM.fullmatch(entry):
        stem, form = match[1], match[2]
    else:
        return entry, ""
    home, _, name = stem.rpartition("/")
    return join_path(home, "model") if name == "pytorch_model" else stem, form  # transformers writes either of the two


def _reduced_units(left_out: tuple[str, ...], inside: tuple[str, ...], listing: Listing) -> list[Unit]:
    remaining = listing_without(left_out, listing)
    expected = {path for path in inside if path in remaining.entries}
    return [unit for unit in units(remaining) if {*unit.files, *unit.special_files} == expected]


def listing_without(left_out: tuple[str, ...], listing: Listing) -> Listing:
    below = tuple(f"{entry}/" for entry in left_out)
    entries = {
        path: entry for path, entry in listing.entries.items() if path not in left_out and not path.startswith(below)
    }
    return Listing(entries, listing.texts)
