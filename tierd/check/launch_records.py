"""The records of launches: kill points, observations, captured states, and the kinds of the captured values.

Invariant: pure. A launch that begins at step s voids all earlier observations of step s and later, because the kill
lost those steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tierd.check.value_leaves import ValueLeaf
from tierd.core.errors import ConfigError

Sample = int | str
GLOBAL_GENERATORS = PYTHON_GENERATOR, NUMPY_GENERATOR, TORCH_GENERATOR, CUDA_GENERATORS = (  # of the process
    "Python's random",
    "numpy.random",
    "torch's CPU generator",
    "torch's CUDA generators",
)
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
    """One call of `tierd.observe`."""

    step: int  # the observed step
    samples: tuple[Sample, ...]  # the step's samples
    loss: str | None = None  # in the format of `float.hex`, which keeps every bit
    # digests of the states of the process's random number generators at the call, by name
    generators: dict[str, str] = {}
    epoch: int | None = None  # the epoch of the samples
    validation: tuple[Sample, ...] = ()  # samples that were used for evaluation


class ProcessSettings(msgspec.Struct, frozen=True):
    """The process settings for summation and hashing.

    They may differ between launches, and so change the last bits of a loss.
    """

    torch_threads: int | None = None
    omp_num_threads: str | None = None
    cpus: int | None = None
    hash_seed: str | None = None


class StateCapture(msgspec.Struct, frozen=True):
    """The captured state of a process at one moment."""

    step: int  # the last step before the capture; for `loaded`, the checkpoint's step
    # the moment: `step` or `end`, when a step was observed; `save`, when a save began; `loaded`, after a restore;
    # `forward`, at the first forward pass after that step; `backward`, right before the first backward pass after it,
    # with nothing but gradients
    moment: str
    entries: dict[str, ValueLeaf]  # the values of the saved state by path, without loaders, samplers and datasets
    unsaved: dict[str, ValueLeaf]  # values in the process that are not in the saved state
    # values that are evidence for causes and are not compared: the attributes of loaders, samplers and datasets,
    # gradients, and the process's global generators
    evidence: dict[str, ValueLeaf] = {}
    # the kinds of objects by the prefix of their paths: `weights`, `optimizer`, `scheduler`, `scaler`, `data`
    kinds: dict[str, str] = {}
    # the form of each key of the saved state, by path: `object` (it returns its state at any moment), `values`, `both`,
    # or `unread`. The prefix `other ` marks a key whose save got another object than the restore.
    forms: dict[str, str] = {}
    # how the state is known, `save` or `restore`, and the step; None if no state is known
    note: tuple[str, int] | None = None
    loaders: dict[str, ValueLeaf] = {}  # how far the process's data loaders are, and the attributes of their samplers
    order_digests: list[str] = []  # digests of the generators from which loaders and samplers draw
    names: dict[str, str] = {}  # the names that the user gave to objects, by the prefix of their paths
    user_paths: list[str] = []  # the paths in `evidence` of attributes of objects of the user's own classes
    # the last step that was observed before the capture, because a loop may count the steps of its saves from another
    # number
    after: int | None = None
    carried_names: list[str] = []  # the names by which the user's code carries a value from one step to the next


BEFORE_FIRST_STEP = -1  # in place of a step: before the launch's first one


class RecordLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a record; exactly one member is set."""

    observation: Observation | None = None
    setting: ProcessSettings | None = None
    saving_step: int | None = None
    kill_point: str | None = None
    capture: StateCapture | None = None
    start_capture: StateCapture | None = None


@dataclass
class RankRecord:
    """The record of one rank in one launch."""

    observations: dict[int, Observation] = field(default_factory=dict)
    setting: ProcessSettings | None = None
    saved_steps: list[int] = field(default_factory=list)
    kill_point: str | None = None
    captures: list[StateCapture] = field(default_factory=list)
    # its state at the first forward pass that trains, after every load, if tierd restored nothing
    start_capture: StateCapture | None = None

    def add(self, line: RecordLine) -> None:
        if line.observation is not None:
            self.observations[line.observation.step] = line.observation
        self.setting = line.setting or self.setting
        self.kill_point = line.kill_point or self.kill_point
        self.start_capture = line.start_capture or self.start_capture
        if line.saving_step is not None:
            self.saved_steps.append(line.saving_step)
        if line.capture is not None:
            if line.capture.moment in ("forward", "backward"):  # an earlier pass was an evaluation, or before a load
                key = line.capture.step, line.capture.moment
                self.captures = [capture for capture in self.captures if (capture.step, capture.moment) != key]
            self.captures.append(line.capture)

    @property
    def first_step(self) -> int | None:
        """The first step that the launch made."""
        return min(self.observations, default=None)

    @property
    def last_step(self) -> int | None:
        return max(self.observations, default=None)

    @property
    def is_finished(self) -> bool:
        """Whether the state after the last step was captured."""
        return any(capture.moment == "end" for capture in self.captures)

    def samples_after(self, step: int) -> int:
        """Return how many samples the rank read after `step`."""
        return sum(len(observation.samples) for number, observation in self.observations.items() if number > step)


@dataclass(frozen=True, slots=True)
class CountedObservation:
    """An observation that counts, and the launch that made it (from 1)."""

    launch: int
    observation: Observation


@dataclass(frozen=True)
class CheckedRun:
    """One run: its launches in order, each with the records of all ranks."""

    launches: Sequence[Sequence[RankRecord]]

    def effective_observations(self, rank: int) -> dict[int, CountedObservation]:
        """Return the observations of `rank` that count: step -> the observation that no later launch has voided."""
        counted: dict[int, CountedObservation] = {}
        for number, launch in enumerate(self.launches, start=1):
            record = launch[rank]
            if record.first_step is None:
                continue
            counted = {step: entry for step, entry in counted.items() if step < record.first_step}
            counted |= {
                step: CountedObservation(number, observation)
                for step, observation in sorted(record.observations.items())
            }
        return counted

    def first_steps_of_resumes(self, rank: int, start: int) -> dict[int, int]:
        """Return launch -> its first step, for every launch after the first that began later than step `start`."""
        return {
            number: launch[rank].first_step or start
            for number, launch in enumerate(self.launches, start=1)
            if number > 1 and (launch[rank].first_step or start) > start
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


POSITION_LABEL = "batches read"  # the end of the path of how far a loader is
DATA_KINDS = frozenset({"position", "epoch", "shuffle", "buffer", "prefetch", "order", "data"})
_EPOCH, _SEED = re.compile(r"epoch"), re.compile(r"seed")
_POSITION = re.compile(r"position|pos|sample|index|idx|offset|cursor|consumed|yielded|drawn|read|at")
_PREFETCH = re.compile(r"queue|prefetch")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_CALL_COUNTS = ('["_step_count"]', '["_is_initial"]', '["_get_lr_called_within_step"]')
_OF_DATA = re.compile(r"\(\)( \w+)?\.")  # of a running generator function, or of a variable of the loop


def captured_values(capture: StateCapture) -> dict[str, ValueLeaf]:
    """Return every value of a capture by its path."""
    return capture.entries | capture.unsaved | capture.evidence


def is_same_value(a: ValueLeaf | None, b: ValueLeaf | None) -> bool:
    """Return whether both are missing, or equal to the last bit."""
    return a is b is None or (a is not None and b is not None and a.digest == b.digest)


def is_count_of_calls(path: str, kinds: Mapping[str, str]) -> bool:
    """Return whether torch's schedulers keep the value for a warning alone.

    A scheduler that is made anew with `last_epoch` is right without it.
    """
    return path.endswith(_CALL_COUNTS) and kind_of_path(path, kinds) == "scheduler"


def kind_of_path(
    path: str,
    kinds: Mapping[str, str],
    was: str = "",
    now: str = "",
    a: ValueLeaf | None = None,
    b: ValueLeaf | None = None,
) -> str:
    """Name the kind of the value at `path`."""
    if path.startswith("gradient of "):
        return "gradients"
    if path.endswith((".training", ".requires_grad")):
        return "mode"
    if "generator" in (was[:9], now[:9]):
        return "generator"
    if path in kinds:
        return kinds[path]
    owner = max((prefix for prefix in kinds if path.startswith(prefix)), key=len, default="")
    kind = kinds.get(owner, "data" if _OF_DATA.search(path) else "state")
    if kind == "weights" and not path.startswith(f'{owner}["'):  # an attribute: a tensor, or a number
        return "state" if a is not None and a.count is None else "buffers"
    return data_kind(path, a, b) if kind == "data" else kind


def data_kind(path: str, a: ValueLeaf | None, b: ValueLeaf | None) -> str:
    """Name the kind of a data pipeline's attribute, by its name and its content."""
    names = _IDENTIFIER.findall(path)
    name = names[-1].lower() if names else ""
    if a is not None and b is not None and a.count is not None and a.count == b.count:
        return "order"  # different items, in the same number
    if (a is not None and a.count is not None) or (b is not None and b.count is not None):
        return "prefetch" if _PREFETCH.search(name) else "buffer"
    if _SEED.search(name):
        return "shuffle"
    if _EPOCH.search(name):
        return "epoch"
    if re.search(r"\[\d+\]$", path):
        return "data"
    return "position" if any(_POSITION.fullmatch(part) for part in name.split("_")) else "data"


def position_of(path: str) -> str | None:
    """Return the loader whose batches are at `path`; None if they are not."""
    return path.removesuffix(f": {POSITION_LABEL}") if path.endswith(POSITION_LABEL) else None
