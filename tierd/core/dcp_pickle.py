"""An interpreter of pickles as plain data: only the opcodes that Python's pickler emits for DCP's metadata, and only
the names that the metadata may contain.

Invariant: nothing is imported, called, hashed or compared, whatever the pickle contains. A class becomes a
`PickledGlobal`, an instance a `PickledInstance`, and a dict a flat list, because a real dict would hash keys that the
pickle made up. So time and memory are linear in the pickle's length: each byte makes at most one object, and every
third byte a container.

The result may refer to itself, so a small result may be endless for code that follows every reference. The caller has
to limit how far it follows references. `dcp` makes DCP's objects from the result. `formats` reads from it the file and
the byte range of each entry.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tierd.core.errors import ManifestError, StateRefused

DICT = "dict"  # the kind of a class whose instances, if made without arguments, are dicts: OrderedDict
_SPARE = 100_000  # containers that even a short pickle may make
_DENSE = 3  # bytes per container; DCP's densest metadata, of one-dimensional chunks, has more than four
_MARKS = 100  # the most marks that are open at once; DCP's metadata has six
_LEVELS = 32  # the most levels of tuples in tuples; DCP's metadata has two, a planner's own data may have more
_MAX_SHOWN_CHARS = 100  # the most characters of a name in a message

# Opcodes that the loop itself interprets, because most opcodes of DCP's metadata are these.
_MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _SHORT_TEXT, _STOP = 0x94, 0x68, 0x6A, 0x4B, 0x8C, 0x2E


@dataclass(frozen=True, slots=True)
class PickledGlobal:
    """A class, or another global, that a pickle may name. Only the caller interprets `kind` and `name`."""

    kind: str
    name: str


class PickledDict(list[Any]):
    """A dict as a flat list of alternating keys and values in the pickle's order, none of them inspected."""

    __slots__ = ()


class PickledInstance:
    """An instance of a `PickledGlobal` as the pickle describes it: made from `arguments`, then given a `state`."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: PickledGlobal, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


def interpret(data: bytes, names: Mapping[tuple[str, str], PickledGlobal]) -> Any:
    """Interpret a whole pickle of protocol 2 to 5, which may name only the globals in `names`, by module and qualified
    name.

    The result is a None, bool, int, float, str, bytes, list, tuple, `PickledDict`, `PickledGlobal` or
    `PickledInstance`.

    Raises:
        StateRefused: the pickle names another global, would change an object that it only names, or makes too many or
    too
            deeply nested containers. This is no proof of corruption, because a pickle of other classes may do so.
        ManifestError: the data is no pickle, or none that Python's pickler makes of plain objects.
    """
    machine = _Machine(data, names)
    try:
        return machine.run()
    except (IndexError, ValueError, struct.error) as error:
        raise ManifestError(f"byte {machine.at}: it is damaged or cut off before there: {error}") from None


def _shorten(text: str) -> str:
    return ascii(text[:_MAX_SHOWN_CHARS])[1:-1]


class _Machine:
    """The pickle's stack machine. `at` is the offset of the next opcode."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], PickledGlobal]) -> None:
        self.at = 0
        self._data, self._names = data, names
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks below each open mark, which an opcode must not reach
        self._memo: list[Any] = []
        self._levels: dict[int, int] = {}  # of tuples in a tuple, by its id; ids are unique, as every object is kept
        self._remaining = _SPARE + len(data) // _DENSE

    def run(self) -> Any:
        data, memo, stack = self._data, self._memo, self._stack
        while True:
            code = data[self.at]
            self.at = at = self.at + 1
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _BINGET:
                stack.append(memo[data[at]])
                self.at = at + 1
            elif code == _BININT1:
                stack.append(data[at])
                self.at = at + 1
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                self.at = at + 4
            elif code == _SHORT_TEXT:
                self.at = end = at + 1 + data[at]
                stack.append(str(data[at + 1 : end], "utf-8", "surrogatepass"))
            elif code == _STOP:
                return self._end()
            elif act := _ACTS.get(code):
                act(self)
                stack = self._stack
            else:
                raise ManifestError(f"byte {at - 1}: opcode {code:#04x}, which no pickle of DCP's metadata has")

    def _end(self) -> Any:
        if self._below or len(self._stack) != 1 or self.at != len(self._data):
            raise ManifestError(f"byte {self.at - 1}: it ends there, with something left over")
        return self._stack[0]

    # -- arguments --------------------------------------------------------------------------------------------------

    def _take(self, size: int) -> bytes:
        """The next `size` bytes. A size larger than the rest of the pickle allocates no memory."""
        data = self._data[self.at : self.at + size]
        if len(data) != size:
            raise ManifestError(f"byte {self.at}: it names {size} bytes, and has {len(data)} left")
        self.at += size
        return data

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        start, self.at = self.at, self._data.index(b"\n", self.at) + 1
        return str(self._data[start : self.at - 1], "utf-8")

    # -- leaves -----------------------------------------------------------------------------------------------------

    def _protocol(self) -> None:
        if self.at != 1 or not 2 <= self._number(1) <= 5:
            raise ManifestError("it is no pickle of protocol 2 to 5")

    def _frame(self) -> None:
        if self._number(8) > len(self._data) - self.at:
            raise ManifestError(f"byte {self.at}: a frame is longer than what is left")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _text(self, width: int) -> None:
        self._push(str(self._take(self._number(width)), "utf-8", "surrogatepass"))

    def _bytes(self, width: int) -> None:
        self._push(self._take(self._number(width)))

    def _signed(self, size: int) -> None:
        self._push(int.from_bytes(self._take(size), "little", signed=True))

    def _float(self) -> None:
        self._push(struct.unpack(">d", self._take(8))[0])

    def _memoize(self, width: int) -> None:
        """Store into the memo, only at its next index, as every pickler does. Python's unpickler would allocate all
        indices up to the given one."""
        if self._number(width) != len(self._memo):
            raise ManifestError(f"byte {self.at}: it fills a place of its memo out of turn")
        self._memo.append(self._stack[-1])

    # -- containers -------------------------------------------------------------------------------------------------

    def _hold(self, container: Any) -> None:
        self._remaining -= 1
        if self._remaining < 0:
            raise StateRefused(f"it makes more than a container for every {_DENSE} bytes")
        self._stack.append(container)

    def _tuple(self, items: list[Any]) -> None:
        """Make a tuple. Only the depth of tuples is limited here, because tuples nest with the fewest bytes."""
        built = tuple(items)
        inner = [self._levels.get(id(element), 0) for element in items if type(element) is tuple]
        if inner:
            level = self._levels[id(built)] = max(inner) + 1
            if level > _LEVELS:
                raise StateRefused(f"its tuples are nested deeper than {_LEVELS} levels")
        self._hold(built)

    def _mark(self) -> None:
        if len(self._below) == _MARKS:
            raise StateRefused(f"it is nested deeper than {_MARKS} levels")
        self._below.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) != count:
            raise ManifestError(f"byte {self.at - 1}: its stack holds {len(items)} of {count} items")
        del self._stack[-count:]
        return items

    def _append(self, items: list[Any], kind: type[list[Any]]) -> None:
        target = self._stack[-1]
        if type(target) is not kind or (kind is PickledDict and len(items) % 2):
            raise ManifestError(f"byte {self.at - 1}: it puts {len(items)} items into a {type(target).__name__}")
        target.extend(items)

    # -- globals and instances --------------------------------------------------------------------------------------

    def _name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ManifestError(f"byte {self.at - 1}: a name is no text")
        global_name = self._names.get((module, name))
        if global_name is None:
            raise StateRefused(f"it names {_shorten(module)}.{_shorten(name)}, which DCP's own metadata does not hold")
        self._push(global_name)

    def _make(self) -> None:
        of, arguments = self._pop(2)
        if type(of) is not PickledGlobal or type(arguments) is not tuple:
            raise ManifestError(f"byte {self.at - 1}: it makes an instance of a {type(of).__name__}")
        self._hold(PickledDict() if of.kind == DICT and not arguments else PickledInstance(of, arguments))

    def _build(self) -> None:
        """Give an instance its state. Only an instance that this pickle made can get one, and only once."""
        [state] = self._pop(1)
        target = self._stack[-1]
        if type(target) is not PickledInstance or target.state is not None:
            target_name = target.name if type(target) is PickledGlobal else f"a {type(target).__name__}"
            raise StateRefused(f"it would change {target_name}, which DCP's own metadata does not do")
        target.state = state


_Act = Callable[[_Machine], None]
_ACTS: dict[int, _Act] = {
    0x80: _Machine._protocol,
    0x95: _Machine._frame,
    ord("N"): lambda machine: machine._push(None),
    0x88: lambda machine: machine._push(True),
    0x89: lambda machine: machine._push(False),
    ord("J"): lambda machine: machine._signed(4),
    ord("M"): lambda machine: machine._push(machine._number(2)),
    0x8A: lambda machine: machine._signed(machine._number(1)),
    ord("G"): _Machine._float,
    ord("X"): lambda machine: machine._text(4),
    ord("C"): lambda machine: machine._bytes(1),
    ord("B"): lambda machine: machine._bytes(4),
    ord("q"): lambda machine: machine._memoize(1),
    ord("r"): lambda machine: machine._memoize(4),
    ord("("): _Machine._mark,
    ord(")"): lambda machine: machine._push(()),
    ord("]"): lambda machine: machine._hold([]),
    ord("}"): lambda machine: machine._hold(PickledDict()),
    ord("t"): lambda machine: machine._tuple(machine._marked()),
    0x85: lambda machine: machine._tuple(machine._pop(1)),
    0x86: lambda machine: machine._tuple(machine._pop(2)),
    0x87: lambda machine: machine._tuple(machine._pop(3)),
    ord("a"): lambda machine: machine._append(machine._pop(1), list),
    ord("e"): lambda machine: machine._append(machine._marked(), list),
    ord("s"): lambda machine: machine._append(machine._pop(2), PickledDict),
    ord("u"): lambda machine: machine._append(machine._marked(), PickledDict),
    ord("c"): lambda machine: machine._name(machine._line(), machine._line()),
    0x93: lambda machine: machine._name(*machine._pop(2)),
    0x81: _Machine._make,
    ord("R"): _Machine._make,
    ord("b"): _Machine._build,
}


_DCP = "torch.distributed.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_FORMER = "torch.distributed._shard.sharded_tensor.metadata"  # the former module of some of DCP's classes
DCP_GLOBALS = (
    *(
        (f"{_DCP}.metadata", name, name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
            *("TensorProperties", "MetadataIndex", "StorageMeta"),
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo", "_StorageInfo"),
    # Megatron keeps the plan of each rank's save in its metadata for its next save. Nothing here reads it.
    *(
        (f"{_DCP}.planner", name, "save plan")
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
    # Megatron-core 0.15 and before.
    (_MEGATRON, "MCoreMetadata", "Metadata"),
    (_MEGATRON, "MCoreSavePlan", "save plan"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING", "memory format"),
    (_FORMER, "TensorProperties", "TensorProperties"),
    (_FORMER, "MEM_FORMAT_ENCODING", "memory format"),
    ("torch", "Size", "Size"),
    ("torch.serialization", "_get_layout", "layout"),
    ("collections", "OrderedDict", DICT),
    # The directory to which torch's own writer wrote.
    *((module, name, "path") for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
    # The first releases of Python 3.11 pickle a member of an enumeration with `getattr`.
    *((module, "getattr", "getattr") for module in ("builtins", "__builtin__")),
)
# The dtypes of torch 2.6 to 2.13, by the names that torch pickles.
DTYPES = (
    *("bfloat16", "bit", "bits16", "bits1x8", "bits2x4", "bits4x2", "bits8", "bool", "cdouble"),
    *("cfloat", "chalf", "complex128", "complex32", "complex64", "double", "float", "float16"),
    *("float32", "float4_e2m1fn_x2", "float64", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "half", "int", "int1", "int16"),
    *("int2", "int3", "int32", "int4", "int5", "int6", "int64", "int7", "int8", "long", "qint32", "qint8"),
    *("quint2x4", "quint4x2", "quint8", "short", "uint1", "uint16", "uint2", "uint3", "uint32"),
    *("uint4", "uint5", "uint6", "uint64", "uint7", "uint8"),
)
PICKLED_GLOBALS = {(module, name): PickledGlobal(kind, f"{module}.{name}") for module, name, kind in DCP_GLOBALS}
PICKLED_GLOBALS |= {("torch", name): PickledGlobal("dtype", name) for name in DTYPES}
