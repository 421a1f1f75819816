"""What launches saw: kill points, observations, and what of a killed run counts.

Law: pure. A launch that begins at step s undoes whatever earlier launches saw of step s and later: the kill lost it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tierd.core.errors import ConfigError

Sample = int | str
_POINT = re.compile(r"(\d+)(\+save|\+(\d+(?:\.\d+)?)ms)?")


@dataclass(frozen=True, slots=True)
class KillPoint:
    """Where a launch is killed: right after `step` was observed, `delay_ms` later, or in the middle of the first save
    of `step` or a later one."""

    step: int
    in_save: bool = False
    delay_ms: float = 0.0

    @classmethod
    def parse(cls, text: int | str) -> KillPoint:
        """`7`, `7+save` or `7+10ms`; raises `ConfigError`."""
        match = _POINT.fullmatch(str(text).strip())
        if not match:
            raise ConfigError(f"kill point {text!r}: a step, as 7 (right after it), 7+save or 7+10ms")
        return cls(int(match[1]), match[2] == "+save", float(match[3] or 0))

    def __str__(self) -> str:
        return f"{self.step}{'+save' if self.in_save else f'+{self.delay_ms:g}ms' if self.delay_ms else ''}"


class Observation(msgspec.Struct, frozen=True):
    """One call of `tierd.observe`.

    Attributes:
        loss: as `float.hex` writes it, which keeps every bit.
        generators: digests of the states of the process's random number generators at the call, by name.
    """

    step: int
    samples: tuple[Sample, ...]
    loss: str | None = None
    generators: dict[str, str] = {}


class Setting(msgspec.Struct, frozen=True):
    """What a process sums with and hashes with: it may differ between launches, and with it the last bits of a loss."""

    torch_threads: int | None = None
    omp_num_threads: str | None = None
    cpus: int | None = None
    hash_seed: str | None = None


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a record: one of these happened."""

    observed: Observation | None = None
    setting: Setting | None = None
    saving: int | None = None
    killing: str | None = None


@dataclass
class Seen:
    """One rank in one launch."""

    observed: dict[int, Observation] = field(default_factory=dict)
    setting: Setting | None = None
    saves: list[int] = field(default_factory=list)
    killing: str | None = None

    def add(self, line: Line) -> None:
        """Take one line of the record in."""
        if line.observed is not None:
            self.observed[line.observed.step] = line.observed
        self.setting = line.setting or self.setting
        self.killing = line.killing or self.killing
        if line.saving is not None:
            self.saves.append(line.saving)

    @property
    def first(self) -> int | None:
        """The first step that it made."""
        return min(self.observed, default=None)

    @property
    def last(self) -> int | None:
        return max(self.observed, default=None)

    def samples_after(self, step: int) -> int:
        """How many samples it went through after `step`."""
        return sum(len(one.samples) for number, one in self.observed.items() if number > step)


@dataclass(frozen=True, slots=True)
class Counted:
    """An observation that counts, and the launch that made it (from 1)."""

    launch: int
    observation: Observation


@dataclass(frozen=True)
class History:
    """One run: its launches in their order, each with what every rank saw."""

    launches: Sequence[Sequence[Seen]]

    def effective(self, rank: int) -> dict[int, Counted]:
        """What `rank` trained on in the end: step -> the observation that no later launch has undone."""
        found: dict[int, Counted] = {}
        for number, launch in enumerate(self.launches, start=1):
            seen = launch[rank]
            if seen.first is None:
                continue
            found = {step: one for step, one in found.items() if step < seen.first}
            found |= {step: Counted(number, one) for step, one in sorted(seen.observed.items())}
        return found

    def resumes(self, rank: int, start: int) -> dict[int, int]:
        """Launch -> its first step, for every launch after the first that began later than step `start`."""
        return {
            number: launch[rank].first or start
            for number, launch in enumerate(self.launches, start=1)
            if number > 1 and (launch[rank].first or start) > start
        }


def as_sample(value: Any) -> Sample:
    """What stands for one sample in a record: an int, or text."""
    item = getattr(value, "item", None)
    if callable(item):  # a NumPy scalar or a 0-d tensor
        value = item()
    if isinstance(value, bool | int):
        return int(value)
    return value if isinstance(value, str) else repr(value)


def as_samples(values: Iterable[Any]) -> tuple[Sample, ...]:
    """The samples of a step; a tensor's or an array's in its order."""
    to_list = getattr(values, "tolist", None)
    if callable(to_list):
        listed = to_list()
        values = listed if isinstance(listed, list) else [listed]
    return tuple(as_sample(value) for value in values)
