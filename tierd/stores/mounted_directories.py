"""Mounted file systems, and whether the directories of a configuration overlap on this machine.

Invariant: no file tier is the spool or another file tier, is inside it, or contains it, through any links or mounts.
Each place deletes files that it takes for its own, so an overlap would lose data. Only a directory that does not answer
is compared by the text of its path.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierd.core.config import Config
from tierd.core.diagnosis.machine_findings import Mount
from tierd.core.errors import ConfigError
from tierd.core.urls import parse_url
from tierd.threads import in_own_thread

_MOUNTS, _FSTAB = Path("/proc/self/mountinfo"), Path("/etc/fstab")
_Identity = tuple[int, int]  # st_dev, st_ino


@dataclass(frozen=True, slots=True)
class _Directory:
    """A path resolved on this machine, without links.

    `identity` and `above` identify its directory and all parent directories that exist. `device` and `inside` are its
    file system and its path there, because a bind mount of a directory has other parents than that directory.
    """

    path_text: str
    path: Path
    identity: _Identity | None = None
    above: frozenset[_Identity | None] = frozenset()
    device: str = ""
    inside: Path = Path()

    def relation(self, sibling: _Directory) -> str:
        """Return the relation to another directory; empty if they do not overlap."""
        if self.path == sibling.path or (self.identity and self.identity == sibling.identity):
            return "is"
        if self._is_inside(sibling):
            return "lies in"
        return "contains" if sibling._is_inside(self) else ""

    def _is_inside(self, sibling: _Directory) -> bool:
        if sibling.path in self.path.parents or (sibling.identity is not None and sibling.identity in self.above):
            return True
        return bool(self.device) and self.device == sibling.device and sibling.inside in self.inside.parents

    def __str__(self) -> str:
        return self.path_text if self.path_text == str(self.path) else f"{self.path_text} (which is {self.path})"


async def check_no_overlap(config: Config, *, answer_s: float = 5.0) -> None:
    """Refuse file tiers and watched directories that overlap the spool or each other. Changes nothing.

    A directory's mount may take `answer_s` to answer, because a hung mount must not block the other tiers.

    Raises:
        ConfigError: two directories overlap. The message names the key, both paths, and the remedy.
    """
    places = list(_places(config))
    directories = await asyncio.gather(*(_resolve(path, answer_s) for _, _, path in places))
    for number, later in enumerate(directories):
        for index, earlier in enumerate(directories[:number]):
            if how := later.relation(earlier):
                if places[number][0].startswith("watch"):
                    raise ConfigError(
                        f"{places[number][0]}: {later} {how} the directory of {places[index][1]}, {earlier}, and "
                        f"nothing is written to a watched directory: put {places[index][1]} beside it"
                    )
                raise ConfigError(
                    f"{places[number][0]}: {later} {how} the directory of {places[index][1]}, {earlier}, and each "
                    "would delete what is the other's: give the tier a directory of its own, beside that one"
                )


def enclosing_spool(directory: Path) -> Path | None:
    """Return the spool that `directory` is, or lies in, through any links; None if there is none."""
    real = Path(os.path.realpath(directory))
    return next((path for path in (real, *real.parents) if os.path.lexists(path / ".tierd" / "stage")), None)


def _places(config: Config) -> Iterator[tuple[str, str, str]]:
    """Yield for the spool and each file tier: its configuration key, its name in messages, and its path."""
    yield "spool", "the spool", config.spool
    for index, tier in enumerate(config.tier):
        url = parse_url(tier.url)
        if url.is_directory:
            yield f"tier[{index}].url", f"tier {tier.name!r}", url.path
    for index, watch in enumerate(config.watch):
        yield f"watch[{index}].directory", f"the watched directory of run {watch.run!r}", watch.directory


async def _resolve(path: str, answer_s: float) -> _Directory:
    try:
        return await asyncio.wait_for(in_own_thread(lambda: _inspect(path), "tierd-apart"), answer_s)
    except TimeoutError:
        return _Directory(path, Path(os.path.normpath(path)))


def _inspect(path: str) -> _Directory:
    real = Path(os.path.realpath(path))
    above = frozenset(_identity(parent) for parent in real.parents)
    return _Directory(path, real, _identity(real), above, *_in_file_system(str(real)))


def _in_file_system(real: str) -> tuple[str, Path]:
    """Return the device of the mount that has `real`, and the path in that file system."""
    if (deepest := _deepest_mount(real)) is None:
        return "", Path()
    _, _, device, root, point, *_ = deepest[0]
    return device, Path(f"{root}/{real[len(point.rstrip('/')) :]}")


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def mount_of(path: Path, table: str = "") -> Mount | None:
    """Return the file system on which an existing path lies; None if the kernel's table does not have it."""
    if (deepest := _deepest_mount(os.path.realpath(path), table)) is None:
        return None
    fields, (kind, source, options, *_) = deepest
    return Mount(kind, source, "ro" in fields[5].split(",") or "ro" in options.split(","))


def unmounted_point(path: Path, fstab: str = "") -> Path | None:
    """Return the mount point of /etc/fstab that is `path`, or holds it, and that is not mounted; None without one."""
    try:
        fstab = fstab or _FSTAB.read_text(errors="replace")
    except OSError:
        return None
    fields = [line.split() for line in fstab.splitlines() if not line.lstrip().startswith("#")]
    points = {Path(_unescaped(words[1])) for words in fields if len(words) > 2 and words[1].startswith("/")}
    mounted = {Path(_unescaped(words[4])) for words in map(str.split, _read_mounts().splitlines()) if len(words) > 4}
    return next((point for point in (path, *path.parents) if point in points - mounted), None)


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _deepest_mount(real: str, table: str = "") -> tuple[list[str], list[str]] | None:
    """Return the fields, before and after the dash, of the mount that has `real`; see proc_pid_mountinfo(5)."""
    deepest, longest = None, -1
    for line in (table or _read_mounts()).splitlines():
        before, dash, after = line.partition(" - ")
        fields, source_fields = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or len(source_fields) < 3:
            continue
        fields = [_unescaped(field) for field in fields]
        point = fields[4].rstrip("/")
        if (real == point or real.startswith(f"{point}/")) and len(point) >= longest:  # of equals the later is on top
            deepest, longest = (fields, source_fields), len(point)
    return deepest


def _read_mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="replace")
    except OSError:
        return ""
