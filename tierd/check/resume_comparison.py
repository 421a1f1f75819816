"""Choose the captures around a resume, and find the values that its load lost, and those that differ after it.

Invariant: pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tierd.check.launch_records import (
    DATA_KINDS,
    GLOBAL_GENERATORS,
    RankRecord,
    StateCapture,
    captured_values,
    is_count_of_calls,
    is_same_value,
    kind_of_path,
)
from tierd.check.source_analysis import variable_of_path
from tierd.check.state_comparison import incomparable_keys, is_path_within
from tierd.check.value_leaves import ValueLeaf, distinct_texts


class StateFinding(msgspec.Struct, frozen=True):
    """One value that was not restored (`lost`), or that differs since.

    `says` has its path and its values at both moments. `moved_by_training` tells that the uninterrupted run changes it
    as well, and `is_after_step` that it was captured after the step, so that the difference may follow from another
    value. `weak` tells that it is an attribute of the user's own object, of which many change nothing.
    """

    kind: str
    path: str
    says: str
    lost: bool = False
    weak: bool = False
    moved_by_training: bool = False
    is_after_step: bool = False

    @property
    def is_sure(self) -> bool:
        """Whether it cannot follow from another value."""
        return self.lost or not (self.moved_by_training or self.is_after_step)


def is_load_deferred(saved: StateCapture, loaded: StateCapture) -> bool:
    """Return whether the loop only read values, and gives them to its objects itself: a framework does so."""
    forms = [(saved.forms.get(key, ""), form) for key, form in loaded.forms.items()]
    return any(then.endswith(("object", "both")) and now.endswith("values") for then, now in forms)


def find_capture(record: RankRecord, at: str, step: int | None = None) -> StateCapture | None:
    return next((capture for capture in record.captures if capture.moment == at and step in (None, capture.step)), None)


def capture_before(uninterrupted: RankRecord, then: StateCapture) -> StateCapture | None:
    """Return the last capture before `then`, after a step or at a save."""
    earlier = [
        capture
        for capture in uninterrupted.captures[: uninterrupted.captures.index(then)]
        if capture.moment in ("step", "save")
    ]
    return earlier[-1] if earlier else None


def first_step_captures(
    uninterrupted: RankRecord, resumed: RankRecord, first_step: int
) -> tuple[StateCapture, StateCapture] | None:
    """Return both runs' states at the first step: right before its forward pass, or else when it was observed."""
    # After a restore the first one is the first step's, whatever the number of the checkpoint.
    restored = resumed.start_capture is None or find_capture(resumed, "loaded") is not None
    first = find_capture(resumed, "forward") if restored else resumed.start_capture
    pairs = [(find_capture(uninterrupted, "forward", first_step - 1), first)]
    pairs += [
        (find_capture(uninterrupted, at, first_step), find_capture(resumed, at, first_step)) for at in ("step", "end")
    ]
    return next(((then, before) for then, before in pairs if then is not None and before is not None), None)


_ATTRIBUTE = re.compile(r" of \S+:\d+( \(\d+ of \d+\))?[.\w]*\.\w+$")  # of a module, by its place of creation
_LOCAL_VARIABLE = re.compile(r"\w+\(\) \w")
# Kinds whose values are the checkpoint's if they were loaded, by whatever code.
_LOADED_KINDS = frozenset({"weights", "optimizer", "scheduler", "scaler", "mode", "generator", "gradients"})


class ResumeComparison:
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
        saved: StateCapture | None,
        loaded: StateCapture | None,
        is_later: bool,
        earlier: StateCapture | None,
        then: StateCapture,
        before: StateCapture,
        first_step: int,
        first: StateCapture | None,
    ) -> None:
        self._saved, self._loaded, self._is_later, self._then = saved, loaded, is_later, then
        incomparable = incomparable_keys(then, before)
        self._expected, self._actual = (
            {path: leaf for path, leaf in captured_values(capture).items() if not path.startswith(incomparable)}
            for capture in (then, before)
        )
        paths = self._expected.keys() | self._actual.keys()
        self._kinds = then.kinds | before.kinds
        self._differing_paths = {
            path
            for path in paths
            if not is_same_value(self._expected.get(path), self._actual.get(path))
            and not is_count_of_calls(path, self._kinds)
        }
        self._weak_paths = {*then.user_paths, *before.user_paths}
        self._own_paths = self._weak_paths | {path for path in then.unsaved if _LOCAL_VARIABLE.match(path)}
        self._at_save, self._at_load = self._values_around_load()
        self._at_first = captured_values(earlier) if earlier else {}
        self._initial = captured_values(first) if first else {}
        self._carried_names = {*then.carried_names, *before.carried_names}
        self._first_step = first_step
        self._is_after_step = before.moment != "forward"
        self._moment = f"{'after' if self._is_after_step else 'before'} step {first_step}"

    def _values_around_load(self) -> tuple[dict[str, ValueLeaf], dict[str, ValueLeaf]]:
        if self._saved is None or self._loaded is None:
            return {}, {}
        at_save, at_load = captured_values(self._saved), captured_values(self._loaded)
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
            if is_same_value(was, now) or is_path_within(path, reported):
                continue
            if path not in self._differing_paths and not any(
                below.startswith((f"{path}[", f"{path}.")) for below in self._differing_paths
            ):
                continue
            reported.add(path)
            if (finding := self._lost_finding(path, was, now)) is not None:
                yield finding
        for path in sorted(self._differing_paths & self._expected.keys()):
            if path in self._actual:
                if not is_path_within(path, reported) and (changed := self._changed_finding(path)) is not None:
                    yield changed
            elif path.startswith("gradient of ") and (self._is_later or not self._at_save):
                says = f"{path}: {self._expected[path].text} uninterrupted {self._moment}, none here"
                yield StateFinding("gradients", path, says)

    def overwritten_findings(self, batches: Sequence[StateCapture]) -> Iterator[StateFinding]:
        """Yield what the load lost, and what the first batch sets rightly again after it has read the wrong value.

        These are tensors that each batch changes, as of a collator that mixes a batch with the one before.

        Args:
            batches: the uninterrupted run before the forward passes of several steps.
        """
        for path, was in self._at_save.items():
            now = self._at_load.get(path)
            if (
                now is None
                or is_same_value(was, now)
                or path not in self._own_paths
                or variable_of_path(path) not in self._carried_names
            ):
                continue
            tensors = {
                tensor for tensor, leaf in self._at_save.items() if is_path_within(tensor, {path}) and _is_tensor(leaf)
            }
            digests = [
                {leaf.digest for at in batches if (leaf := captured_values(at).get(tensor))} for tensor in tensors
            ]
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
        if is_unsaved and kind in DATA_KINDS:
            kind = "buffer" if kind == "order" else kind
        elif is_unsaved and kind != "generator":
            kind = "not in the checkpoint"
        then, text = distinct_texts(was, now) if now else (was.text, "gone")
        says = f"{path}: {then} at the save of step {self._saved.step}, {text} right after the load"
        says += "; the state that is saved does not have it" if is_unsaved else ""
        says += (
            "; put tierd.RngState() into the state"
            if path in GLOBAL_GENERATORS and not _has_generators(self._saved)
            else ""
        )
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
        if was.saved is False and kind not in DATA_KINDS | {"generator"}:
            kind = "not in the checkpoint"
        uninterrupted, killed = distinct_texts(was, now)
        if is_reset:
            says = f"{path}: {killed} {self._moment}, as before the very first step, {uninterrupted} uninterrupted"
            return StateFinding(kind, path, f"{says}: no load brought it back", lost=True, weak=self._is_weak(path))
        when = "as at the save right after the load, and " if path in self._at_load else ""
        return StateFinding(
            kind,
            path,
            f"{path}: {when}{killed} {self._moment}, {uninterrupted} uninterrupted",
            moved_by_training=not is_same_value(self._at_first.get(path), was),
            is_after_step=self._is_after_step,
            weak=self._is_weak(path) or is_local,
        )

    def _is_weak(self, path: str) -> bool:
        return path in self._own_paths or _is_outside(path, self._then.evidence)

    def _is_loaded(self, path: str, kind: str) -> bool:
        """Return whether a value is one that a load sets, where the load was not seen.

        A variable of a loop is none, but for a generator, which moves by its draws alone.
        """
        if kind in ("mode", "generator"):
            return True
        is_entry = kind in _LOADED_KINDS or (kind == "buffers" and path.endswith('"]'))
        return is_entry and not self._is_weak(path)

    def used_differences(self) -> dict[str, str]:
        """Return the values that differ and that the step may use, with a text for each.

        Of the values that the user's code keeps, these are the ones that it carries from step to step.
        """
        texts: dict[str, str] = {}
        for path in sorted(self._differing_paths & self._expected.keys() & self._actual.keys()):
            if not self._is_weak(path) or variable_of_path(path) in self._carried_names:
                uninterrupted, killed = distinct_texts(self._expected[path], self._actual[path])
                texts[path] = f"{path}: {killed} {self._moment}, {uninterrupted} uninterrupted"
        return texts

    def _is_reset_to_start(self, path: str, kind: str) -> bool:
        """Return whether a value is again what it was before the very first step, where no save was seen.

        The loop has to carry it from step to step, because what each step sets is right after the first one.
        """
        if self._at_save or self._is_after_step or self._is_loaded(path, kind):
            return False
        is_carried = variable_of_path(path) in self._carried_names
        return is_carried and path in self._initial and is_same_value(self._initial[path], self._actual[path])

    def _existed_at_load(self, path: str) -> bool:
        """Return whether a local variable may have been there at the load, as a variable of the step was not."""
        if self._loaded is None:
            return True
        return path in captured_values(self._loaded) and (not self._is_later or path in self._own_paths)


def _is_tensor(leaf: ValueLeaf) -> bool:
    return leaf.count is not None and bool(leaf.sample) and " items" not in leaf.text


def _is_outside(path: str, evidence: Mapping[str, ValueLeaf]) -> bool:
    """Return whether a value is a number or text of an object that no saved state has, as the rate of a dropout."""
    leaf = evidence.get(path)
    return leaf is not None and leaf.saved is not True and leaf.count is None and _ATTRIBUTE.search(path) is not None


def _has_generators(saved: StateCapture) -> bool:
    """Return whether the saved state has the process's generators."""
    return any(path.endswith('["python"][0]') for path in saved.entries)
