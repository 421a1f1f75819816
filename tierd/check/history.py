"""The records of launches: kill points, observations, and which observations of a killed run count.

Invariant: pure. A launch that begins at step s voids all earlier observations of step s and later, because the kill
lost those steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tierd.check.leaves import ValueLeaf
from tierd.core.errors import ConfigError

Sample = int | str
PYTHON, NUMPY, TORCH, CUDA = "Python's random", "numpy.random", "torch's CPU generator", "torch's CUDA generators"
GLOBAL = (PYTHON, NUMPY, TORCH, CUDA)  # the process's global generators
_KILL_POINT = re.compile(r"(\d+)(\+save|\+(\d+(?:\.\d+)?)ms)?")


@dataclass(frozen=True, slots=True)
class KillPoint:
    """The point at which a launch is killed.

    It is right after `step` was observed, `delay_ms` later, or in the middle of the first save of `step` or a later
    one.
    """

    step: int
    in_save: bool = False
    delay_ms: float = 0.0

    @classmethod
    def parse(cls, text: int | str) -> KillPoint:
        """Parse `7`, `7+save` or `7+10ms`; raises `ConfigError`."""
        match = _KILL_POINT.fullmatch(str(text).strip())
        if not match:
            raise ConfigError(f"kill point {text!r}: a step, as 7 (right after it), 7+save or 7+10ms")
        return cls(int(match[1]), match[2] == "+save", float(match[3] or 0))

    def __str__(self) -> str:
        return f"{self.step}{'+save' if self.in_save else f'+{self.delay_ms:g}ms' if self.delay_ms else ''}"


class Observation(msgspec.Struct, frozen=True):
    """One call of `tierd.observe`.

    Attributes:
        step: the observed step.
        samples: the step's samples.
        loss: in the format of `float.hex`, which keeps every bit.
        generators: digests of the states of the process's random number generators at the call, by name.
        epoch: the epoch of the samples.
        validation: samples that were used for evaluation.
    """

    step: int
    samples: tuple[Sample, ...]
    loss: str | None = None
    generators: dict[str, str] = {}
    epoch: int | None = None
    validation: tuple[Sample, ...] = ()


class Setting(msgspec.Struct, frozen=True):
    """The process settings for summation and hashing.

    They may differ between launches, and so change the last bits of a loss.
    """

    torch_threads: int | None = None
    omp_num_threads: str | None = None
    cpus: int | None = None
    hash_seed: str | None = None


class Taken(msgspec.Struct, frozen=True):
    """The captured state of a process at one moment.

    Attributes:
        step: the last step before the capture; for `loaded`, the checkpoint's step.
        at: the moment: `step` or `end`, when a step was observed; `save`, when a save began; `loaded`, after a restore;
            `forward`, at the first forward pass after that step; `backward`, right before the first backward pass
            after it, with nothing but gradients.
        entries: the values of the saved state by path, without loaders, samplers and datasets.
        forms: the form of each key of the saved state, by path: `object` (it returns its state at any moment),
            `values`, `both`, or `unread`. The prefix `other ` marks a key whose save got another object than the
            restore.
        note: how the state is known, `save` or `restore`, and the step; None if no state is known.
        beside: values in the process that are not in the saved state.
        evidence: values that are evidence for causes and are not compared: the attributes of loaders, samplers and
            datasets, gradients, and the process's global generators.
        kinds: the kinds of objects by the prefix of their paths: `weights`, `optimizer`, `scheduler`, `scaler`, `data`.
        loaders: how far the process's data loaders are, and the attributes of their samplers.
        orders: digests of the generators from which loaders and samplers draw.
        names: the names that the user gave to objects, by the prefix of their paths.
        owned: the paths in `evidence` of attributes of objects of the user's own classes.
        after: the last step that was observed before the capture, because a loop may count the steps of its saves from
            another number.
        carried: the names by which the user's code carries a value from one step to the next.
    """

    step: int
    at: str
    entries: dict[str, ValueLeaf]
    beside: dict[str, ValueLeaf]
    evidence: dict[str, ValueLeaf] = {}
    kinds: dict[str, str] = {}
    forms: dict[str, str] = {}
    note: tuple[str, int] | None = None
    loaders: dict[str, ValueLeaf] = {}
    orders: list[str] = []
    names: dict[str, str] = {}
    owned: list[str] = []
    after: int | None = None
    carried: list[str] = []


class RecordLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a record; exactly one member is set."""

    observed: Observation | None = None
    setting: Setting | None = None
    saving: int | None = None
    killing: str | None = None
    taken: Taken | None = None
    begun: Taken | None = None


@dataclass
class RankHistory:
    """The record of one rank in one launch.

    Attributes:
        begun: its state at the first forward pass that trains, after every load, if tierd restored nothing.
    """

    observed: dict[int, Observation] = field(default_factory=dict)
    setting: Setting | None = None
    saves: list[int] = field(default_factory=list)
    killing: str | None = None
    taken: list[Taken] = field(default_factory=list)
    begun: Taken | None = None

    def add(self, line: RecordLine) -> None:
        """Add one line of the record."""
        if line.observed is not None:
            self.observed[line.observed.step] = line.observed
        self.setting = line.setting or self.setting
        self.killing = line.killing or self.killing
        self.begun = line.begun or self.begun
        if line.saving is not None:
            self.saves.append(line.saving)
        if line.taken is not None:
            self.taken.append(line.taken)

    @property
    def first(self) -> int | None:
        """The first step that the launch made."""
        return min(self.observed, default=None)

    @property
    def last(self) -> int | None:
        return max(self.observed, default=None)

    @property
    def ended(self) -> bool:
        """Whether the state after the last step was captured."""
        return any(capture.at == "end" for capture in self.taken)

    def samples_after(self, step: int) -> int:
        """Return how many samples the rank read after `step`."""
        return sum(len(observation.samples) for number, observation in self.observed.items() if number > step)


@dataclass(frozen=True, slots=True)
class CountedObservation:
    """An observation that counts, and the launch that made it (from 1)."""

    launch: int
    observation: Observation


@dataclass(frozen=True)
class CheckedRun:
    """One run: its launches in order, each with the records of all ranks."""

    launches: Sequence[Sequence[RankHistory]]

    def effective(self, rank: int) -> dict[int, CountedObservation]:
        """Return the observations of `rank` that count: step -> the observation that no later launch has voided."""
        counted: dict[int, CountedObservation] = {}
        for number, launch in enumerate(self.launches, start=1):
            record = launch[rank]
            if record.first is None:
                continue
            counted = {step: entry for step, entry in counted.items() if step < record.first}
            counted |= {
                step: CountedObservation(number, observation) for step, observation in sorted(record.observed.items())
            }
        return counted

    def resumes(self, rank: int, start: int) -> dict[int, int]:
        """Return launch -> its first step, for every launch after the first that began later than step `start`."""
        return {
            number: launch[rank].first or start
            for number, launch in enumerate(self.launches, start=1)
            if number > 1 and (launch[rank].first or start) > start
        }


def as_sample(value: Any) -> Sample:
    """Convert one sample to its form in a record: an int, or text."""
    item = getattr(value, "item", None)
    if callable(item):  # a NumPy scalar or a 0-d tensor
        value = item()
    if isinstance(value, bool | int):
        return int(value)
    return value if isinstance(value, str) else repr(value)


def as_samples(values: Iterable[Any]) -> tuple[Sample, ...]:
    """Convert the samples of a step, keeping the order of a tensor or an array."""
    to_list = getattr(values, "tolist", None)
    if callable(to_list):
        listed = to_list()
        values = listed if isinstance(listed, list) else [listed]
    return tuple(as_sample(value) for value in values)
