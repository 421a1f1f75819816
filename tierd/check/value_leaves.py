"""Convert values of a training process to leaves, and describe two leaves so that their texts differ where they do.

A leaf has a digest of the value, and some of its numbers, which show how far two values differ.

Invariant: a capture changes nothing. It draws from no generator, iterates nothing, and reads tensors without keeping
them. A value that cannot be read is left out.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import xxhash

SAMPLED_ELEMENTS = 64  # elements of a tensor that are kept to measure its distance from another
_MAX_LEAVES = 20_000  # leaves of one tree; later ones are left out, the same ones each time
_MAX_SEPARATE_NUMBERS = 8  # up to so many numbers are a leaf each; a longer sequence is one leaf
_MAX_DIGESTED_ITEMS = 100_000  # items of a sequence that is digested as a whole
_MAX_TEXT = 80
_MAX_FULL_TEXT = 20_000  # characters of a long text that are kept
_SCALARS = (bool, int, float, complex, str, bytes, bytearray, type(None))


class ValueLeaf(msgspec.Struct, frozen=True, omit_defaults=True):
    digest: str  # equal for values that are equal to the last bit
    text: str  # the value for a reader, shortened
    count: int | None = None  # the number of items of a container or sequence
    sample: tuple[float, ...] = ()  # some of its numbers, from the same positions for equal shapes
    saved: bool | None = None  # whether the saved state contains it; None if no state was captured
    full_text: str = ""  # the text before it was shortened, up to a limit, to show where two values differ


def leaves_by_path(
    value: object, path: str, saved: bool | None = None, limit: int = _MAX_LEAVES
) -> dict[str, ValueLeaf]:
    """Return the first `limit` leaves of `value` by their paths.

    Objects other than containers, tensors, arrays and generators have no leaf.
    """
    by_path: dict[str, ValueLeaf] = {}
    for place, leaf in _walk(value, path, set()):
        by_path[place] = leaf if saved is None else msgspec.structs.replace(leaf, saved=saved)
        if len(by_path) >= limit:
            break
    return by_path


def leaf_of(value: Any) -> ValueLeaf | None:
    """Return the leaf of a single value; None for a container, and for values without a leaf."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_leaf(torch, value)
    if torch is not None and isinstance(value, torch.Generator):
        return _generator_leaf(value.get_state().cpu().numpy().tobytes())
    if isinstance(value, _SCALARS):
        sample = (float(value),) if isinstance(value, bool | int | float) and abs(value) < 1e300 else ()
        text = repr(value)
        full_text = text[:_MAX_FULL_TEXT] if len(text) > _MAX_TEXT else ""
        return ValueLeaf(_digest(text.encode()), _shorten(text), sample=sample, full_text=full_text)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _generator_leaf(repr(value.getstate()).encode())
    if numpy is not None:
        if isinstance(value, numpy.ndarray):
            return _array_leaf(numpy, value)
        if isinstance(value, numpy.generic):
            return leaf_of(value.item())
        if isinstance(value, numpy.random.RandomState):
            return _generator_leaf(repr([repr(part) for part in value.get_state(legacy=True)]).encode())
        if isinstance(value, numpy.random.Generator):
            return _generator_leaf(repr(value.bit_generator.state).encode())
    return None


def is_random_generator(value: object) -> bool:
    """Return whether `value` is a random number generator with a readable state."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (
        (isinstance(value, random.Random) and not isinstance(value, random.SystemRandom))
        or (torch is not None and isinstance(value, torch.Generator))
        or (numpy is not None and isinstance(value, numpy.random.RandomState | numpy.random.Generator))
    )


def sequence_leaf(values: Any) -> ValueLeaf | None:
    """Return one leaf for a list, tuple, deque or set of many plain values."""
    count = len(values)
    if count > _MAX_DIGESTED_ITEMS:
        return ValueLeaf(_digest(str(count).encode()), f"{count} items", count)
    items = list(values)
    if count <= _MAX_SEPARATE_NUMBERS or not all(_is_plain(item) for item in items):
        return None
    if isinstance(values, set | frozenset):
        items.sort(key=repr)
    sample = tuple(
        float(item) for item in items[:SAMPLED_ELEMENTS] if isinstance(item, bool | int | float) and abs(item) < 1e300
    )
    text = repr(items)
    summary = _shorten(f"{count} items: {', '.join(map(repr, items[:4]))}, …")
    return ValueLeaf(_digest(text.encode()), summary, count, sample, full_text=text[:_MAX_FULL_TEXT])


def _is_plain(value: object) -> bool:
    return isinstance(value, _SCALARS) or (
        isinstance(value, tuple | list)
        and len(value) <= _MAX_SEPARATE_NUMBERS
        and all(isinstance(item, _SCALARS) for item in value)
    )


def _walk(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, ValueLeaf]]:
    leaf = leaf_of(value)
    if leaf is not None:
        yield path, leaf
    elif id(value) in above or len(above) > 50:
        return
    elif isinstance(value, Mapping):
        yield path, ValueLeaf(_digest(str(len(value)).encode()), f"{len(value)} items", len(value))
        for key, inner in list(value.items()):
            yield from _walk(inner, f"{path}[{key_text(key)}]", above | {id(value)})
    elif isinstance(value, list | tuple | deque | set | frozenset):
        if (run := sequence_leaf(value)) is not None:
            yield path, run
            return
        yield path, ValueLeaf(_digest(str(len(value)).encode()), f"{len(value)} items", len(value))
        items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else list(value)
        for index, inner in enumerate(items):
            yield from _walk(inner, f"{path}[{index}]", above | {id(value)})


def key_text(key: object) -> str:
    """Return the key of a mapping as it is shown in paths."""
    text = repr(key) if not isinstance(key, str) else '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return _shorten(text)


def _tensor_leaf(torch: Any, value: Any) -> ValueLeaf | None:
    try:
        plain = value.detach()
        if (
            plain.layout is not torch.strided
            or plain.is_quantized
            or plain.is_meta
            or type(plain) not in (torch.Tensor, torch.nn.Parameter)
        ):
            return None
        plain = plain.resolve_conj().resolve_neg().contiguous().cpu()
        form = f"{str(plain.dtype).removeprefix('torch.')} {tuple(plain.shape)}"
        digest = xxhash.xxh3_64(form.encode())
        flat = plain.reshape(-1)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy())
        sample: tuple[float, ...] = ()
        if flat.numel() and not plain.is_complex():
            step = max(1, flat.numel() // SAMPLED_ELEMENTS)
            sample = tuple(float(number) for number in flat[::step][:SAMPLED_ELEMENTS].double().tolist())
        return ValueLeaf(digest.hexdigest(), form, flat.numel(), _replace_nonfinite(sample))
    except Exception:  # a tensor that cannot be read
        return None


def _array_leaf(numpy: Any, value: Any) -> ValueLeaf | None:
    if value.dtype.hasobject:
        return None
    contiguous = numpy.ascontiguousarray(value)
    form = f"array {value.dtype.str} {value.shape}"
    flat = contiguous.reshape(-1)
    sample: tuple[float, ...] = ()
    if flat.size and value.dtype.kind in "biuf":
        sample = tuple(float(number) for number in flat[:: max(1, flat.size // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS])
    return ValueLeaf(_digest(form.encode() + contiguous.tobytes()), form, flat.size, _replace_nonfinite(sample))


def _replace_nonfinite(sample: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(number if math.isfinite(number) else 0.0 for number in sample)


def _generator_leaf(state: bytes) -> ValueLeaf:
    digest = _digest(state)
    return ValueLeaf(digest, f"generator {digest[:8]}")


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"


_CONTEXT = 24  # characters before the first difference that are shown


def distinct_texts(a: ValueLeaf, b: ValueLeaf) -> tuple[str, str]:
    """Return a text for each of two different values: their usual ones, or the place where they differ."""
    if a.text != b.text:
        return a.text, b.text
    if a.full_text and b.full_text:
        shorter = min(len(a.full_text), len(b.full_text))
        start = next((at for at in range(shorter) if a.full_text[at] != b.full_text[at]), shorter)
        return _excerpt(a.full_text, start), _excerpt(b.full_text, start)
    if len(a.sample) == len(b.sample):
        for x, y in zip(a.sample, b.sample, strict=True):
            if x != y:
                return f"{a.text} with {x!r}", f"{b.text} with {y!r}"
    return f"{a.text} #{a.digest[:8]}", f"{b.text} #{b.digest[:8]}"


def _excerpt(text: str, start: int) -> str:
    begin = max(0, start - _CONTEXT)
    excerpt = text[begin : start + 2 * _CONTEXT]
    return f"{'…' if begin else ''}{excerpt}{'…' if begin + len(excerpt) < len(text) else ''} (from character {begin})"
