"""`unit.json`, the description of a unit inside its part, from which it is put back in place; and the pointers that it
records, the small files and links by which programs find their newest checkpoint: `latest`, a tracker, `last`. Pure.

Invariant: a description from a tier is untrusted: every path in it is checked before it is used. A part of a watched
run holds the unit's files at their paths below the watched directory, and this file. Of the known programs, a pointer's
text is a function of the unit's path. Of others, what lies beside a unit and names it is recorded when the unit is
taken.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tierd.core.errors import ManifestError
from tierd.core.manifest import check_path
from tierd.watching.missing_files import is_temporary
from tierd.watching.step_in_name import is_log, is_weights, step_in, without_ending
from tierd.watching.unit import COMPOSER, DEEPSPEED, MEGATRON, TENSORFLOW, Listing, Unit, join_path

_MAX_POINTERS = 100  # files and links beside a unit that are read


@dataclass(frozen=True, slots=True)
class Pointer:
    """A file, or a link if `link`, with its text or target."""

    path: str
    text: str
    link: bool = False


def pointers(program: str, path: str, files: Sequence[str]) -> Iterator[Pointer]:
    """Yield the pointers to a unit, which is at `path` in the directory and has these files."""
    home, _, name = path.rpartition("/")
    if program == DEEPSPEED.program:
        yield Pointer(join_path(home, "latest"), name)
    elif program == MEGATRON.program:
        iteration = re.fullmatch(r"iter_0*(\d+)", name)
        yield Pointer(join_path(home, "latest_checkpointed_iteration.txt"), iteration[1] if iteration else name)
    elif program == TENSORFLOW.program:
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        text = f'model_checkpoint_path: "{quoted}"\nall_model_checkpoint_paths: "{quoted}"\n'
        yield Pointer(join_path(home, "checkpoint"), text)
    elif program == COMPOSER.program:
        for file in files:
            file_name = file.rpartition("/")[2]
            if match := re.fullmatch(r".+-rank(\d+)(\.pt|\.tar)?", file_name):
                yield Pointer(join_path(home, f"latest-rank{match[1]}{match[2] or ''}"), file_name, link=True)


def pointer_candidates(unit: Unit, listing: Listing) -> list[str]:
    """Return the files and links that may be pointers to a unit: beside it, or at the top."""
    homes = {unit.path.rpartition("/")[0], ""}
    unit_paths = {*unit.files, *unit.special_files}
    paths = [
        path
        for path, entry in listing.entries.items()
        if path.rpartition("/")[0] in homes
        and path not in unit_paths
        and _may_point(path.rpartition("/")[2], entry.kind)
    ]
    return sorted(paths, key=lambda path: (listing.entries[path].kind != "link", path))[:_MAX_POINTERS]


def _may_point(name: str, kind: str) -> bool:
    if is_temporary(name):
        return False
    if kind == "link":
        return True
    return kind == "file" and not name.startswith(".") and not (is_weights(name) or is_log(name) or step_in(name))


def points_to(pointer: Pointer, unit: Unit) -> bool:
    """Whether a link leads to a unit, or to a file or directory of it, or a text names it or its step.

    The step is the only number, or a JSON object's member "step" or the like.
    """
    home, _, unit_name = unit.path.rpartition("/")
    names = {unit_name, *(path[len(home) + 1 if home else 0 :].partition("/")[0] for path in unit.files)}
    if pointer.link:
        target = target_of(pointer)
        if target is None or not target.startswith(join_path(home, "")):  # to the directory in which the unit lies
            return False
        return any(f"{path}/".startswith(f"{target}/") for path in (unit.path, *unit.files))
    numbers = list(map(int, re.findall(r"\d+", pointer.text)))
    if unit.step is not None and (numbers == [unit.step] or _has_step(pointer.text, unit.step)):
        return True
    return any(_mentions(pointer.text, name) for name in names | set(map(without_ending, names)))


_STEP_MEMBER = re.compile(r"(\w+_)?(step|iter|iteration|epoch|checkpoint|ckpt)s?", re.IGNORECASE)


def _has_step(text: str, step: int) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        members = json.loads(text).items()
    except (ValueError, RecursionError):
        return False
    return any(_STEP_MEMBER.fullmatch(name) and type(value) is int and value == step for name, value in members)


def pointer_to_newest(pointer: Pointer, former: str, newest: str) -> Pointer | None:
    """Return a pointer to the unit at `former` as the program writes it for the one at `newest`; None if only the
    program knows.

    It is killed between a checkpoint and its pointer as well. The names have to be of one form, as `epoch_4.pth` and
    `epoch_5.pth`; the pointer may have the number alone, and with other zeros.
    """
    was, newest_name = (path.rpartition("/")[2] for path in (former, newest))
    numbers, own_numbers = re.findall(r"\d+", was), re.findall(r"\d+", newest_name)
    if posixpath.dirname(former) != posixpath.dirname(newest) or re.sub(r"\d+", "#", was) != re.sub(
        r"\d+", "#", newest_name
    ):
        return None
    for name, own_name in ((was, newest_name), (without_ending(was), without_ending(newest_name))):
        if _mentions(pointer.text, name):
            return replace(pointer, text=own_name.join(_whole_word(name).split(pointer.text)))
    if (
        pointer.link
        or len(numbers) != 1
        or [int(digits) for digits in re.findall(r"\d+", pointer.text)] != [int(numbers[0])]
    ):
        return None
    number = int(own_numbers[0])
    return replace(pointer, text=re.sub(r"\d+", lambda match: f"{number:0{len(match[0])}}", pointer.text))


def target_of(pointer: Pointer) -> str | None:
    """Return the path to which a link leads, from the directory; None if that lies elsewhere."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(pointer.path), pointer.text))
    return None if pointer.text.startswith("/") or target == ".." or target.startswith("../") else target


def _mentions(text: str, name: str) -> bool:
    return _whole_word(name).search(text) is not None


def _whole_word(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])")


MAX_UNIT_FILE_SIZE = 64 << 20  # bytes
_Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class UnitFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a unit, with each file's time of modification, and the pointers that named it when it was
    taken.
    """

    version: Literal[1] = 1
    path: str
    program: str
    ranks: Annotated[int, Meta(ge=1)]
    modified_ns: Mapping[str, _Time]
    pointers: tuple[Pointer, ...] | UnsetType = UNSET

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def decode_unit(data: bytes | memoryview, where: str) -> UnitFile:
    """Decode and check a description.

    Raises:
        ManifestError: it is no description, or a path in it is unsafe.
    """
    try:
        unit_file = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ManifestError(f"{where}: {error}") from error
    pointers = unit_file.pointers or ()
    for path in (unit_file.path, *unit_file.modified_ns, *(pointer.path for pointer in pointers)):
        check_path(path, where)
    if any(pointer.link and target_of(pointer) is None for pointer in pointers):
        raise ManifestError(f"{where}: a link in it leads out of the directory")
    return unit_file


_decoder = msgspec.json.Decoder(UnitFile)
