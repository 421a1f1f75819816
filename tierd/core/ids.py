"""Names of runs, attempts, checkpoints and parts, and their conversion into paths and keys and back.

Invariant: a name from outside (an argument, a listing, a manifest) becomes a path or a key only in this module. That is
why it is longer than 300 lines.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tierd.core.errors import ConfigError, StepRefused

MAX_STEP = 10**12 - 1  # steps are written with twelve digits, so that names sort like numbers
MAX_WORLD = 99_999

LATEST_MS = 7_258_118_400_000  # the year 2200: no honest attempt is later
_THEN_MS = 1_780_000_000_000  # 2026: a clock that shows an earlier time counts as wrong
_AHEAD_MS = 50 * 365 * 86_400_000  # fifty years: an attempt further ahead of the clock does not advance later names

MAX_RUN = 128  # characters of a run's name
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ATTEMPT = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}")
_CHECKPOINT = re.compile(r"([0-9]{12})\.([0-9a-f]{12}-[0-9a-f]{8})")
_RETENTION = re.compile(r"([0-9a-f]{8})\.([a-z]{1,16})\.json")
_BY_NODE = re.compile(r"([0-9a-f]{8})\.json")
_PART = re.compile(r"([0-9]{5})-of-([0-9]{5})")
README_KEY = "README.md"  # explains the tier to a person who finds it
CHECK_KEY = "README.md.check"  # exists only while `config check --reach` runs
IDENTITY_KEY = "README.md.id"  # the tier's identity; one listing of README_KEY as a prefix shows all three
OWN_KEYS = frozenset({README_KEY, CHECK_KEY, IDENTITY_KEY})  # the tier's own objects at its root, which are not runs


def check_run(run: str) -> str:
    """Return `run` if it can name a run: 1 to 128 of A-Za-z0-9._-, a letter or digit first. Raises `ConfigError`."""
    if not isinstance(run, str) or not _RUN.fullmatch(run) or run in OWN_KEYS:
        raise ConfigError(f"run {run!r}: a run's name is 1 to 128 of A-Za-z0-9._-, a letter or digit first")
    return run


def check_step(step: object) -> int:
    """Return `step` as an int. Raises `StepRefused` for a bool, a float, or one below 0 or beyond `MAX_STEP`."""
    try:
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError  # numpy 1 and torch accept their booleans as an index
        number = operator.index(step)  # type: ignore[arg-type]  # arrays have __index__ too, and most raise TypeError
    except TypeError:
        raise StepRefused(f"step {step!r}: a step is an int, not {type(step).__name__}") from None
    if not 0 <= number <= MAX_STEP:
        raise StepRefused(f"step {number}: a step lies between 0 and {MAX_STEP}")
    return number


def check_attempt(attempt: str) -> str:
    """Return `attempt` if it has the form of `next_attempt`'s result and a time before `LATEST_MS`. Raises
    `ConfigError`.
    """
    if not isinstance(attempt, str) or not is_attempt(attempt) or launch_ms(attempt) >= LATEST_MS:
        raise ConfigError(
            f"attempt {attempt!r}: an attempt is 12 hex digits of launch time in ms (before 2200), '-', 8 random ones "
            "(tierd.new_attempt() makes one); every rank of a launch is given the same"
        )
    return attempt


def is_attempt(name: str) -> bool:
    """Whether `name` has the form of `next_attempt`'s result."""
    return _ATTEMPT.fullmatch(name) is not None


def launch_ms(attempt: str) -> int:
    """When an attempt's name was made, in milliseconds since 1970."""
    return int(attempt[:12], 16)


def next_attempt(now_ms: int, attempts: Iterable[str], token: str) -> str:
    """Name a launch so that the name sorts after every attempt in `attempts`, even if the clock was set back.

    The name is a hybrid logical clock (Kulkarni et al., 2014): the wall time, or one millisecond after the latest
    attempt in `attempts` if that is later. Attempts more than fifty years ahead of the clock are ignored. No honest
    launch made them, and such names could use up the clock's range.

    Args:
        token: 8 random hex digits, which distinguish two launches of one millisecond.
    """
    bound_ms = max(now_ms, _THEN_MS) + _AHEAD_MS
    latest = max((at for attempt in attempts if (at := launch_ms(attempt)) <= bound_ms), default=-1)
    return check_attempt(f"{max(now_ms, latest + 1, 0):012x}-{token}")


class _Hashed:
    """Room for a hash, which is computed once because a plan looks up thousands of ids; it is no field."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId(_Hashed):
    """`(run, attempt, step)`, compared in this order, so that the latest attempt is the newest whatever its step."""

    run: str
    attempt: str
    step: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CheckpointId):
            return NotImplemented
        return self.step == other.step and self.attempt == other.attempt and self.run == other.run

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((self.run, self.attempt, self.step)))
            return self._hash

    @property
    def name(self) -> str:
        """The directory's or key's name inside the run: ``<step:012>.<attempt>``."""
        return f"{self.step:012}.{self.attempt}"

    def __str__(self) -> str:
        return f"{self.run} step {self.step} (attempt {self.attempt})"

    @staticmethod
    def parse(run: str, name: str) -> CheckpointId | None:
        """The checkpoint named `name` inside `run`; None if the name is not a checkpoint's, or claims the year 2200 or
        later.
        """
        match = _CHECKPOINT.fullmatch(name)
        if match is None or launch_ms(match[2]) >= LATEST_MS or not _RUN.fullmatch(run):
            return None
        return CheckpointId(run, match[2], int(match[1]))


checkpoint_order = operator.attrgetter("attempt", "step")  # sorts the ids of one run, and faster than by comparing them


@dataclass(frozen=True, slots=True, order=True)
class PartId:
    """One rank's part of a checkpoint. `world` is the world size."""

    checkpoint: CheckpointId
    rank: int
    world: int

    @property
    def name(self) -> str:
        """``<rank:05>-of-<world:05>``."""
        return f"{self.rank:05}-of-{self.world:05}"

    @property
    def writer(self) -> str:
        """The writer, independent of step and attempt: ``<run>.<rank:05>-of-<world:05>``."""
        return f"{self.checkpoint.run}.{self.name}"

    def __str__(self) -> str:
        return f"{self.checkpoint} rank {self.rank} of {self.world}"

    @property
    def path(self) -> str:
        """The part's directory, relative to the spool."""
        return f"{self.checkpoint.run}/{self.checkpoint.name}/{self.name}"

    @property
    def manifest_key(self) -> str:
        return f"{self.checkpoint.run}/manifests/{self.checkpoint.name}/{self.name}.json"

    @property
    def quarantine_key(self) -> str:
        """The key to which a manifest on a tier is moved when its chunks are proven corrupt beyond repair."""
        return f"{self.checkpoint.run}/quarantine/{self.checkpoint.name}/{self.name}.json"

    @staticmethod
    def parse(run: str, checkpoint: str, name: str) -> PartId | None:
        """The part named ``<checkpoint>/<name>`` inside `run`; None if the name is not a part's."""
        owner, pair = CheckpointId.parse(run, checkpoint), PartId.parse_name(f"{name}.json")
        return PartId(owner, *pair) if owner and pair else None

    @staticmethod
    def parse_name(name: str) -> tuple[int, int] | None:
        """The rank and the world size of a manifest named `name` on a tier; None if the name is not a manifest's."""
        match = _PART.fullmatch(name.removesuffix(".json")) if name.endswith(".json") else None
        if match is None:
            return None
        rank, world = int(match[1]), int(match[2])
        return (rank, world) if rank < world else None

    @staticmethod
    def parse_key(key: str) -> PartId | None:
        """The part whose manifest has this key, in ``manifests/`` or in ``quarantine/``; None for any other key."""
        pieces = key.split("/")
        if len(pieces) != 4 or pieces[1] not in ("manifests", "quarantine") or not pieces[3].endswith(".json"):
            return None
        return PartId.parse(pieces[0], pieces[2], pieces[3].removesuffix(".json"))


def check_rank(rank: object, world: object) -> tuple[int, int]:
    """Return `(rank, world)` as ints. Raises `ConfigError` unless 0 <= rank < world <= `MAX_WORLD`."""
    if (
        isinstance(rank, bool)
        or isinstance(world, bool)
        or not isinstance(rank, int)
        or not isinstance(world, int)
        or not 0 <= rank < world <= MAX_WORLD
    ):
        raise ConfigError(f"rank {rank!r} of {world!r}: ranks count from 0 to world size - 1, at most {MAX_WORLD}")
    return rank, world


# The kinds of objects below a run.
KEY_KINDS = (
    "manifests",
    "chunks",
    "pins",
    "quarantine",
    "retention",
    "timeline",
    "flushing",
    "pruning",
    "meetings",
    "watching",
)


def is_of_run(run: str, key: str) -> bool:
    """Whether `key` can be an object of `run` on this tier.

    The objects of another tier below the run's prefix are none of the run. Their kind stands later in their keys, also
    if a run of that tier is called like a kind.
    """
    pieces = key.split("/")
    return (
        len(pieces) > 2 and pieces[0] == run and pieces[1] in KEY_KINDS and not set(KEY_KINDS).intersection(pieces[2:])
    )


def _prefix_of(kind: str) -> Callable[[str], str]:
    return lambda run: f"{run}/{kind}/"


manifests_prefix = _prefix_of("manifests")
quarantine_prefix = _prefix_of("quarantine")
chunks_prefix = _prefix_of("chunks")
pins_prefix = _prefix_of("pins")
flushing_prefix = _prefix_of("flushing")
pruning_prefix = _prefix_of("pruning")
rank_notes_prefix = _prefix_of("meetings")
retention_prefix = _prefix_of("retention")
heads_prefix = _prefix_of("timeline")
watching_prefix = _prefix_of("watching")


def note_key(run: str, launch: str, name: str) -> str:
    """The key of a note of the ranks of a launch (32 hex digits) to each other: ``meetings/<launch>/<name>``."""
    return f"{rank_notes_prefix(run)}{launch}/{name}"


# Sorts before every checkpoint's name, so that a listing of the manifests shows the summaries first. It has no `.json`,
# because programs read every such file below `manifests/`.
_SUMMARIES = "0-summaries"


def summaries_prefix(run: str) -> str:
    return f"{manifests_prefix(run)}{_SUMMARIES}/"


def summary_key(checkpoint: CheckpointId) -> str:
    """The key of the summary of a checkpoint's manifests: ``manifests/0-summaries/<checkpoint>``."""
    return f"{summaries_prefix(checkpoint.run)}{checkpoint.name}"


def parse_summary(run: str, key: str) -> CheckpointId | None:
    """The checkpoint whose summary has this key; None if the key is not that of one of `run`'s summaries."""
    return _checkpoint_below(run, key, summaries_prefix(run))


def pin_key(checkpoint: CheckpointId) -> str:
    return f"{pins_prefix(checkpoint.run)}{checkpoint.name}"


def parse_pin(run: str, key: str) -> CheckpointId | None:
    """The checkpoint that the pin with this key keeps; None if the key is not one of `run`'s pins."""
    return _checkpoint_below(run, key, pins_prefix(run))


def _checkpoint_below(run: str, key: str, prefix: str) -> CheckpointId | None:
    return CheckpointId.parse(run, key.removeprefix(prefix)) if key.startswith(prefix) else None


def retention_key(run: str, by: str, given: str) -> str:
    """The key of the policy that node `by` (8 hex digits) has for `run`: ``retention/<by>.<given>.json``."""
    return f"{retention_prefix(run)}{by}.{given}.json"


def parse_retention(run: str, key: str) -> tuple[str, str] | None:
    """`(by, given)` of the policy with this key; None if the key is not one of `run`'s policies."""
    match = _RETENTION.fullmatch(key.removeprefix(retention_prefix(run)))
    return (match[1], match[2]) if match else None


def head_key(run: str, by: str) -> str:
    """The key of the head of `run` that node `by` (8 hex digits) wrote: ``timeline/<by>.json``."""
    return f"{heads_prefix(run)}{by}.json"


def parse_head(run: str, key: str) -> str | None:
    """`by` of the head with this key; None if the key is not one of `run`'s heads."""
    return _node_of(key, heads_prefix(run))


def watching_key(run: str, by: str) -> str:
    """The key of the record of node `by` (8 hex digits), which watches a directory as `run`: ``watching/<by>.json``."""
    return f"{watching_prefix(run)}{by}.json"


def parse_watching(run: str, key: str) -> str | None:
    """`by` of the record of a watch with this key; None if the key is not one of `run`'s."""
    return _node_of(key, watching_prefix(run))


def _node_of(key: str, prefix: str) -> str | None:
    match = _BY_NODE.fullmatch(key.removeprefix(prefix))
    return match[1] if match else None


# A chunk's key relative to the run is written as ``chunks/<h>/<checkpoint>/<home:05>/<digest>.<codec>``, where `h` is
# `home` mod 16 in hex. S3 divides a bucket's requests by prefixes, and these stay from checkpoint to checkpoint.
# Formats before version 4 have no ``<h>/``, and the rank of the part in place of the home.
_CHUNK_KEY = re.compile(
    r"chunks/(?:([0-9a-f])/)?([0-9]{12}\.[0-9a-f]{12}-[0-9a-f]{8})/([0-9]{5})/([0-9a-f]{32})\.([a-z0-9]{1,16})"
)
_GROUP = re.compile(r"(?:[0-9a-f]/)?([^/]+)/")
_FANS = "0123456789abcdef"


class ChunkName(NamedTuple):
    """A chunk's key, taken apart. `rank` is its home, or in an old key the rank of the part that it was written for."""

    checkpoint: str
    rank: int
    digest: str
    codec: str
    is_old: bool  # of a format before version 4

    @staticmethod
    def parse(key: str) -> ChunkName | None:
        """Take apart a chunk's key relative to its run; None if the key has neither form."""
        match = _CHUNK_KEY.fullmatch(key)
        if match is None or (match[1] and match[1] != _FANS[int(match[3]) % 16]):
            return None
        return ChunkName(match[2], int(match[3]), match[4], match[5], match[1] is None)


def chunk_directory(checkpoint: CheckpointId, home: int) -> str:
    """The prefix of a home's chunks, relative to the run, with its slash."""
    return f"chunks/{_FANS[home % 16]}/{checkpoint.name}/{home:05}/"


def chunk_directories(checkpoint: CheckpointId, homes: Iterable[int], rank: int) -> list[str]:
    """The prefixes of the chunks of these homes, and of those that `rank` put in formats before version 4."""
    return [*(chunk_directory(checkpoint, home) for home in sorted(homes)), f"chunks/{checkpoint.name}/{rank:05}/"]


def chunk_key(part: PartId, digest: str, codec: str, home: int | None = None) -> str:
    """The key under which a chunk of `part` is put, relative to the run.

    Args:
        home: the lowest rank that holds the same bytes; None if only this part's rank does.
    """
    return f"{chunk_directory(part.checkpoint, part.rank if home is None else home)}{digest}.{codec}"


def chunk_owner(run: str, key: str) -> CheckpointId | None:
    """The checkpoint under whose name a chunk is stored, by the chunk's key relative to the run; None if no chunk's."""
    pieces = key.split("/")
    if pieces[0] != "chunks" or not (len(pieces) == 4 or (len(pieces) == 5 and pieces[1] in _FANS and pieces[1])):
        return None
    return CheckpointId.parse(run, pieces[-3])


def chunk_group(run: str, key: str) -> str:
    """The longest prefix of a listed key below ``<run>/chunks/`` that all chunks of its checkpoint at one place share.

    That is ``<run>/chunks/<h>/<checkpoint>/`` or, of formats before version 4, ``<run>/chunks/<checkpoint>/``.
    """
    prefix = chunks_prefix(run)
    match = _GROUP.match(key, len(prefix))
    return match[0] and key[: match.end()] if match else key


def group_owner(run: str, group: str) -> CheckpointId | None:
    """The checkpoint of a prefix that `chunk_group` returned; None if it is no checkpoint's."""
    return CheckpointId.parse(run, group.removesuffix("/").rpartition("/")[2])


def chunk_groups(checkpoint: CheckpointId) -> list[str]:
    """Every prefix at which chunks of a checkpoint can lie, in the order of a listing of the run's chunks."""
    prefix = chunks_prefix(checkpoint.run)
    return sorted([f"{prefix}{checkpoint.name}/", *(f"{prefix}{fan}/{checkpoint.name}/" for fan in _FANS)])
