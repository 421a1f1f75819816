"""Compare two checkpoints entry by entry: which entries one lacks, and how far the others are apart.

Two checkpoints of `Checkpointer.save` with the same number of ranks are compared rank by rank, so also what each rank
has for itself. Other ones are compared as whole tensors, as an export reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tierd.client.restoring.ranged_reader import PartFiles, PartRanges
from tierd.client.restoring.saved_entries import read_tree
from tierd.client.restoring.tensor_locations import TensorLocator
from tierd.core.ids import CheckpointId, PartId
from tierd.core.manifest import TENSORS
from tierd.exporting.contents import Contents, NonTensorValue, archive_bytes, fixed_place, read_contents
from tierd.exporting.streamed_tensors import ChunkReader, StreamedTensor, TensorPiece
from tierd.exporting.tensor_differences import TensorDistance, compare_tensors, single_thread
from tierd.exporting.watched_contents import is_watched, read_watched
from tierd.reading.run_on_tiers import TierFiles
from tierd.state.state_tree import NAMING
from tierd.state.tree_parser import tree_text

if TYPE_CHECKING:
    from tierd.reading.run_reader import Reader
    from tierd.spool.spool import Spool

_SHOWN = 60  # characters of a value


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """An entry that two checkpoints do not have alike.

    Attributes:
        entry: its name: of a tensor as the checkpoint's file has it, of another value the way to it.
        change: `added`: only the second checkpoint has it; `removed`: only the first one; else `changed`.
        ranks: the ranks of whose parts this is true; empty if whole tensors were compared.
        form: dtype and shape, or the value; of both checkpoints if these differ.
        elements: of a tensor with one dtype and shape, how many elements differ in their bits; else null.
        max_abs: the largest absolute difference; null if it is not finite or there is none.
        relative_norm: the norm of the difference divided by that of the first tensor; null as for `max_abs`.
    """

    entry: str
    change: str
    ranks: tuple[int, ...]
    form: str
    elements: int | None = None
    max_abs: float | None = None
    relative_norm: float | None = None


@dataclass(frozen=True, slots=True)
class CheckpointDifferences:
    """What differs between two checkpoints.

    Attributes:
        first: the first checkpoint: its run, step and attempt.
        second: the second checkpoint.
        differences: one for each entry that differs, by its name.
        equal: the number of entries that are equal.
    """

    first: str
    second: str
    differences: tuple[EntryDifference, ...]
    equal: int


@dataclass(frozen=True, slots=True)
class ComparedCheckpoint:
    """One of the two checkpoints: its files, and rank 0's part."""

    files: PartRanges
    part: PartId

    @classmethod
    def in_spool(cls, spool: Spool, checkpoint: CheckpointId, world: int) -> ComparedCheckpoint:
        """Return a checkpoint that is read from the spool alone; a damaged part is left where it is."""
        files = PartFiles(spool, checkpoint, world, None, "this command changes nothing and asks no daemon")
        return cls(files, files.part(0))

    @classmethod
    def on_tiers(cls, reader: Reader, checkpoint: CheckpointId, world: int) -> ComparedCheckpoint:
        """Return a checkpoint that is read from the tiers of `reader`, which has to stay open."""
        files = TierFiles(reader.tiers, checkpoint, world)
        return cls(files, files.part(0))

    def is_native(self) -> bool:
        """Whether `Checkpointer.save` wrote it."""
        return any(file.path == TENSORS for file in self.files.manifest(self.part).files) and not is_watched(
            self.files, self.part
        )


@dataclass(slots=True)
class _Entries:
    """Of one rank, or of the whole: tensors, and other values, each with what is compared and how it is shown."""

    tensors: dict[str, StreamedTensor] = field(default_factory=dict)
    values: dict[str, Callable[[], Any]] = field(default_factory=dict)


@dataclass(slots=True)
class _Change:
    change: str
    form: str
    ranks: list[int] = field(default_factory=list)
    distance: TensorDistance | None = None


def compare_checkpoints(
    first: ComparedCheckpoint, second: ComparedCheckpoint, on_read: Callable[[int], None]
) -> CheckpointDifferences:
    """Compare two checkpoints. `on_read` is called with the bytes of tensors that were compared after a read.

    Raises `StateMismatch` if an export would not read one of them; and as `PartRanges.fill`.
    """
    by_rank = first.is_native() and second.is_native() and first.part.world == second.part.world
    changes: dict[str, _Change] = {}
    names, compared = set[str](), set[object]()
    readers = ChunkReader(first.files), ChunkReader(second.files)
    for rank in range(first.part.world) if by_rank else (None,):
        before, after = (
            _whole_entries(side) if rank is None else _entries_of_rank(side, rank) for side in (first, second)
        )
        names |= {name for entries in (before, after) for name in (*entries.tensors, *entries.values)}
        with single_thread():
            differences = list(_compare(before, after, readers, compared, on_read))
        for name, change, form, distance in differences:
            entry = changes.setdefault(name, _Change(change, form))
            if rank is not None and rank not in entry.ranks[-1:]:
                entry.ranks.append(rank)
            if distance is not None:
                entry.distance = entry.distance or TensorDistance()
                entry.distance.add(distance)
    by_name = tuple(_difference(name, changes[name]) for name in sorted(changes))
    return CheckpointDifferences(
        str(first.part.checkpoint), str(second.part.checkpoint), by_name, len(names) - len(changes)
    )


def _difference(name: str, change: _Change) -> EntryDifference:
    distance = change.distance
    if distance is None:
        return EntryDifference(name, change.change, tuple(change.ranks), change.form)
    max_abs = distance.max_abs if distance.max_abs == distance.max_abs else None
    norm = None if max_abs is None else distance.relative_norm
    return EntryDifference(name, change.change, tuple(change.ranks), change.form, distance.elements, max_abs, norm)


_Difference = tuple[str, str, str, TensorDistance | None]


def _compare(
    first: _Entries,
    second: _Entries,
    readers: tuple[ChunkReader, ChunkReader],
    compared: set[object],
    on_read: Callable[[int], None],
) -> Iterator[_Difference]:
    """Yield the differences. A tensor that several ranks' trees name in one place is compared once."""
    for name in first.tensors.keys() | second.tensors.keys():
        before, after = first.tensors.get(name), second.tensors.get(name)
        if before is None or after is None:
            yield name, "removed" if after is None else "added", _form(before or after), None
        elif _form(before) != _form(after):
            yield name, "changed", f"{_form(before)} → {_form(after)}", None
        elif (before.order, after.order) not in compared or not before.order:
            compared.add((before.order, after.order))
            if distance := compare_tensors(before, readers[0], after, readers[1], on_read):
                yield name, "changed", _form(before), distance
    for name in first.values.keys() | second.values.keys():
        if name not in second.values or name not in first.values:
            change, values = ("removed", first.values) if name in first.values else ("added", second.values)
            yield name, change, _shown(values[name]()), None
            continue
        old, new = first.values[name](), second.values[name]()
        if not _is_same(old, new):
            yield name, "changed", f"{_shown(old)} → {_shown(new)}", None


def _form(tensor: StreamedTensor | None) -> str:
    assert tensor is not None
    name, shape = tensor.foreign or (str(tensor.dtype).removeprefix("torch."), tensor.shape)
    return f"{name} {list(shape)}"


def _shown(value: object) -> str:
    text = json.dumps(value) if isinstance(value, dict | list | str | int | float | None) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _is_same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, float) and first != first:
        return bool(second != second)
    with suppress(Exception):  # an array's comparison has no single truth; then its bytes decide
        return bool(first == second)
    return archive_bytes(lambda: first) == archive_bytes(lambda: second)


# -- the entries ------------------------------------------------------------------------------------------------------


def _entries_of_rank(side: ComparedCheckpoint, rank: int) -> _Entries:
    """Read the names and places of what one rank's part holds, or says that another rank's holds."""
    part = PartId(side.part.checkpoint, rank, side.part.world)
    locator = TensorLocator(side.files)
    tensors = locator.tensors_of(part)
    entries = _Entries()
    for name in tensors.names:
        located, entry = tensors.locate(name)
        place = located, TENSORS, entry.offset
        shape, start = entry.shape, (0,) * len(entry.shape)
        piece = TensorPiece(partial(fixed_place, place), shape, start, start, shape)
        entries.tensors[name] = StreamedTensor(name, entry.dtype, shape, (piece,), place)
    tree = json.loads(tree_text(read_tree(side.files, part)))
    entries.values = {name: partial(_itself, value) for name, value in _leaves(tree, ())}
    return entries


def _itself(value: Any) -> Any:
    return value


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree that are no tensors, each with its path; of stored ones the form, by their name."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if key in NAMING:
                yield from [(str(inner[0]), inner[1:])] if isinstance(inner, list) else ()
            elif key in ("$dict", "$map"):  # pairs, because keys are not all text
                for name, item in inner:
                    yield from _leaves(item, (*path, str(name)))
            elif key == "$odict":  # a mapping, and its attributes
                for item in inner:
                    yield from _leaves(item, path)
            else:
                yield from _leaves(inner, path if key.startswith("$") else (*path, key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _leaves(inner, (*path, str(number)))
    else:
        yield "/".join(path), value


def _whole_entries(side: ComparedCheckpoint) -> _Entries:
    """Read the contents as an export does. Of values that differ between ranks, those of the first count."""
    read = read_watched if is_watched(side.files, side.part) else partial(read_contents, values=False)
    contents: Contents = read(side.files, side.part, None)
    values: Mapping[str, NonTensorValue] = contents.values
    return _Entries(dict(contents.tensors), {name: value.load for name, value in values.items()})
