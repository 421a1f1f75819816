"""Find entries of a unit that hold the same in two forms: `model-100.safetensors` and `model-100.bin`, or `step_100/`
and `step_100.pt`. Pure.

Both are taken if both are sound. If one is not, the unit without it is one of its own, so that nothing hides the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from posixpath import dirname

from tierd.watching.completeness import SHARD
from tierd.watching.layouts import units
from tierd.watching.listing import Listing, joined
from tierd.watching.programs import DIRECTORY, HUB, SHARDED
from tierd.watching.unit import Unit

# Forms of a whole model. A Paddle model's `.pdparams` and `.pdopt`, for example, are two parts of one.
_FORM = re.compile(r"(.+?)((?:\.weights)?\.(?:safetensors|bin|pt|pth|ckpt|h5|hdf5|keras|msgpack|onnx|gguf|nemo))")
_UNMARKED = (DIRECTORY, SHARDED, HUB)
_INDEX = re.compile(r"(.+)\.(safetensors|bin)\.index\.json")


def without_twins(unit: Unit, listing: Listing) -> Iterator[tuple[tuple[str, ...], Unit]]:
    """Yield the unit without each of its twins, and the paths that are left out then.

    Twins lie beside each other, or at the top of a directory whose program left no mark of its own.
    """
    inside = (*unit.files, *unit.strange)
    homes = [dirname(unit.path), *([unit.path] if unit.is_directory and unit.layout in _UNMARKED else [])]
    for home in homes:
        start = f"{home}/" if home else ""
        names = {path[len(start) :].partition("/")[0] for path in inside if path.startswith(start)}
        entries = sorted(
            {joined(home, name) for name in names} | ({unit.path} & listing.entries.keys())
        )  # that one may be a directory without a file
        forms: dict[str, dict[str, list[str]]] = {}
        for entry in entries:
            stem, form = _split_form(entry, listing)
            forms.setdefault(stem, {}).setdefault(form, []).append(entry)
        for twins in forms.values():
            for form, paths in twins.items() if len(twins.keys() - {""}) > 1 else ():
                if form:
                    companions = tuple(
                        f"{path}." for path in paths if form != "/"
                    )  # `model.pt.yml` belongs to `model.pt`
                    left_out = tuple(entry for entry in entries if entry in paths or entry.startswith(companions))
                    yield from ((left_out, reduced) for reduced in _reduced_units(left_out, inside, listing))


def _split_form(entry: str, listing: Listing) -> tuple[str, str]:
    """Return an entry's path without its ending, and the ending; an empty one if it has none of a form."""
    if listing.entries[entry].kind == "directory":
        return entry, "/"
    if match := SHARD.fullmatch(entry) or _INDEX.fullmatch(entry):
        stem, form = match[1], f".{match[2]}"
    elif match := _FORM.fullmatch(entry):
        stem, form = match[1], match[2]
    else:
        return entry, ""
    home, _, name = stem.rpartition("/")
    return joined(home, "model") if name == "pytorch_model" else stem, form  # transformers writes either of the two


def _reduced_units(left_out: tuple[str, ...], inside: tuple[str, ...], listing: Listing) -> list[Unit]:
    remaining = without(left_out, listing)
    expected = {path for path in inside if path in remaining.entries}
    return [unit for unit in units(remaining) if {*unit.files, *unit.strange} == expected]


def without(left_out: tuple[str, ...], listing: Listing) -> Listing:
    """Return a listing without these entries and all below them."""
    below = tuple(f"{entry}/" for entry in left_out)
    entries = {
        path: entry for path, entry in listing.entries.items() if path not in left_out and not path.startswith(below)
    }
    return Listing(entries, listing.texts)
