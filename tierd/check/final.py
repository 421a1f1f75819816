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

from tierd.check.history import History, RankHistory, Taken
from tierd.check.kinds import is_count_of_calls
from tierd.check.leaves import ValueLeaf
from tierd.check.texts import both_texts

_SHOWN = 5  # entries that a report names, at most


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


def differences(
    reference: History,
    killed: History,
    rank: int,
    tolerance: float,
    ignore: Sequence[str] = (),
    again: History | None = None,
) -> list[StateDifference]:
    """Return the differences after the last step, each with the first step that shows it, and then the passing ones.

    An entry that was lost may be right again after some steps, as the last few samples of a filter are. It was not
    restored all the same. Only entries of the saved state are passing differences, because other objects may be worked
    out again after a restore.

    The result is empty if only one of the runs was captured after the last step.

    Args:
        tolerance: relative; 0 compares every bit.
        ignore: paths, or `fnmatch` patterns of paths, that may differ, with everything below them.
        again: a second uninterrupted run, if there is one.
    """
    whole, pieces = taken(reference, rank), taken(killed, rank)
    last = _last(whole, pieces)
    if last is None or pieces[last][0] == 1:
        return []
    shaky = unsteady([one.launches[0][rank] for one in (reference, killed, again) if one is not None])
    launch = pieces[last][0]
    first: dict[str, int] = {}
    for key in sorted(key for key in whole.keys() & pieces.keys() if pieces[key][0] > 1):
        for path, *_ in _differing(a := whole[key][1], b := pieces[key][1], 0.0, of_other_forms(a, b)):
            first.setdefault(path, key[0])

    ends = whole[last][1], pieces[last][1]

    def counts(path: str) -> bool:
        if is_count_of_calls(path, ends[0].kinds):
            return False
        return path not in shaky and not any(_matches(path, pattern) for pattern in ignore)

    found = []
    for path, one, other in _differing(*ends, tolerance, of_other_forms(*ends)):
        if counts(path):
            found.append(StateDifference(rank, path, first[path], launch, *_shown(one, other), other.saved))
    found.sort(key=lambda one: one.saved is False)
    return found + [one for one in _passing(whole, pieces, rank, tolerance, found) if counts(one.path)]


def _passing(
    whole: _LastTaken, pieces: _LastTaken, rank: int, tolerance: float, found: Sequence[StateDifference]
) -> Iterator[StateDifference]:
    """Yield the entries that differed at a step or a save after a resume, and not after the last step."""
    known = {one.path for one in found}
    for step, at in sorted(whole.keys() & pieces.keys()):
        launch, now = pieces[step, at]
        if launch == 1 or at not in ("step", "save"):
            continue
        then = whole[step, at][1]
        for path, one, other in _differing(then, now, tolerance, of_other_forms(then, now)):
            if path in then.entries.keys() | now.entries.keys() and not _is_below(path, known):
                known.add(path)
                yield StateDifference(rank, path, step, launch, *_shown(one, other), other.saved, passing=True)


def compared(reference: History, killed: History, rank: int) -> int:
    """Count the values that were compared after the last step."""
    whole, pieces = taken(reference, rank), taken(killed, rank)
    last = _last(whole, pieces)
    if last is None:
        return 0
    a, b = whole[last][1], pieces[last][1]
    apart = of_other_forms(a, b)
    entries = sum(not path.startswith(apart) for path in a.entries.keys() & b.entries.keys())
    return entries + len(a.beside.keys() & b.beside.keys())


_LastTaken = dict[tuple[int, str], tuple[int, Taken]]


def _last(whole: _LastTaken, pieces: _LastTaken) -> tuple[int, str] | None:
    """Return the moment after the last step if both runs were captured then; no earlier moment can replace it."""
    return max((key for key in whole.keys() & pieces.keys() if key[1] == "end"), default=None)


def of_other_forms(a: Taken, b: Taken) -> tuple[str, ...]:
    """Return the keys of the state that cannot be compared.

    - A key that is an object in one run and plain values in the other.
    - A key with plain values that are known from different steps.
    - A key that is known only from a restore, unless the other run saves the same object into which it restored.
    """
    if a.note is None or b.note is None:
        return tuple((a.forms | b.forms).keys())
    (how, step), (other_how, other_step) = a.note, b.note
    saved = how == other_how == "save"
    found = []
    for key in a.forms.keys() | b.forms.keys():
        ours, theirs = (one.forms.get(key, "") for one in (a, b))
        form = ours.removeprefix("other ")
        if "" in (ours, theirs):
            alike = saved
        elif saved:
            alike = form == theirs.removeprefix("other ")
        else:
            alike = ours == theirs and how != other_how
        if not alike or (form in ("values", "both") and step != other_step):
            found.append(key)
    return tuple(found)


def taken(history: History, rank: int) -> _LastTaken:
    """Return the captured states of `rank` that count: (step, at) -> the launch that made the step, and the state."""
    found: _LastTaken = {}
    for number, launch in enumerate(history.launches, start=1):
        seen = launch[rank]
        if seen.first is not None:
            found = {key: one for key, one in found.items() if key[0] < seen.first}
            found |= {(one.step, one.at): (number, one) for one in seen.taken}
    return found


def unsteady(begun: Sequence[RankHistory]) -> set[str]:
    """Return the paths on which launches from the start did not agree, so that no resume caused the difference."""
    whole, *others = begun
    found: set[str] = set()
    for one, other in _common(whole, others):
        found |= {path for path, *_ in _differing(one, other, 0.0)}
        found |= {path for path, leaf in other.evidence.items() if one.evidence.get(path, leaf).digest != leaf.digest}
    return found


def has_common_moment(reference: History, killed: History, rank: int) -> bool:
    """Return whether the first launches of both runs were captured at one moment, so that `unsteady` can tell.

    A rank that is killed because another one died may not have come so far.
    """
    return any(True for _ in _common(reference.launches[0][rank], [killed.launches[0][rank]]))


def _common(whole: RankHistory, others: Iterable[RankHistory]) -> Iterator[tuple[Taken, Taken]]:
    at = {(one.step, one.at): one for one in whole.taken}
    return ((at[one.step, one.at], one) for other in others for one in other.taken if (one.step, one.at) in at)


def _differing(
    a: Taken, b: Taken, tolerance: float, apart: tuple[str, ...] = ()
) -> Iterator[tuple[str, ValueLeaf, ValueLeaf]]:
    """Yield the paths that differ, with both leaves.

    Args:
        apart: keys of the state that are left out.
    """
    for ours, theirs in ((a.entries, b.entries), (a.beside, b.beside)):
        for path, leaf in ours.items():
            other = theirs.get(path)
            if other is None or leaf.digest == other.digest or (ours is a.entries and path.startswith(apart)):
                continue
            _, relative = _apart(leaf, other)
            if not (tolerance and relative is not None and relative <= tolerance):
                yield path, leaf, other
        if ours is a.entries:
            for path in sorted(ours.keys() ^ theirs.keys()):
                if path.startswith(apart):
                    continue
                gone = ValueLeaf("", "nothing")
                yield path, ours.get(path, gone), theirs.get(path, gone)


def _shown(a: ValueLeaf, b: ValueLeaf) -> tuple[str, str, float | None, float | None]:
    """Return both values for a reader, and their distance; where no number shows a distance, the texts differ."""
    distance, relative = _apart(a, b)
    texts = both_texts(a, b) if distance is None else (a.text, b.text)
    return *texts, distance, relative


def _apart(a: ValueLeaf, b: ValueLeaf) -> tuple[float | None, float | None]:
    if not a.sample or len(a.sample) != len(b.sample) or a.count != b.count:
        return None, None
    distance = max(abs(x - y) for x, y in zip(a.sample, b.sample, strict=True))
    if not distance:  # the bytes differ elsewhere, or in a sign of zero, or where a value is no number
        return None, None
    return distance, distance / max(map(abs, (*a.sample, *b.sample)))


def _is_below(path: str, known: Collection[str]) -> bool:
    return path in known or any(path.startswith((f"{one}[", f"{one}.")) for one in known)


def _matches(path: str, pattern: str) -> bool:
    if path == pattern or path.startswith((f"{pattern}[", f"{pattern}.", f"{pattern} ")):
        return True
    escaped = re.sub(r"\[", "[[]", pattern)  # brackets are part of a path, and not of a pattern
    return fnmatchcase(path, escaped)


def summary(found: Iterable[StateDifference]) -> list[str]:
    """Describe the first few differences for a reader."""
    listed = list(found)
    lines = [_line(one) for one in listed[:_SHOWN]]
    return lines + ([f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else [])


def _line(one: StateDifference) -> str:
    if one.magnitude is None:
        apart = f"{one.expected} uninterrupted, {one.got} in the killed run"
    else:
        apart = f"apart by {one.magnitude:.3g}"
        if one.relative:
            apart += f" ({one.relative:.1e} of it)"
        if one.expected != one.got:
            apart += f": {one.expected} uninterrupted, {one.got} in the killed run"
    where = "; not in the checkpoint" if one.saved is False else ""
    where += "; equal again later" if one.passing else ""
    return f"{one.path}: after step {one.step} {apart}{where}"
