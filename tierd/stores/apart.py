"""Whether a configuration's directories are apart from each other, as they lie on this machine.

Law: no file tier is the spool or another file tier, lies in it, or contains it, by whatever links or mounts, because
each deletes what it finds as its own. Only a directory that does not answer is judged by its path's text.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierd.core.config import Config
from tierd.core.errors import ConfigError
from tierd.core.urls import parse_url

_ANSWER = 5.0  # seconds that a directory's mount may take to answer; a hung one must not keep a daemon from its others

_Identity = tuple[int, int]  # st_dev, st_ino


@dataclass(frozen=True, slots=True)
class _Directory:
    """Where a path leads: without links, and which directories it and those above it are, as far as they exist."""

    given: str
    path: Path
    own: _Identity | None = None
    above: frozenset[_Identity | None] = frozenset()

    def relation(self, other: _Directory) -> str:
        """How this lies to another one; empty where they are apart."""
        if self.path == other.path or (self.own and self.own == other.own):
            return "is"
        if self._is_inside(other):
            return "lies in"
        return "contains" if other._is_inside(self) else ""

    def _is_inside(self, other: _Directory) -> bool:
        return other.path in self.path.parents or (other.own is not None and other.own in self.above)

    def __str__(self) -> str:
        return self.given if self.given == str(self.path) else f"{self.given} (which is {self.path})"


async def check_apart(config: Config) -> None:
    """Refuse file tiers that are not apart from the spool and from each other. Changes nothing.

    Raises:
        ConfigError: naming the tier's URL, both paths and the way out.
    """
    places = list(_places(config))
    found = await asyncio.gather(*(_resolved(path) for _, _, path in places))
    for number, here in enumerate(found):
        for other, there in enumerate(found[:number]):
            if how := here.relation(there):
                raise ConfigError(
                    f"{places[number][0]}: {here} {how} the directory of {places[other][1]}, {there}, and each would "
                    "delete what is the other's: give the tier a directory of its own, beside that one"
                )


def _places(config: Config) -> Iterator[tuple[str, str, str]]:
    """What to call the spool and each file tier: as a key, as a noun; and its path."""
    yield "spool", "the spool", config.spool
    for index, tier in enumerate(config.tier):
        url = parse_url(tier.url)
        if url.scheme == "file":
            yield f"tier[{index}].url", f"tier {tier.name!r}", url.path


async def _resolved(path: str) -> _Directory:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Directory] = loop.create_future()

    def settle(found: _Directory) -> None:
        if not answer.done():
            answer.set_result(found)

    def work() -> None:
        found = _look(path)
        try:
            loop.call_soon_threadsafe(settle, found)
        except RuntimeError:  # it answered after the loop's end
            pass

    # A thread of its own, because one that hangs in a dead mount would be waited for at the end of the loop's pool.
    threading.Thread(target=work, name="tierd-apart", daemon=True).start()
    try:
        return await asyncio.wait_for(answer, _ANSWER)
    except TimeoutError:
        return _Directory(path, Path(os.path.normpath(path)))


def _look(path: str) -> _Directory:
    real = Path(os.path.realpath(path))
    return _Directory(path, real, _identity(real), frozenset(_identity(one) for one in real.parents))


def _identity(path: Path) -> _Identity | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
