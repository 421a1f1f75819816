"""Find the state that a resume did not bring back, by comparing a killed run with an uninterrupted one.

Invariant: pure. Four moments are compared: the save, the end of the load, and, in both runs, the moment before the
first step after the resume. A value that differs then is a cause only if it was already wrong after the load, or was
set since. A value that training itself changes until then was not set: it may only follow from another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tierd.check.launch_records import (
    BEFORE_FIRST_STEP,
    DATA_KINDS,
    CheckedRun,
    RankRecord,
    StateCapture,
    captured_values,
    is_same_value,
    kind_of_path,
    position_of,
)
from tierd.check.loop_findings import (
    loader_findings,
    refilled_buffer_findings,
    repeated_step,
    schedule_findings,
    wrong_next_step,
)
from tierd.check.resume_comparison import (
    ResumeComparison,
    StateFinding,
    capture_before,
    find_capture,
    first_step_captures,
    is_load_deferred,
)
from tierd.check.state_comparison import incomparable_keys, is_path_within, nondeterministic_paths

_OBJECT_KINDS = frozenset({"weights", "optimizer", "scheduler", "scaler"})
# A loop does not set these because of a loss, so that a change of them is no consequence of other losses.
_UNCONDITIONAL_KINDS = frozenset({"weights", "buffers", "mode", "optimizer", "generator"})
_STEPPED_KINDS = frozenset({"optimizer", "scheduler", "scaler"})

# The order of the kinds by how well they explain. A generator counts only if training draws from it: it then explains
# each value that was drawn, and so comes before values of no known purpose.
_KIND_ORDERS = {
    "samples": "shuffle, epoch, buffer, prefetch, position, data, state, generator, order, not in the checkpoint",
    "first loss": "weights, buffers, mode, generator, not in the checkpoint, state, data, position, buffer, optimizer, "
    "scheduler, scaler, gradients",
    "later loss": "scheduler, optimizer, scaler, mode, gradients, generator, not in the checkpoint, state, data, "
    "position, buffer, buffers, weights",
    "state": "scheduler, optimizer, scaler, weights, buffers, mode, generator, not in the checkpoint, state, position, "
    "epoch, shuffle, buffer, prefetch, data, order, gradients",
}


def launch_findings(rerun: CheckedRun, killed: CheckedRun, rank: int, launch: int, symptom: str) -> list[StateFinding]:
    """Return the findings that explain why `launch` diverged, the strongest first.

    Args:
        rerun: an uninterrupted run whose states were captured at the step where this launch begins.
        symptom: `samples`, `first loss`, `later loss`, or `state` if all of these are right.
    """
    resumed, uninterrupted = killed.launches[launch - 1][rank], rerun.launches[0][rank]
    loaded = find_capture(resumed, "loaded")
    first_step = resumed.first_step
    if first_step is None:
        return []
    saved = None if loaded is None else find_capture(uninterrupted, "save", loaded.step)
    if loaded is not None and (wrong := wrong_next_step(uninterrupted, saved, loaded, launch, first_step)) is not None:
        return [wrong]
    read, is_later = loaded, saved is not None and loaded is not None and is_load_deferred(saved, loaded)
    if is_later:
        loaded = None
    if (captures := first_step_captures(uninterrupted, resumed, first_step)) is None:
        return []
    then, before = captures
    if read is None and (repeated := repeated_step(uninterrupted, then, before, launch, first_step)) is not None:
        return [repeated]
    shaky = nondeterministic_paths([rerun.launches[0][rank], killed.launches[0][rank]])
    comparison = ResumeComparison(
        saved,
        read,
        is_later,
        capture_before(uninterrupted, then),
        then,
        before,
        first_step,
        uninterrupted.start_capture,
    )
    candidates = [finding for finding in comparison.findings() if finding.path not in shaky]
    candidates += loader_findings(then, before, first_step, symptom)
    if symptom == "samples" and saved is not None and loaded is not None:
        candidates += refilled_buffer_findings(saved, loaded, then, before, first_step)
    if symptom != "samples" and saved is None:  # right samples, so that the loop gave the position to another object
        candidates = [finding for finding in candidates if finding.kind not in DATA_KINDS - {"data", "buffer"}]
    if symptom != "samples" and saved is not None and (early := _early_save_finding(uninterrupted, saved, first_step)):
        return [early]
    if symptom in ("later loss", "state") and saved is not None and loaded is not None:
        candidates += (
            []
            if any(finding.lost for finding in candidates)
            else _stale_object_findings(saved, loaded, uninterrupted, resumed, launch)
        )
    ranked = _rank_causes(candidates, uninterrupted, resumed, first_step, symptom)
    if symptom != "samples":  # right samples were drawn by the right generator
        drawing = _order_generators(*(capture for capture in (saved, then, before) if capture is not None))
        ranked = [finding for finding in ranked if finding.path not in drawing]
    if ranked and (ranked[0].kind in DATA_KINDS or any(finding.lost for finding in ranked)):
        ranked = _drop_followers(ranked)
    if symptom in ("later loss", "state") and not any(finding.is_sure for finding in ranked):
        ranked = [*schedule_findings(uninterrupted, resumed, captures, first_step), *ranked]
    if symptom == "first loss" and not ranked:
        batches = [
            capture
            for capture in (uninterrupted.start_capture, *uninterrupted.captures)
            if capture is not None and capture.moment == "forward"
        ]
        ranked = [finding for finding in comparison.overwritten_findings(batches) if finding.path not in shaky]
    if saved is None and symptom == "samples" and ranked and ranked[0].kind in DATA_KINDS:
        ranked = [finding for finding in ranked if not finding.weak]
    # Gradients follow from any stronger cause.
    ranked = [finding for finding in ranked if finding.kind != "gradients" or ranked[0].kind == "gradients"]
    names = before.names | then.names
    return [msgspec.structs.replace(finding, says=_with_users_name(finding, names)) for finding in ranked]


def _rank_causes(
    candidates: Sequence[StateFinding], uninterrupted: RankRecord, resumed: RankRecord, first_step: int, symptom: str
) -> list[StateFinding]:
    """Return the findings that can be causes, the strongest first."""
    order = _KIND_ORDERS[symptom].split(", ")
    idle, added_to = (
        _idle_generators(uninterrupted, first_step, symptom),
        _accumulated_gradients(uninterrupted, resumed, first_step),
    )

    def can_be_cause(finding: StateFinding) -> bool:
        if finding.kind not in order or finding.path in idle:
            return False
        return _is_cause(finding, symptom) and (finding.kind != "gradients" or finding.path in added_to)

    def rank(finding: StateFinding) -> tuple[bool, bool, bool, int]:
        # Other samples draw another number of times. A batch is drawn before the forward pass, so that what was not
        # lost may be only a consequence of other samples.
        follows = symptom == "samples" and finding.kind == "generator" and not finding.is_sure
        unsure = not finding.lost if symptom == "samples" else not finding.is_sure
        return finding.weak or follows, unsure, position_of(finding.path) is None, order.index(finding.kind)

    return sorted(filter(can_be_cause, candidates), key=rank)


def _drop_followers(ranked: Sequence[StateFinding]) -> list[StateFinding]:
    """Leave out restored generators, which were drawn from another number of times because of what is known."""
    of_data = ranked[0].kind in DATA_KINDS
    return [
        finding
        for finding in ranked
        if finding.lost or finding.kind != "generator" or (finding.is_sure and not of_data)
    ]


def first_resume_findings(rerun: CheckedRun, killed: CheckedRun, rank: int) -> list[StateFinding]:
    """Return the findings of the first resume after which anything differs, where samples and losses do not.

    A later resume loads what differs already, so that nothing that it loads tells of a cause.
    """
    for launch, first_step in killed.first_steps_of_resumes(rank, rerun.launches[0][rank].first_step or 0).items():
        if findings := launch_findings(rerun, killed, rank, launch, "state"):
            return findings
        captures = first_step_captures(rerun.launches[0][rank], killed.launches[launch - 1][rank], first_step)
        if captures is None or any(
            not is_same_value(leaf, captures[1].entries.get(path)) for path, leaf in captures[0].entries.items()
        ):
            return []
    return []


def differences_before(rerun: CheckedRun, killed: CheckedRun, rank: int, launch: int) -> dict[str, str] | None:
    """Return the values that a step may use, and that differ before the first forward pass of `launch`, with texts.

    None if the two runs were not captured then.
    """
    resumed, uninterrupted = killed.launches[launch - 1][rank], rerun.launches[0][rank]
    first_step = resumed.first_step
    captures = None if first_step is None else first_step_captures(uninterrupted, resumed, first_step)
    if first_step is None or captures is None or captures[1].moment != "forward":
        return None
    then, before = captures
    comparison = ResumeComparison(None, None, False, None, then, before, first_step, uninterrupted.start_capture)
    shaky = nondeterministic_paths([uninterrupted, killed.launches[0][rank]])
    left_out = shaky | _order_generators(then, before) | _idle_generators(uninterrupted, first_step, "later loss")
    return {path: text for path, text in comparison.used_differences().items() if path not in left_out}


def paths_overlap(path: str, other_path: str) -> bool:
    """Return whether one of two paths is the other, or below it."""
    return is_path_within(path, {other_path}) or is_path_within(other_path, {path})


def _is_cause(finding: StateFinding, symptom: str) -> bool:
    """Return whether a value can be a cause, and does not only follow from one."""
    if (
        finding.is_sure or finding.kind == "generator"
    ):  # a generator moves by the number of draws, and not by other values
        return True
    if symptom == "samples":  # the data's own values are as close to the samples as anything
        return finding.kind in DATA_KINDS
    if not finding.is_after_step and (finding.weak or (symptom == "later loss" and finding.kind in _STEPPED_KINDS)):
        return True  # no step was made since the load that could have moved it
    return not finding.moved_by_training and (symptom != "first loss" or finding.kind in _UNCONDITIONAL_KINDS)


def _idle_generators(uninterrupted: RankRecord, first_step: int, symptom: str) -> set[str]:
    """Return the generators from which an uninterrupted run did not draw before the losses differed.

    A loader may draw a step's batch one step early, so that each capture until then counts.
    """
    start = find_capture(uninterrupted, "step", first_step - 1)
    end = (
        find_capture(uninterrupted, "step", first_step)
        if symptom == "first loss"
        else find_capture(uninterrupted, "end")
    )
    if symptom == "samples" or start is None or end is None:
        return set()
    after = captured_values(end)
    before = [
        captured_values(capture)
        for capture in uninterrupted.captures[: uninterrupted.captures.index(end)]
        if capture.moment != "backward"
    ]
    return {
        path
        for path, leaf in captured_values(start).items()
        if kind_of_path(path, start.kinds, leaf.text) == "generator"
        and path in after
        and all(is_same_value(earlier.get(path, leaf), after[path]) for earlier in before)
    }


def _with_users_name(finding: StateFinding, names: Mapping[str, str]) -> str:
    """Return the text of a finding with the user's name for the object, if that is not in its state."""
    owner = max((prefix for prefix in names if finding.path.startswith(prefix)), key=len, default="")
    if not owner or owner not in finding.says:
        return finding.says
    return finding.says.replace(finding.path, f"{finding.path} ({names[owner]})", 1)


def _order_generators(*captures: StateCapture) -> set[str]:
    """Return the paths of the generators from which loaders and samplers draw."""
    return {
        path
        for capture in captures
        for path, leaf in captured_values(capture).items()
        if leaf.digest in capture.order_digests
    }


def _accumulated_gradients(uninterrupted: RankRecord, resumed: RankRecord, first_step: int) -> set[str]:
    """Return the gradients that differ when the first backward pass adds to them; most loops clear them before."""
    loaded = find_capture(resumed, "loaded")
    then = find_capture(uninterrupted, "backward", first_step - 1)
    before = find_capture(resumed, "backward", loaded.step if loaded else BEFORE_FIRST_STEP)
    if then is None or before is None:
        return set()
    paths = then.evidence.keys() | before.evidence.keys()
    return {path for path in paths if not is_same_value(then.evidence.get(path), before.evidence.get(path))}


def _early_save_finding(uninterrupted: RankRecord, save: StateCapture, first_step: int) -> StateFinding | None:
    """Report weights that changed between the save before `first_step` and that step's `tierd.observe`."""
    after_step = find_capture(uninterrupted, "step", first_step - 1)
    if after_step is None or uninterrupted.captures.index(after_step) < uninterrupted.captures.index(save):
        return None
    moved = [
        path
        for path, leaf in save.entries.items()
        if (later_leaf := after_step.entries.get(path))
        and later_leaf.digest != leaf.digest
        and kind_of_path(path, save.kinds) == "weights"
    ]
    if not moved:
        return None
    return StateFinding(
        "save before the step",
        moved[0],
        f"the save of step {save.step} was made before the update of that step: {moved[0]} moved between it and "
        "tierd.observe, so a resume leaves that update out; save after optimizer.step()",
    )


def _stale_object_findings(
    saved: StateCapture, loaded: StateCapture, uninterrupted: RankRecord, resumed: RankRecord, launch: int
) -> Iterator[StateFinding]:
    """Report objects of the state that training changes, and that stay after the load as they were loaded."""
    then, now = find_capture(uninterrupted, "end"), find_capture(resumed, "end")
    if then is None or now is None or then.step != now.step:
        return
    incomparable = incomparable_keys(then, now)
    for key, kind in then.kinds.items():
        if kind not in _OBJECT_KINDS or key not in then.forms or key in incomparable:
            continue
        paths = [path for path in then.entries if path.startswith(f"{key}[")]
        moved = [path for path in paths if not is_same_value(saved.entries.get(path), then.entries[path])]
        if moved and all(is_same_value(loaded.entries.get(path), now.entries.get(path)) for path in paths):
            yield StateFinding(
                kind,
                moved[0],
                f"{moved[0]}: {then.entries[moved[0]].text} uninterrupted after step {then.step}, and all of {key} is "
                f"in launch {launch} still as it was loaded: the loop goes on with another object than it restored",
                lost=True,
            )
