"""Find the values that were lost by a load, and those that differ before the first step after it.

Invariant: pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from tierd.check.carried import name_of
from tierd.check.final import of_other_forms
from tierd.check.finding import StateFinding
from tierd.check.history import GLOBAL, Taken
from tierd.check.kinds import DATA, is_count_of_calls, kind_of_path, same, values
from tierd.check.leaves import ValueLeaf
from tierd.check.texts import both_texts

_ATTRIBUTE = re.compile(r" of \S+:\d+( \(\d+ of \d+\))?[.\w]*\.\w+$")  # of a module, by its place of creation
_LOCAL_VARIABLE = re.compile(r"\w+\(\) \w")
# Kinds whose values are the checkpoint's if they were loaded, by whatever code.
_LOADED_KINDS = frozenset({"weights", "optimizer", "scheduler", "scaler", "mode", "generator", "gradients"})


class Comparison:
    """The captures of an uninterrupted and of a killed run around one resume.

    Args:
        saved: the uninterrupted run at the save; None if that is unknown.
        loaded: the killed run right after the load.
        is_later: a framework gives the loaded values to its objects later, and none to a variable of the user's own.
        earlier: the uninterrupted run's capture before `then`.
        then: the uninterrupted run before step `first_step`, or after it.
        before: the killed run at the same moment.
        first: the uninterrupted run before its very first step.
    """

    def __init__(
        self,
        saved: Taken | None,
        loaded: Taken | None,
        is_later: bool,
        earlier: Taken | None,
        then: Taken,
        before: Taken,
        first_step: int,
        first: Taken | None,
    ) -> None:
        self._saved, self._loaded, self._is_later, self._then = saved, loaded, is_later, then
        incomparable = of_other_forms(then, before)
        self._expected, self._actual = (
            {path: leaf for path, leaf in values(capture).items() if not path.startswith(incomparable)}
            for capture in (then, before)
        )
        paths = self._expected.keys() | self._actual.keys()
        self._kinds = then.kinds | before.kinds
        self._differing_paths = {
            path
            for path in paths
            if not same(self._expected.get(path), self._actual.get(path)) and not is_count_of_calls(path, self._kinds)
        }
        self._weak_paths = {*then.owned, *before.owned}
        self._own_paths = self._weak_paths | {path for path in then.beside if _LOCAL_VARIABLE.match(path)}
        self._at_save, self._at_load = self._values_around_load()
        self._at_first = values(earlier) if earlier else {}
        self._initial = values(first) if first else {}
        self._carried_names = {*then.carried, *before.carried}
        self._first_step = first_step
        self._is_after_step = before.at != "forward"
        self._moment = f"{'after' if self._is_after_step else 'before'} step {first_step}"

    def _values_around_load(self) -> tuple[dict[str, ValueLeaf], dict[str, ValueLeaf]]:
        if self._saved is None or self._loaded is None:
            return {}, {}
        at_save, at_load = values(self._saved), values(self._loaded)
        if not self._is_later:
            return at_save, at_load
        evidence = self._saved.evidence
        own_paths = {path for path in at_save | at_load if path in self._own_paths or _is_outside(path, evidence)}
        return {path: at_save[path] for path in own_paths & at_save.keys()}, {
            path: at_load[path] for path in own_paths & at_load.keys()
        }

    def findings(self) -> Iterator[StateFinding]:
        """Yield the values that were lost by the load, and then those that differ."""
        reported: set[str] = set()
        for path, was in self._at_save.items():
            now = self._at_load.get(path)
            if now is None and (_LOCAL_VARIABLE.match(path) or path in self._weak_paths):
                continue  # a variable or an attribute that the loop assigns only later
            if same(was, now) or is_within(path, reported):
                continue
            if path not in self._differing_paths and not _is_above(path, self._differing_paths):
                continue
            reported.add(path)
            if (finding := self._lost_finding(path, was, now)) is not None:
                yield finding
        for path in sorted(self._differing_paths & self._expected.keys()):
            if path in self._actual:
                if not is_within(path, reported) and (changed := self._changed_finding(path)) is not None:
                    yield changed
            elif path.startswith("gradient of ") and (self._is_later or not self._at_save):
                says = f"{path}: {self._expected[path].text} uninterrupted {self._moment}, none here"
                yield StateFinding("gradients", path, says)

    def overwritten(self, batches: Sequence[Taken]) -> Iterator[StateFinding]:
        """Yield what the load lost, and what the first batch sets rightly again after it has read the wrong value.

        These are tensors that each batch changes, as of a collator that mixes a batch with the one before.

        Args:
            batches: the uninterrupted run before the forward passes of several steps.
        """
        for path, was in self._at_save.items():
            now = self._at_load.get(path)
            if now is None or same(was, now) or path not in self._own_paths or name_of(path) not in self._carried_names:
                continue
            tensors = {
                tensor for tensor, leaf in self._at_save.items() if is_within(tensor, {path}) and _is_tensor(leaf)
            }
            digests = [{leaf.digest for at in batches if (leaf := values(at).get(tensor))} for tensor in tensors]
            if (
                not tensors
                or tensors & self._differing_paths
                or not all(len(distinct) == len(batches) > 2 for distinct in digests)
            ):
                continue
            if (finding := self._lost_finding(path, was, now)) is not None:
                says = f"{finding.says}; the batch of step {self._first_step} reads it, and then sets it anew"
                yield msgspec.structs.replace(finding, says=says)

    def _lost_finding(self, path: str, was: ValueLeaf, now: ValueLeaf | None) -> StateFinding | None:
        assert self._saved is not None
        is_unsaved = was.saved is False
        kind = kind_of_path(path, self._kinds, was.text, now.text if now else "", was, now)
        if now is None and kind == "data" and path in self._saved.evidence:
            return None  # a variable of a stream that begins only with the next sample
        if is_unsaved and kind in DATA:
            kind = "buffer" if kind == "order" else kind
        elif is_unsaved and kind != "generator":
            kind = "not in the checkpoint"
        then, text = both_texts(was, now) if now else (was.text, "gone")
        says = f"{path}: {then} at the save of step {self._saved.step}, {text} right after the load"
        says += "; the state that is saved does not have it" if is_unsaved else ""
        says += "; put tierd.RngState() into the state" if path in GLOBAL and not _has_generators(self._saved) else ""
        return StateFinding(kind, path, says, lost=True, weak=path in self._weak_paths)

    def _changed_finding(self, path: str) -> StateFinding | None:
        was, now = self._expected[path], self._actual[path]
        kind = kind_of_path(path, self._kinds, was.text, now.text, was, now)
        is_local = _LOCAL_VARIABLE.match(path) is not None and path not in self._at_load and kind != "generator"
        is_reset = self._is_reset_to_start(path, kind)
        if is_local and not is_reset and (self._is_after_step or not self._existed_at_load(path)):
            return None  # a consequence of another value
        if self._loaded is None and not is_reset and not self._is_loaded(path, kind):
            return None
        if was.saved is False and kind not in DATA | {"generator"}:
            kind = "not in the checkpoint"
        uninterrupted, killed = both_texts(was, now)
        if is_reset:
            says = f"{path}: {killed} {self._moment}, as before the very first step, {uninterrupted} uninterrupted"
            return StateFinding(kind, path, f"{says}: no load brought it back", lost=True, weak=self._is_weak(path))
        when = "as at the save right after the load, and " if path in self._at_load else ""
        return StateFinding(
            kind,
            path,
            f"{path}: {when}{killed} {self._moment}, {uninterrupted} uninterrupted",
            moved=not same(self._at_first.get(path), was),
            late=self._is_after_step,
            weak=self._is_weak(path) or is_local,
        )

    def _is_weak(self, path: str) -> bool:
        return path in self._own_paths or _is_outside(path, self._then.evidence)

    def _is_loaded(self, path: str, kind: str) -> bool:
        """Return whether a value is one that a load sets, where the load was not seen, and no variable of a loop."""
        is_entry = kind in _LOADED_KINDS or (kind == "buffers" and path.endswith('"]'))
        return is_entry and not self._is_weak(path)

    def _is_reset_to_start(self, path: str, kind: str) -> bool:
        """Return whether a value is again what it was before the very first step, where no save was seen.

        The loop has to carry it from step to step, because what each step sets is right after the first one.
        """
        if self._at_save or self._is_after_step or self._is_loaded(path, kind):
            return False
        is_carried = name_of(path) in self._carried_names
        return is_carried and path in self._initial and same(self._initial[path], self._actual[path])

    def _existed_at_load(self, path: str) -> bool:
        """Return whether a local variable may have been there at the load, as a variable of the step was not."""
        if self._loaded is None:
            return True
        return path in values(self._loaded) and (not self._is_later or path in self._own_paths)


def _is_tensor(leaf: ValueLeaf) -> bool:
    return leaf.count is not None and bool(leaf.sample) and " items" not in leaf.text


def is_within(path: str, reported: Collection[str]) -> bool:
    """Return whether `path` is one of some paths, or below one."""
    return path in reported or any(path.startswith((f"{above}[", f"{above}.")) for above in reported)


def _is_above(path: str, differ: Collection[str]) -> bool:
    return any(below.startswith((f"{path}[", f"{path}.")) for below in differ)


def _is_outside(path: str, evidence: Mapping[str, ValueLeaf]) -> bool:
    """Return whether a value is a number or text of an object that no saved state has, as the rate of a dropout."""
    leaf = evidence.get(path)
    return leaf is not None and leaf.saved is not True and leaf.count is None and _ATTRIBUTE.search(path) is not None


def _has_generators(saved: Taken) -> bool:
    """Return whether the saved state has the process's generators."""
    return any(path.endswith('["python"][0]') for path in saved.entries)
