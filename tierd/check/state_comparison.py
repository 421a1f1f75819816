"""Compare the state of two runs at the same step, entry by entry.

Invariant: pure. An entry counts only if two launches from the very start agreed on it. Clocks, names of processes and
unseeded generators are therefore never reported.

An entry counts only if both runs hold it in the same form. A loop may restore into something else than it trains with
and saves. A restored entry is therefore compared with nothing until the loop's next save shows what it saves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

import msgspec

from tierd.check.launch_records import CheckedRun, RankRecord, StateCapture, is_count_of_calls
from tierd.check.value_leaves import ValueLeaf, distinct_texts

_MAX_ENTRIES = 5  # entries that a report names, at most


class StateDifference(msgspec.Struct, frozen=True):
    """One entry of the state, or one value outside of it, that differs between the two runs.

    Attributes:
        path: `state["ema"]["0.weight"]`, or an object by its type and the place where it was created.
        step: the first step at which both runs were captured and differed.
        launch: the launch of the killed run that made this step.
        expected: the value in the uninterrupted run, for a reader.
        got: the value in the killed run, for a reader.
        magnitude: the largest distance between two of its numbers; None if it holds no numbers or the shapes differ.
        relative: the magnitude relative to the largest number.
        saved: whether the saved state contains it; None if no state was captured.
        passing: whether it is equal again after the last step; all other members are then of `step`.
    """

    rank: int
    path: str
    step: int
    launch: int
    expected: str
    got: str
    magnitude: float | None
    relative: float | None
    saved: bool | None
    passing: bool = False


def state_differences(
    reference: CheckedRun,
    killed: CheckedRun,
    rank: int,
    tolerance: float,
    ignore: Sequence[str] = (),
    rerun: CheckedRun | None = None,
) -> list[StateDifference]:
    """Return the differences after the last step, each with the first step that shows it, and then the passing ones.

    An entry that was lost may be right again after some steps, as the last few samples of a filter are. It was not
    restored all the same. Only entries of the saved state are passing differences, because other objects may be worked
    out again after a restore.

    The result is empty if only one of the runs was captured after the last step.

    Args:
        tolerance: relative; 0 compares every bit.
        ignore: paths, or `fnmatch` patterns of paths, that may differ, with everything below them.
        rerun: a second uninterrupted run, if there is one.
    """
    uninterrupted, pieces = effective_captures(reference, rank), effective_captures(killed, rank)
    last = _end_moment(uninterrupted, pieces)
    if last is None or pieces[last][0] == 1:
        return []
    shaky = nondeterministic_paths([run.launches[0][rank] for run in (reference, killed, rerun) if run is not None])
    launch = pieces[last][0]
    first: dict[str, int] = {}
    for key in sorted(key for key in uninterrupted.keys() & pieces.keys() if pieces[key][0] > 1):
        for path, *_ in _differing_leaves(
            a := uninterrupted[key][1], b := pieces[key][1], 0.0, incomparable_keys(a, b)
        ):
            first.setdefault(path, key[0])

    ends = uninterrupted[last][1], pieces[last][1]

    def counts(path: str) -> bool:
        if is_count_of_calls(path, ends[0].kinds):
            return False
        return path not in shaky and not any(_matches(path, pattern) for pattern in ignore)

    lasting = []
    for path, expected, actual in _differing_leaves(*ends, tolerance, incomparable_keys(*ends)):
        if counts(path):
            lasting.append(
                StateDifference(rank, path, first[path], launch, *_texts_and_distance(expected, actual), actual.saved)
            )
    lasting.sort(key=lambda difference: difference.saved is False)
    return lasting + [
        difference
        for difference in _passing_differences(uninterrupted, pieces, rank, tolerance, lasting)
        if counts(difference.path)
    ]


def _passing_differences(
    uninterrupted: _Captures, pieces: _Captures, rank: int, tolerance: float, lasting: Sequence[StateDifference]
) -> Iterator[StateDifference]:
    """Yield the entries that differed at a step or a save after a resume, and not after the last step."""
    reported = {difference.path for difference in lasting}
    for step, at in sorted(uninterrupted.keys() & pieces.keys()):
        launch, now = pieces[step, at]
        if launch == 1 or at not in ("step", "save"):
            continue
        then = uninterrupted[step, at][1]
        for path, expected, actual in _differing_leaves(then, now, tolerance, incomparable_keys(then, now)):
            if path in then.entries.keys() | now.entries.keys() and not is_path_within(path, reported):
                reported.add(path)
                yield StateDifference(
                    rank, path, step, launch, *_texts_and_distance(expected, actual), actual.saved, passing=True
                )


def count_compared_values(reference: CheckedRun, killed: CheckedRun, rank: int) -> int:
    """Count the values that were compared after the last step."""
    uninterrupted, pieces = effective_captures(reference, rank), effective_captures(killed, rank)
    last = _end_moment(uninterrupted, pieces)
    if last is None:
        return 0
    a, b = uninterrupted[last][1], pieces[last][1]
    incomparable = incomparable_keys(a, b)
    entries = sum(not path.startswith(incomparable) for path in a.entries.keys() & b.entries.keys())
    return entries + len(a.unsaved.keys() & b.unsaved.keys())


def count_missing_values(reference: CheckedRun, killed: CheckedRun, rank: int) -> int:
    """Count the values outside of the state that the killed run does not have after the last step."""
    uninterrupted, pieces = effective_captures(reference, rank), effective_captures(killed, rank)
    last = _end_moment(uninterrupted, pieces)
    return 0 if last is None else len(uninterrupted[last][1].unsaved.keys() - pieces[last][1].unsaved.keys())


_Captures = dict[tuple[int, str], tuple[int, StateCapture]]


def _end_moment(uninterrupted: _Captures, pieces: _Captures) -> tuple[int, str] | None:
    """Return the moment after the last step if both runs were captured then; no earlier moment can replace it."""
    return max((key for key in uninterrupted.keys() & pieces.keys() if key[1] == "end"), default=None)


def incomparable_keys(a: StateCapture, b: StateCapture) -> tuple[str, ...]:
    """Return the keys of the state that cannot be compared.

    - A key that is an object in one run and plain values in the other.
    - A key with plain values that are known from different steps.
    - A key that is known only from a restore, unless the other run saves the same object into which it restored.
    """
    if a.note is None or b.note is None:
        return tuple((a.forms | b.forms).keys())
    (how, step), (other_how, other_step) = a.note, b.note
    saved = how == other_how == "save"
    keys = []
    for key in a.forms.keys() | b.forms.keys():
        a_form, b_form = (capture.forms.get(key, "") for capture in (a, b))
        form = a_form.removeprefix("other ")
        if "" in (a_form, b_form):
            alike = saved
        elif saved:
            alike = form == b_form.removeprefix("other ")
        else:
            alike = a_form == b_form and how != other_how
        if not alike or (form in ("values", "both") and step != other_step):
            keys.append(key)
    return tuple(keys)


def effective_captures(history: CheckedRun, rank: int) -> _Captures:
    """Return the captured states of `rank` that count: (step, at) -> the launch that made the step, and the state."""
    captures: _Captures = {}
    for number, launch in enumerate(history.launches, start=1):
        record = launch[rank]
        if record.first_step is not None:
            captures = {key: numbered for key, numbered in captures.items() if key[0] < record.first_step}
            captures |= {(capture.step, capture.moment): (number, capture) for capture in record.captures}
    return captures


def nondeterministic_paths(launches: Sequence[RankRecord]) -> set[str]:
    """Return the paths on which launches from the start did not agree, so that no resume caused the difference."""
    first_launch, *other_launches = launches
    paths: set[str] = set()
    for capture, other_capture in _common_captures(first_launch, other_launches):
        paths |= {path for path, *_ in _differing_leaves(capture, other_capture, 0.0)}
        paths |= {
            path
            for path, leaf in other_capture.evidence.items()
            if capture.evidence.get(path, leaf).digest != leaf.digest
        }
    return paths


def has_common_capture(reference: CheckedRun, killed: CheckedRun, rank: int, path: str) -> bool:
    """Return whether the first launches of both runs were captured with this path at one moment, as
    `nondeterministic_paths` needs.

    A rank that is killed because another one died may not have come so far, and before its first save nothing is known
    of what it saves.
    """
    pairs = _common_captures(reference.launches[0][rank], [killed.launches[0][rank]])
    return any(
        path in first and path in second
        for capture, other in pairs
        for first, second in ((capture.entries, other.entries), (capture.unsaved, other.unsaved))
    )


def _common_captures(
    first_launch: RankRecord, other_launches: Iterable[RankRecord]
) -> Iterator[tuple[StateCapture, StateCapture]]:
    at = {(capture.step, capture.moment): capture for capture in first_launch.captures}
    return (
        (at[capture.step, capture.moment], capture)
        for launch in other_launches
        for capture in launch.captures
        if (capture.step, capture.moment) in at
    )


def _differing_leaves(
    a: StateCapture, b: StateCapture, tolerance: float, incomparable: tuple[str, ...] = ()
) -> Iterator[tuple[str, ValueLeaf, ValueLeaf]]:
    """Yield the paths that differ, with both leaves.

    Args:
        incomparable: keys of the state that are left out.
    """
    for expected, actual in ((a.entries, b.entries), (a.unsaved, b.unsaved)):
        for path, leaf in expected.items():
            actual_leaf = actual.get(path)
            if (
                actual_leaf is None
                or leaf.digest == actual_leaf.digest
                or (expected is a.entries and path.startswith(incomparable))
            ):
                continue
            _, relative = _distance(leaf, actual_leaf)
            if not (tolerance and relative is not None and relative <= tolerance):
                yield path, leaf, actual_leaf
        if expected is a.entries:
            for path in sorted(expected.keys() ^ actual.keys()):
                if path.startswith(incomparable):
                    continue
                absent = ValueLeaf("", "nothing")
                yield path, expected.get(path, absent), actual.get(path, absent)


def _texts_and_distance(a: ValueLeaf, b: ValueLeaf) -> tuple[str, str, float | None, float | None]:
    """Return both values for a reader, and their distance; where no number shows a distance, the texts differ."""
    distance, relative = _distance(a, b)
    texts = distinct_texts(a, b) if distance is None else (a.text, b.text)
    return *texts, distance, relative


def _distance(a: ValueLeaf, b: ValueLeaf) -> tuple[float | None, float | None]:
    if not a.sample or len(a.sample) != len(b.sample) or a.count != b.count:
        return None, None
    distance = max(abs(x - y) for x, y in zip(a.sample, b.sample, strict=True))
    if not distance:  # the bytes differ elsewhere, or in a sign of zero, or where a value is no number
        return None, None
    return distance, distance / max(map(abs, (*a.sample, *b.sample)))


def is_path_within(path: str, paths: Collection[str]) -> bool:
    """Return whether `path` is one of some paths, or below one."""
    return path in paths or any(path.startswith((f"{parent}[", f"{parent}.")) for parent in paths)


def _matches(path: str, pattern: str) -> bool:
    if path == pattern or path.startswith((f"{pattern}[", f"{pattern}.", f"{pattern} ")):
        return True
    escaped = re.sub(r"\[", "[[]", pattern)  # brackets are part of a path, and not of a pattern
    return fnmatchcase(path, escaped)


def difference_lines(states: Iterable[StateDifference]) -> list[str]:
    """Describe the first few differences for a reader."""
    listed = list(states)
    lines = [_describe(state) for state in listed[:_MAX_ENTRIES]]
    return lines + ([f"and {len(listed) - _MAX_ENTRIES} more"] if len(listed) > _MAX_ENTRIES else [])


def _describe(state: StateDifference) -> str:
    if state.magnitude is None:
        comparison = f"{state.expected} uninterrupted, {state.got} in the killed run"
    else:
        comparison = f"apart by {state.magnitude:.3g}"
        if state.relative:
            comparison += f" ({state.relative:.1e} of it)"
        if state.expected != state.got:
            comparison += f": {state.expected} uninterrupted, {state.got} in the killed run"
    where = "; not in the checkpoint" if state.saved is False else ""
    where += "; equal again later" if state.passing else ""
    return f"{state.path}: after step {state.step} {comparison}{where}"
