"""The position of a rank's local shard of a distributed tensor in the whole tensor, as plain data.

A device mesh is a grid of ranks. Each dimension of the mesh has one placement. It splits one dimension of the tensor
among the ranks along the mesh dimension, or gives all of them the same elements. Placements apply from the first mesh
dimension to the last, each to the result of those before. These are the rules of PyTorch's DTensor
(`torch.distributed.tensor.placement_types`):

    shard d             dimension d is cut into pieces of ceil(size / n) elements, where n is the number of ranks along
                        the mesh dimension; the last pieces are shorter, or empty
    strided_shard d s   dimension d is cut into s pieces in this manner, and each of these into n; a rank has one piece
                        of each of the s, joined. FSDP over tensor parallelism uses it: the inner mesh dimension is cut
                        first
    replicate           all ranks along the mesh dimension have the same elements

Invariant: this module needs no process group, so that any process can compute the elements that any rank has saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

REPLICATE, SHARD, STRIDED = "replicate", "shard", "strided_shard"
MAX_MESH_DIMS = 32
MAX_SPLIT = 1 << 16  # pieces that one strided placement may cut a dimension into
MAX_BOXES = 1 << 10  # the most blocks of one shard; a real shard has one, or a few

Run = tuple[int, int]  # the first element and the end (exclusive), along one dimension of the whole tensor
Rule = tuple[str | int, ...]  # a placement: its name, the tensor's dimension, the split factor

_NUMBERS = {REPLICATE: 0, SHARD: 1, STRIDED: 2}
_MEMBERS = ("shape", "stride", "mesh", "names", "placements", "coordinate")


@dataclass(frozen=True, slots=True)
class Box:
    """A block of elements: its offset in the `local` shard, its `offset` in the whole tensor, and its `size`."""

    local: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The position of one rank's shard. `runs` and `boxes` raise `ValueError` for a shard of too many blocks.

    Attributes:
        shape, stride: the shape and strides of the whole tensor, in elements.
        names: the names of the mesh dimensions; None for a mesh without names.
        coordinate: this rank's coordinate in the mesh; None for a rank outside the mesh, which has no elements.

    Raises:
        ValueError: the members describe no shard; the message names the defect.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    rules: tuple[Rule, ...]
    coordinate: tuple[int, ...] | None

    def __post_init__(self) -> None:
        _check_numbers("shape", self.shape)
        _check_numbers("stride", self.stride)
        _check_numbers("mesh", self.mesh, minimum=1)
        dims = len(self.mesh)
        if dims > MAX_MESH_DIMS or len(self.stride) != len(self.shape):
            raise ValueError(
                f"a mesh of {dims} dimensions, a shape of {len(self.shape)} and {len(self.stride)} strides"
            )
        if self.names is not None and (len(self.names) != dims or not all(type(name) is str for name in self.names)):
            raise ValueError(f"names of a mesh of {dims} dimensions: {str(self.names)[:100]}")
        for name in self.names or ():
            name.encode()  # `UnicodeEncodeError` is a `ValueError`
        if len(self.rules) != dims:
            raise ValueError(f"{len(self.rules)} placements on a mesh of {dims} dimensions")
        for rule in self.rules:
            _check_rule(rule, len(self.shape))
        if self.coordinate is not None:
            _check_numbers("coordinate", self.coordinate)
            if len(self.coordinate) != dims or any(at >= n for at, n in zip(self.coordinate, self.mesh, strict=True)):
                raise ValueError(f"coordinate {self.coordinate} in a mesh of {self.mesh}")

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The local shard's shape: 0 in a dimension of which this rank has no elements; (0,) outside the mesh."""
        if self.coordinate is None:
            return (0,)
        shape = list(self.shape)
        for rule, count, at in zip(self.rules, self.mesh, self.coordinate, strict=True):
            if rule[0] != REPLICATE:
                dim = int(rule[1])
                shape[dim] = _length(shape[dim], int(rule[2]) if rule[0] == STRIDED else 1, count, at)
        return tuple(shape)

    def runs(self) -> list[list[Run]]:
        """For each dimension of the tensor, the ranges of elements that the shard has, in the shard's order."""
        runs: list[list[Run]] = [[(0, size)] if size else [] for size in self.shape]
        if self.coordinate is None:
            return [[] for _ in self.shape]
        for rule, count, at in zip(self.rules, self.mesh, self.coordinate, strict=True):
            if rule[0] != REPLICATE:
                dim = int(rule[1])
                runs[dim] = _piece(runs[dim], int(rule[2]) if rule[0] == STRIDED else 1, count, at)
        return runs

    def boxes(self) -> list[Box]:
        """The shard as blocks that are contiguous in both it and the whole tensor, dimension by dimension."""
        if self.coordinate is None:
            return []
        runs = self.runs()
        count = 1
        for dim_runs in runs:
            count *= len(dim_runs)
            if count > MAX_BOXES:
                raise ValueError(f"a shard of more than {MAX_BOXES} blocks")
        sides: list[list[tuple[int, int, int]]] = []
        for dim_runs in runs:
            begins = itertools.accumulate((end - begin for begin, end in dim_runs), initial=0)
            sides.append([(local, begin, end - begin) for local, (begin, end) in zip(begins, dim_runs, strict=False)])
        boxes = []
        for sides_of_one in itertools.product(*sides):
            local, offset, size = zip(*sides_of_one, strict=True) if sides_of_one else ((), (), ())
            boxes.append(Box(tuple(local), tuple(offset), tuple(size)))
        return boxes

    @property
    def place(self) -> tuple[int | None, ...]:
        """The coordinate along the mesh dimensions that split the tensor, and None along others. Ranks with equal
        `place` have the same elements."""
        if self.coordinate is None:
            return ()
        return tuple(None if rule[0] == REPLICATE else at for rule, at in zip(self.rules, self.coordinate, strict=True))

    def as_plain(self) -> dict[str, object]:
        """Plain JSON, as FORMAT.md describes it."""
        return {
            "shape": list(self.shape),
            "stride": list(self.stride),
            "mesh": list(self.mesh),
            "names": None if self.names is None else list(self.names),
            "placements": [list(rule) for rule in self.rules],
            "coordinate": None if self.coordinate is None else list(self.coordinate),
        }

    def __str__(self) -> str:
        """The text for errors: the whole tensor's shape, the placements, the mesh and this rank's coordinate."""
        names = self.names or [""] * len(self.mesh)
        dims = ", ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, self.mesh, strict=True))
        rules = ", ".join(" ".join(map(str, rule)) for rule in self.rules)
        return f"{self.shape} placed ({rules}) on a mesh of ({dims}) at {self.coordinate}"


def parse_placement(payload: object) -> Placement:
    """Parse the result of `as_plain`. Raises `ValueError` for anything else."""
    if type(payload) is not dict or payload.keys() != set(_MEMBERS):
        raise ValueError(f"a placement has the members {', '.join(_MEMBERS)}")
    shape, stride, mesh, names, rules, coordinate = (payload[name] for name in _MEMBERS)
    if type(rules) is not list or not all(type(rule) is list for rule in rules):
        raise ValueError("placements are lists")
    for name, value in (("shape", shape), ("stride", stride), ("mesh", mesh)):
        if type(value) is not list:
            raise ValueError(f"{name} is a list")
    for name, value in (("names", names), ("coordinate", coordinate)):
        if value is not None and type(value) is not list:
            raise ValueError(f"{name} is a list or null")
    return Placement(
        tuple(shape),
        tuple(stride),
        tuple(mesh),
        None if names is None else tuple(names),
        tuple(map(tuple, rules)),
        None if coordinate is None else tuple(coordinate),
    )


def _check_numbers(name: str, numbers: Sequence[object], minimum: int = 0) -> None:
    if not all(type(number) is int and minimum <= number < 1 << 63 for number in numbers):
        raise ValueError(f"{name} {str(tuple(numbers))[:100]}: integers of 63 bits, {minimum} at least")


def _check_rule(rule: Rule, dims: int) -> None:
    name, *numbers = rule or ("",)
    if type(name) is not str or _NUMBERS.get(name) != len(numbers):
        raise ValueError(f"the placement {str(rule)[:100]}, none of {', '.join(_NUMBERS)}")
    _check_numbers(name, numbers)
    if numbers and int(numbers[0]) >= dims:
        raise ValueError(f"the placement {rule} of a tensor of {dims} dimensions")
    if len(numbers) > 1 and not 1 <= int(numbers[1]) <= MAX_SPLIT:
        raise ValueError(f"the placement {rule}: a split factor from 1 to {MAX_SPLIT}")


def _length(size: int, split: int, count: int, at: int) -> int:
    """The number of elements in the result of `_piece`, in constant time, because a reader needs it for every shard."""
    if not size:
        return 0
    outer = -(-size // split)
    full, remainder = divmod(size, outer)

    def part(length: int) -> int:
        inner = -(-length // count)
        return min((at + 1) * inner, length) - min(at * inner, length)

    return full * part(outer) + part(remainder)


def _piece(runs: list[Run], split: int, count: int, at: int) -> list[Run]:
    """The elements of `runs` for the rank at `at` of `count`, after the elements were first cut into `split` pieces."""
    if split * len(runs) > MAX_BOXES:
        raise ValueError(f"a shard of more than {MAX_BOXES} blocks")
    size = sum(end - begin for begin, end in runs)
    pieces: list[Run] = []
    outer = -(-size // split)
    for number in range(min(split, size)):
        first, last = min(number * outer, size), min((number + 1) * outer, size)
        inner = -(-(last - first) // count)
        pieces += _cut(runs, min(first + at * inner, last), min(first + (at + 1) * inner, last))
    return _joined(pieces)


def _cut(runs: list[Run], first: int, last: int) -> list[Run]:
    """The elements `first` to `last` (exclusive) of the concatenated runs."""
    pieces: list[Run] = []
    before = 0
    for begin, end in runs:
        low, high = max(first - before, 0), min(last - before, end - begin)
        if low < high:
            pieces.append((begin + low, begin + high))
        before += end - begin
    return pieces


def _joined(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
